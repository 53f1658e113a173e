"""`pose-plugin init`: write a complete Axolotl YAML, with the reason for each choice."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from pose_plugin.cli.parser import amount
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import write_whole
from pose_plugin.utils.lengths import parse_length

EPILOG = """\
example:
  pose-plugin init HuggingFaceTB/SmolLM2-135M --target-length 32k --data rows.jsonl --gpus 1 --output config.yaml
  pose-plugin plan config.yaml
  axolotl train config.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command and return the function that runs it."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("base_model", help="a folder or a hub name")
    add("--target-length", type=parse_length, required=True, help="the target window in tokens: 81920 or 80k")
    add("--data", required=True, metavar="FILE", help="a JSONL file with text, messages, conversations, instruction or "
        "input_ids in each row")  # fmt: skip
    add("--gpus", type=int, choices=range(0, 1025), metavar="N", default=1, help="0 for a CPU (default 1)")
    add("--gpu-memory", type=amount, metavar="GIB", default=24.0, help="of each GPU (default 24)")
    add("--method", choices=("full", "lora", "qlora"), help="default: the first of full, lora, qlora that fits")
    add("--train-length", type=parse_length, help="the trained window (default: the base's, at most 4096)")
    add("--base", metavar="FOLDER", help="a folder with the base's config.json, if the base is not on this machine")
    add("--output", metavar="FILE", default="config.yaml", help="the YAML (default config.yaml)")
    return run


def run(args: argparse.Namespace) -> int:
    """Write the YAML.

    Raises:
        PoSEError: input that cannot work, or the file exists with another text.
    """
    from pose_plugin.plan.init import Wish, write_config

    file = Path(args.output)
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
    text = write_config(wish)
    # The same text is that of the same command, which may have been killed before it said so.
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        raise PoSEError(f"--output {file} exists already; name a new file")
    write_whole(file, text)
    print(f"wrote {file}\nnext: pose-plugin plan {file}, then axolotl train {file}")
    return 0
