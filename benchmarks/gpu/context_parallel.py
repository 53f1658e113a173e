"""Compare rows that are split over all GPUs with whole rows on one GPU: losses, saved weights and the saved maximum.

    python benchmarks/gpu/context_parallel.py                     # TRL with ring attention, on at least two GPUs
    python benchmarks/gpu/context_parallel.py --frameworks trl,axolotl     # Axolotl needs flash-attn, ring-flash-attn

Positions are plain (`sampler: none`). Each run prints one JSON line with `"verdict": "verified"` or what is wrong. The
script exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from distributed import BASE, CONFIGS, Run, _data, _environment, _gpus  # noqa: E402

STEPS, ROWS, LENGTH, TARGET = 20, 4, 256, 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default="trl", help="trl, axolotl, or both, separated by a comma")
    args = parser.parse_args()
    gpus = _gpus()
    if gpus < 2:
        print("at least two GPUs are needed", file=sys.stderr)
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _data(home / "rows.jsonl", STEPS * ROWS)
        for framework in args.frameworks.split(","):
            command = {"trl": trl, "axolotl": axolotl}[framework]
            one = run(command(home, home / f"{framework}-one", 1))
            many = run(command(home, home / f"{framework}-many", gpus))
            verdict = problem(one, many, home / f"{framework}-many") or "verified"
            wrong += verdict != "verified"
            found = {"framework": framework, "gpus": gpus, "losses": many["losses"], "alone": one["losses"]}
            print(json.dumps(found | {"verdict": verdict}), flush=True)
    return int(wrong > 0)


def run(command: list[str]) -> dict[str, Any]:
    """Run a command; return its exit status, the end of its output and the losses that it logged."""
    environment = _environment(Run("single", "full", 1, ROWS, False))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    output = done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)]
    return {"code": done.returncode, "end": output[-1500:], "losses": losses}


def problem(one: dict[str, Any], many: dict[str, Any], out: Path) -> str | None:
    """Return what is wrong with the run on many GPUs; None if nothing is."""
    for each in (one, many):
        if each["code"]:
            return f"exit code {each['code']}: {each['end']}"
    # bf16 rounds each logit by up to 2^-9, and parts of a row are added in a different order.
    pairs = list(zip(one["losses"], many["losses"], strict=False))
    if len(pairs) < STEPS or max(abs(a - b) for a, b in pairs) > 0.02:
        return f"losses {many['losses']}, on one GPU {one['losses']}"
    if json.loads((out / "config.json").read_text())["max_position_embeddings"] != TARGET:
        return "the saved config is not the extended one"
    return None


def trl(home: Path, out: Path, gpus: int) -> list[str]:
    """Return the command of a TRL run."""
    script = [str(CONFIGS / "trl" / "sft.py"), "--data", str(home / "rows.jsonl"), "--output", str(out)]
    script += ["--sampler", "none", "--content", "contiguous", "--train-length", str(LENGTH)]
    script += ["--steps", str(STEPS), "--logging-steps", "1", "--batch-size", str(ROWS), "--target-length", str(TARGET)]
    if gpus == 1:
        return [sys.executable, *script]
    file = str(CONFIGS / "accelerate" / "context_parallel.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, "--main_process_port", "0"]
    return [*launch, "--num_processes", str(gpus), "--parallelism_config_cp_size", str(gpus), *script]


def axolotl(home: Path, out: Path, gpus: int) -> list[str]:
    """Return the command of an Axolotl run; its attention is the same on one GPU."""
    values = {
        "base_model": str(BASE),
        "plugins": ["pose_plugin"],
        "pose": {"target_length": TARGET, "rope": "yarn", "sampler": "none"},
        "datasets": [{"path": str(home / "rows.jsonl"), "ds_type": "json", "type": None}],
        "sequence_len": LENGTH,
        "output_dir": str(out),
        "dataset_prepared_path": f"{out}-prepared",
        # Rows of one batch would get positions that Axolotl makes itself.
        "micro_batch_size": 1,
        "gradient_accumulation_steps": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "seed": 42,
        "attn_implementation": "flash_attention_2",
        "context_parallel_size": gpus,
        "bf16": True,
    }
    path = home / f"{out.name}.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    train = [sys.executable, "-m", "axolotl.cli.main", "train", str(path), "--launcher"]
    return [*train, "python"] if gpus == 1 else [*train, "torchrun", "--", f"--nproc_per_node={gpus}", "--standalone"]


if __name__ == "__main__":
    sys.exit(main())
