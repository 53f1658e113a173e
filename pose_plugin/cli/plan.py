"""`pose-plugin plan`: show what a training run will do before it starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin.cli.coverage import MOST_DRAWS
from pose_plugin.cli.parser import amount, count
from pose_plugin.utils.errors import PoSEError, flag
from pose_plugin.utils.lengths import parse_length

if TYPE_CHECKING:
    from pose_plugin.plan.config_reader import Inputs

EPILOG = """\
examples:
  pose-plugin plan config.yaml --gpus 8 --gpu-memory 80 --output plan.png
  pose-plugin plan --base FOLDER --target-length 32768 --train-length 2048 --steps 1000 --rows-of-gpu 8 --gpus 8
"""
# Options that a YAML sets itself, with their defaults. The parser's defaults are None, to tell what was given.
_IN_YAML: dict[str, Any] = {
    "target_length": None,
    "train_length": None,
    "sampler": "pose",
    "rope": "yarn",
    "method": "full",
    "lora_rank": 16,
    "rows_of_gpu": 1,
    "accumulate": 1,
    "zero": 0,
    "checkpointing": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command and return the function that runs it."""
    from pose_plugin.positions import SAMPLERS

    parser.epilog = EPILOG
    add = parser.add_argument
    add("config", nargs="?", help="an Axolotl YAML or a TRL script; without one, give the settings as options")
    add("--base", metavar="FOLDER", help="a folder with the base's config.json, if the YAML names a model that is not "
        "on this machine; weights are not needed")  # fmt: skip
    add("--target-length", type=parse_length, help="the target window in tokens")
    add("--train-length", type=parse_length, help="the trained window in tokens")
    add("--rope", help="yarn, linear, ntk, llama3, auto, …, or base:2e8 (default yarn)")
    add("--sampler", choices=SAMPLERS, metavar="NAME", help=f"{', '.join(SAMPLERS)} (default pose)")
    add("--method", choices=("full", "lora", "qlora", "8bit"), help="what is trained (default full: all weights)")
    add("--lora-rank", type=count, help="rank of lora, qlora and 8bit, on all linear layers (default 16)")
    add("--gpus", type=count, default=1, help="number of GPUs (default 1)")
    add("--gpu-memory", type=amount, metavar="GIB", help="memory of each GPU; a run that does not fit gets a warning")
    add("--rows-of-gpu", type=count, help="rows of a batch on each GPU (default 1; not with a YAML)")
    add("--accumulate", type=count, help="batches per step (default 1; not with a YAML)")
    add("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage; 3 also for FSDP (default 0; not with a YAML)")
    add("--checkpointing", action="store_true", default=None, help="gradient checkpointing (not with a YAML)")
    add("--steps", type=count, help="steps of the training; default: those of the YAML, or computed from --rows")
    add("--rows", type=count, help="rows of the data set; default: counted if it is a local .jsonl file")
    add("--tokens-per-second", type=amount, metavar="N", help="tokens that a GPU trains per second, to estimate hours")
    add("--draws", type=partial(count, most=MOST_DRAWS), help="simulated rows for the coverage (default 4000, or up "
        "to 20000 for a large stretch)")  # fmt: skip
    add("--output", metavar="FILE", help="write a figure: .png, .svg or .pdf")
    add("--json", action="store_true", help="print the plan as JSON")
    return run


def run(args: argparse.Namespace) -> int:
    """Make the plan, draw it if asked to, and print it.

    Raises:
        PoSEError: input that cannot work.
    """
    from pose_plugin.plan import report
    from pose_plugin.plan.plan import as_dict, make_plan
    from pose_plugin.utils.plots import check_ending, require_matplotlib

    if args.output:
        # Before the plan, which can take a minute.
        require_matplotlib("run it without --output")
        check_ending(Path(args.output))
    plan = make_plan(_inputs(args), args.gpu_memory, args.draws, args.tokens_per_second)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        report.draw_plan(plan, args.output)
    if args.json:
        print(json.dumps(as_dict(plan), indent=2, ensure_ascii=False))
        return 0
    print(report.text(plan))
    if args.output:
        print(f"\nWritten: {args.output}")
    return 0


def _inputs(args: argparse.Namespace) -> Inputs:
    """Read the YAML or the script, or build the same values from the options."""
    from pose_plugin.plan.config_reader import from_values, from_yaml
    from pose_plugin.plan.trl_script import from_script

    given = {"gpus": args.gpus, "steps": args.steps, "rows": args.rows}
    ours = {name: value for name in _IN_YAML if (value := getattr(args, name)) is not None}
    if args.config is not None:
        if ours:
            raise PoSEError(
                f"{flag(next(iter(ours)))} cannot be combined with {args.config}, which sets it; change it there"
            )
        read = from_script if args.config.endswith(".py") else from_yaml
        return read(args.config, args.base, **given)
    missing = [flag(name) for name in ("base", "target_length", "train_length") if not getattr(args, name)]
    if missing:
        raise PoSEError(f"{', '.join(missing)} missing: give an Axolotl YAML or a TRL script, or these options")
    ours = _IN_YAML | ours
    method = ours["method"]
    values: dict[str, Any] = {
        "base_model": args.base,
        "sequence_len": ours["train_length"],
        "pose": {"target_length": ours["target_length"], "rope": _rope(ours["rope"]), "sampler": ours["sampler"]},
        "micro_batch_size": ours["rows_of_gpu"],
        "gradient_accumulation_steps": ours["accumulate"],
        "gradient_checkpointing": ours["checkpointing"],
        "bf16": True,
        "deepspeed": {"zero_optimization": {"stage": ours["zero"]}} if ours["zero"] else None,
    }
    if method != "full":
        values |= {
            "adapter": "qlora" if method == "qlora" else "lora",
            "lora_r": ours["lora_rank"],
            "lora_target_linear": True,
            "load_in_4bit": method == "qlora",
            "load_in_8bit": method == "8bit",
        }
    return from_values(values, **given)


def _rope(value: str) -> Any:
    """Return the value of `pose.rope` for --rope, e.g. {"type": "base", "theta": 2e8} for base:2e8."""
    kind, colon, theta = value.partition(":")
    if not colon:
        return kind
    try:
        return {"type": kind, "theta": float(theta)}
    except ValueError:
        raise PoSEError(f"--rope {value}: {theta!r} must be a number, e.g. base:2e8") from None
