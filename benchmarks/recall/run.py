"""Trains the arms of the experiment in PREREGISTRATION.md; goes on after a stop where it was.

    OMP_NUM_THREADS=1 python benchmarks/recall/run.py train ARM --seed 1 --rope yarn-4    # about two hours of one core
    OMP_NUM_THREADS=1 python benchmarks/recall/run.py all                                # every run, in the order fixed
    python benchmarks/recall/run.py all --rope yarn-8                                    # to 65,536 tokens, on a GPU
    python benchmarks/recall/run.py state                                                # what is done

Arms: no_skip, pose_skip, pose_skip_mended, pose_window, two_views, clamped, full_length. Ropes: yarn-4, linear-4,
yarn-8. Needs Axolotl. The two arms pose_skip have the same settings: the first was trained before a fault was mended
(PREREGISTRATION.md, "Changes").
Each finished run adds a row to results/recall_training.json. Judge the models with judge.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import RESULTS, machine  # noqa: E402
from recall import data, texts  # noqa: E402
from recall.rows import load_rows, save_row  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {
    "no_skip": {"sampler": "none", "content": "window", "unskipped_ratio": 0.0, "target_margin": 0},
    "pose_skip": {"sampler": "pose", "content": "skip"},
    "pose_skip_mended": {"sampler": "pose", "content": "skip"},
    "pose_window": {"sampler": "pose", "content": "window"},
    "clamped": {"sampler": "clamped", "content": "window", "unskipped_ratio": 0.0, "target_margin": 0},
    "two_views": {"sampler": "pose", "content": "window"},
    "full_length": {
        "sampler": "none",
        "content": "contiguous",
        "unskipped_ratio": 0.0,
        "target_margin": 0,
    },
}
TITLES = {
    "no_skip": "no skip", "pose_skip": "PoSE", "pose_skip_mended": "PoSE, mended",
    "pose_window": "PoSE, unbroken text", "two_views": "two views", "clamped": "clamped", "full_length": "longer rows",
}  # fmt: skip
"""The arms as tables call them, in the order of the tables."""
PLUGINS = {"two_views": "recall.two_views.TwoViews"}
"""What an arm needs besides its `pose:` block."""
ROPES: dict[str, dict[str, Any]] = {
    "yarn-4": {"type": "yarn", "factor": 4},
    "linear-4": {"type": "linear", "factor": 4},
    "yarn-8": {"type": "yarn", "factor": 8},
}
ORDER = [
    *((arm, "yarn-4", seed) for seed in (1, 2, 3) for arm in ("pose_skip", "no_skip")),
    ("two_views", "yarn-4", 1),
    ("pose_window", "yarn-4", 1),
    ("clamped", "yarn-4", 1),
    *((arm, "linear-4", 1) for arm in ("no_skip", "pose_skip")),
    ("full_length", "yarn-4", 1),
    *(("pose_skip_mended", "yarn-4", seed) for seed in (1, 2, 3)),
]
"""Arm, rope and seed of all runs, as PREREGISTRATION.md has them."""
ORDER_64K = [
    *((arm, "yarn-8", seed) for seed in (1, 2, 3) for arm in ("pose_skip", "no_skip")),
    *((arm, "yarn-8", 1) for arm in ("pose_window", "two_views", "full_length")),
]
"""The runs for a window of 65,536 tokens; judging them needs a GPU."""
ROWS = 2000
WINDOW = 512
FULL_LENGTH = {"yarn-4": (data.LONG, ROWS * WINDOW // data.LONG), "yarn-8": (32768, 600)}
"""Tokens of a row of full length, and how many rows: as the memory of the machine allows."""
OUTPUT = RESULTS / "recall_training.json"


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "all", "state"))
    parser.add_argument("arm", nargs="?", choices=tuple(ARMS))
    parser.add_argument("--seed", type=int, default=1, help="of rows, positions, order and adapter")
    parser.add_argument("--rope", choices=tuple(ROPES), default="yarn-4")
    parser.add_argument("--work", type=Path, default=Path("outputs/recall"), help="rows, checkpoints, adapters")
    parser.add_argument("--steps", type=int, help="fewer only to see that it runs")
    args = parser.parse_args()
    if args.command == "state":
        print(state(args.work))
    elif args.command == "all":
        for arm, rope, seed in ORDER_64K if args.rope == "yarn-8" else ORDER:
            train(args.work, arm, rope, seed, rows_of(arm, rope))
    elif args.arm is None:
        parser.error("train needs an arm")
    else:
        train(args.work, args.arm, args.rope, args.seed, args.steps or rows_of(args.arm, args.rope))


def name_of(arm: str, rope: str, seed: int) -> str:
    """Name the folder of a run."""
    return f"{arm}-{rope}-{seed}"


def window_of(arm: str, rope: str) -> int:
    """Return the tokens of a training row."""
    return FULL_LENGTH[rope][0] if arm == "full_length" else WINDOW


def rows_of(arm: str, rope: str) -> int:
    """Return the rows of an arm."""
    return FULL_LENGTH[rope][1] if arm == "full_length" else ROWS


def train(work: Path, arm: str, rope: str, seed: int, steps: int) -> None:
    """Train one arm with Axolotl, from its last checkpoint if there is one; nothing if it is finished."""
    texts.fetch()
    place = work / name_of(arm, rope, seed)
    if finished(place):
        print(f"{place} is finished")
        return
    file = configured(work, arm, rope, seed, steps)
    drop_torn_checkpoints(place)
    command = [sys.executable, "-m", "axolotl.cli.main", "train", str(file), "--launcher", "python"]
    print(f"$ axolotl train {file}", flush=True)
    begin, before = time.monotonic(), last_step(place)
    call(command, place.with_suffix(".log"))
    seconds = time.monotonic() - begin
    row = {
        "run": place.name, "arm": arm, "rope": rope, "seed": seed, "steps": steps, "resumed_at": before,
        "seconds": round(seconds), "seconds_a_step": round(seconds / max(steps - before, 1), 2), "loss": losses(place),
    }  # fmt: skip
    print(row)
    if steps == rows_of(arm, rope):
        save_row(OUTPUT, row, machine("torch", "transformers", "peft", "axolotl"))


def configured(work: Path, arm: str, rope: str, seed: int, steps: int) -> Path:
    """Write rows and the YAML of one arm, and return the YAML's path."""
    import torch
    import yaml
    from transformers import AutoTokenizer

    window = window_of(arm, rope)
    rows = work / f"rows-{window}-{seed}.jsonl"
    if not rows.exists():
        tokenizer = AutoTokenizer.from_pretrained(texts.FOLDER / "model")
        data.write_rows(tokenizer, data.read_plays(tokenizer, texts.FOLDER), rows_of(arm, rope), window, seed, rows)
    config = yaml.safe_load((HERE / "train.yaml").read_text(encoding="utf-8"))
    place = work / name_of(arm, rope, seed)
    target = texts.NEAR * ROPES[rope]["factor"]
    config["pose"] |= {"target_length": target, "train_length": window, "rope": ROPES[rope], "seed": seed, **ARMS[arm]}
    config["sequence_len"] = max(config["sequence_len"], window)
    config["datasets"][0]["path"] = str(rows)
    config |= {
        "base_model": str(texts.FOLDER / "model"), "dataset_prepared_path": str(work / "prepared"),
        "output_dir": str(place), "seed": seed, "max_steps": steps,
    }  # fmt: skip
    if arm in PLUGINS:
        config["plugins"].append(PLUGINS[arm])
    if not torch.cuda.is_available():
        config["plugins"].append("recall.on_cpu.OnCPU")
    file = place.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def call(command: list[str], log: Path) -> None:
    """Run a command with its output added to a log.

    Raises:
        SystemExit: it failed; the message shows the end of the log.
    """
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Big blocks stay with the process; otherwise every step pays for fresh pages.
    quiet |= {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet["PYTHONPATH"] = os.pathsep.join(paths)
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | quiet).returncode
    if code:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{shlex.join(command)} ended with code {code}; the end of {log}:\n{end}")


def finished(place: Path) -> bool:
    """Tell whether a run has saved its adapter at the end."""
    return (place / "adapter_model.safetensors").exists()


def drop_torn_checkpoints(place: Path) -> None:
    """Remove checkpoints whose saving was interrupted; the trainer's state is written last."""
    for folder in place.glob("checkpoint-*"):
        if not (folder / "trainer_state.json").exists():
            shutil.rmtree(folder)


def last_step(place: Path) -> int:
    """Find the step of the last checkpoint; 0 if there is none."""
    return max((int(folder.name.partition("-")[2]) for folder in place.glob("checkpoint-*")), default=0)


def losses(place: Path) -> dict[str, float]:
    """Read the logged training loss by step from the last checkpoint, every 50 steps."""
    file = place / f"checkpoint-{last_step(place)}" / "trainer_state.json"
    if not file.exists():
        return {}
    history = json.loads(file.read_text(encoding="utf-8"))["log_history"]
    return {str(row["step"]): row["loss"] for row in history if "loss" in row and row["step"] % 50 == 0}


def state(work: Path) -> str:
    """Say of each run that was started whether it is finished, and else its last checkpoint."""
    lines = []
    for file in sorted(work.glob("*.yaml")):
        place = file.with_suffix("")
        lines.append(f"{place.name}: {'finished' if finished(place) else f'checkpoint {last_step(place)}'}")
    for row in load_rows(OUTPUT):
        lines.append(f"{row['run']}: {row['steps']} steps, {row['seconds_a_step']} s a step")
    return "\n".join(lines) or "nothing was started"


if __name__ == "__main__":
    main()
