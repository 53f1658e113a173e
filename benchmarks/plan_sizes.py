"""Plan runs of 8B and 70B models to 128K and 1M tokens with `pose-plugin plan`, for the table of docs/plan.md.

    python benchmarks/plan_sizes.py              # a minute, without a GPU or weights
    python benchmarks/plan_sizes.py --table      # print the table of the committed results

Nothing is measured. Each plan has 64 rows of 8,192 tokens per step and 1,000 steps, with gradient checkpointing. The
tokens per second are assumptions: 40 % of the 989 TFLOP/s of an H100.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, markdown, save

FILE = RESULTS / "plan_sizes.json"
WINDOW, ROWS, STEPS = 8192, 64, 1000
LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": WINDOW, "rope_theta": 500000.0}
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
BASES = {
    "8B": dict(zip(SHAPE, (4096, 14336, 32, 32, 8), strict=True)),
    "70B": dict(zip(SHAPE, (8192, 28672, 80, 64, 8), strict=True)),
}
SPEED = {"8B": 6000, "70B": 700}
# Base, method, ZeRO stage (3: also FSDP), GPUs.
RUNS = [
    ("8B", "qlora", 0, 8),
    ("8B", "lora", 2, 8),
    ("8B", "full", 2, 32),
    ("8B", "full", 3, 8),
    ("70B", "qlora", 0, 8),
    ("70B", "lora", 3, 8),
    ("70B", "full", 3, 32),
    ("70B", "full", 3, 64),
]
TARGETS = ("128k", "1m")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the committed results")
    parser.add_argument("--results", type=Path, default=FILE, help="the file of results")
    args = parser.parse_args()
    if not args.table:
        save({"plans": [plan(*run, target) for target in TARGETS for run in RUNS]}, args.results)
    print(table(json.loads(args.results.read_text())))
    return 0


def command(base: str, method: str, zero: int, gpus: int, target: str) -> list[str]:
    """Return the arguments of `pose-plugin`; `base` stands for the folder of the base's config.json."""
    options = {
        "base": base,
        "target-length": target,
        "train-length": WINDOW,
        "method": method,
        "zero": zero,
        "gpus": gpus,
        "accumulate": ROWS // gpus,
        "steps": STEPS,
        "tokens-per-second": SPEED[base],
        # The table shows no chances of distances.
        "draws": 10,
    }
    return ["plan", *(f"--{name}={value}" for name, value in options.items()), "--checkpointing", "--json"]


def plan(base: str, method: str, zero: int, gpus: int, target: str) -> dict[str, Any]:
    """Return what the command prints that the table needs."""
    from pose_plugin.cli.main import main as pose_plugin

    words = command(base, method, zero, gpus, target)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**LLAMA3, **BASES[base]}))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = pose_plugin([word.replace(f"--base={base}", f"--base={folder}") for word in words])
    assert code == 0, printed.getvalue()
    found = json.loads(printed.getvalue())
    keys = ("memory_bytes", "memory_bytes_full_length", "tokens", "hours", "hours_full_length", "parameters", "target")
    return {"command": " ".join(words), **{key: found[key] for key in keys}}


def table(results: dict[str, Any]) -> str:
    """Return the table of the page: this run, and full-length rows after the slash."""
    rows = []
    for found, (base, method, zero, gpus) in zip(results["plans"], RUNS * len(TARGETS), strict=True):
        sharding = {0: "", 2: ", ZeRO-2", 3: ", ZeRO-3"}[zero]
        name = {"qlora": "QLoRA", "lora": "LoRA", "full": "all weights"}[method] + sharding
        memory = [value / 2**30 for value in (found["memory_bytes"]["total"], found["memory_bytes_full_length"])]
        tokens = [value / 1e9 for value in (found["tokens"]["all"], found["tokens"]["all_full_length"])]
        hours = (found["hours"], found["hours_full_length"])
        target = f"{found['target'] // 2**20}M" if found["target"] >= 2**20 else f"{found['target'] // 2**10}K"
        pairs = [" / ".join(map(_short, pair)) for pair in (memory, hours)]
        size = f"{tokens[0]:.2g}B / {tokens[1]:,.0f}B"
        rows.append([f"{base}, {target}", name, str(gpus), pairs[0], size, pairs[1]])
    return markdown(["base, target", "training", "GPUs", "GiB on each GPU", "tokens", "hours"], rows)


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
