"""`pose-plugin init`: write a complete Axolotl YAML or TRL script, with the reason for each choice."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from pose_plugin.cli.parser import amount
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import write_whole
from pose_plugin.utils.lengths import parse_length

EPILOG = """\
examples:
  pose-plugin init HuggingFaceTB/SmolLM2-135M --target-length 32k --data rows.jsonl --gpus 1 --output config.yaml
  pose-plugin plan config.yaml
  axolotl train config.yaml

  pose-plugin init HuggingFaceTB/SmolLM2-135M --target-length 32k --data rows.jsonl --gpus 1 --output train.py
  pose-plugin plan train.py
  python train.py
"""
# The endings of what can be written; the first one of each is in the default name.
_FILES = {"axolotl": ("config.yaml", (".yaml", ".yml")), "trl": ("train.py", (".py",))}


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command and return the function that runs it."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("base_model", help="a folder or a hub name")
    add("--target-length", type=parse_length, required=True, help="the target window in tokens: 81920 or 80k")
    add("--data", required=True, metavar="FILE", help="a JSONL file with text, messages, conversations, instruction or "
        "input_ids in each row")  # fmt: skip
    add("--framework", choices=tuple(_FILES), help="default: trl if --output ends in .py, else axolotl")
    add("--gpus", type=int, choices=range(0, 1025), metavar="N", default=1, help="their number; 0: a CPU (default 1)")
    add("--gpu-memory", type=amount, metavar="GIB", default=24.0, help="memory of each GPU in GiB (default 24)")
    add("--method", choices=("full", "lora", "qlora"), help="default: the first whose estimated memory fits")
    add("--train-length", type=parse_length, help="the trained window in tokens (default: the base's, at most 4096)")
    add("--base", metavar="FOLDER", help="a folder with the base's config.json, if the base is not on this machine")
    add("--output", metavar="FILE", help="the file to write (default config.yaml, for trl train.py)")
    return run


def run(args: argparse.Namespace) -> int:
    """Write the YAML or the script.

    Raises:
        PoSEError: input that cannot work, or the file exists with another text.
    """
    from pose_plugin.plan.init import Wish, write_config

    framework = args.framework or ("trl" if (args.output or "").endswith(".py") else "axolotl")
    usual, endings = _FILES[framework]
    file = Path(args.output or usual)
    if file.suffix not in endings:
        if args.framework is None:
            raise PoSEError(
                f"--output {file} ends neither in .yaml or .yml (Axolotl) nor in .py (TRL); name it "
                f"{file.with_suffix('.yaml')} or {file.with_suffix('.py')}"
            )
        raise PoSEError(
            f"--output {file} does not end in {' or '.join(endings)}, as files of --framework {framework} do; "
            f"name it {file.with_suffix(endings[0])}, or leave one of the two options out"
        )
    wish = Wish(
        base=args.base_model,
        target=args.target_length,
        data=args.data,
        gpus=args.gpus,
        gpu_gib=args.gpu_memory,
        method=args.method,
        window=args.train_length,
        place=args.base,
        output=os.path.join("outputs", file.stem),
    )
    text, notes = write_config(wish, framework)
    # The same text is that of the same command, which may have been killed before it said so.
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        raise PoSEError(f"--output {file} exists already; name a new file")
    write_whole(file, text)
    launcher = {"axolotl": "axolotl train", "trl": "python"}[framework]
    if framework == "trl" and args.gpus > 1:
        launcher = f"accelerate launch --num_processes {args.gpus}"
    # A base whose config.json was given is not on this machine, so the plan needs it too.
    plan = ["pose-plugin", "plan", str(file), *(["--base", args.base] if args.base else [])]
    plan += ["--gpus", str(args.gpus)] if args.gpus > 1 else []
    print("\n".join([f"wrote {file}", *(f"note: {note}" for note in notes)]))
    print(f"next: {shlex.join(plan)}, then {launcher} {shlex.quote(str(file))}")
    return 0
