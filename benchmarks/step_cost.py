"""Measure time and memory of a training step: PoSE against full-length training (Figure 3 of the PoSE paper).

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py            # ten minutes on one core
    python benchmarks/step_cost.py --quick --output /tmp/cost   # only shows that it runs

Both train the quick start's tiny model for a target of 2, 4, 8 and 16 times its window of 128 tokens. Each step has 16
documents as long as the target: PoSE takes a window of 128 tokens out of each (sampler `pose`, content `skip`),
full-length training uses all of it (sampler `none`). A step is collating, forward, backward and AdamW.

- Each measurement is its own process with one thread. The order alternates (pose 2×, full 2×, pose 4×, …) and repeats
  `--rounds` times, so that a slow minute of the machine affects both.
- Time is the median over all steps of processor time, which other programs disturb less than wall time.
- Memory is the median over the rounds of the resident set's peak, minus its size before the first step, when the
  model, the optimizer and all libraries are already loaded.

Compare ratios within one run; seconds and megabytes depend on the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import about, arguments, canvas, machine, markdown, places, save

BASE = Path(__file__).parent.parent / "example_configs" / "quickstart" / "base"
WINDOW, ROWS = 128, 16
FACTORS: tuple[int, ...] = (2, 4, 8, 16)
METHODS = {"pose": "PoSE", "full": "full length"}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes per configuration (default 3)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per process (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--case", help="measure one configuration in this process, e.g. pose:4")
    args = parser.parse_args()
    if args.case:
        method, factor = args.case.split(":")
        print(json.dumps(measure(method, int(factor), args.steps, args.warmup)))
        return
    results, figures = places(args.output)
    factors, rounds, steps, warmup = FACTORS, args.rounds, args.steps, args.warmup
    if args.quick:
        factors, rounds, steps, warmup = (2,), 1, 1, 1
    cases = [(method, factor) for factor in factors for method in METHODS]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for turn in range(rounds):
        for method, factor in cases:
            run = _in_a_fresh_process(method, factor, steps, warmup)
            runs[method, factor].append(run)
            measured = f"{statistics.median(run['seconds']):.3f} s, {run['megabytes']:.0f} MB"
            print(f"round {turn + 1}: {method} {factor}x: {measured}", flush=True)
    result = {
        "machine": machine("torch", "transformers"),
        "window": WINDOW,
        "rows": ROWS,
        "rounds": rounds,
        "steps": steps,
        "cases": [summary(method, factor, runs[method, factor]) for method, factor in cases],
    }
    save(result, results / "step_cost.json")
    draw(result, figures / "step_cost.png")
    print(table(result))


def measure(method: str, factor: int, steps: int, warmup: int) -> dict[str, Any]:
    """Measure one configuration in this process: processor and wall seconds of each step, and growth in megabytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator

    from pose_plugin import extend_context
    from pose_plugin.collator import PositionCollator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = factor * WINDOW
    config = extend_context(AutoConfig.from_pretrained(BASE), target_length=target, rope="linear")
    model = AutoModelForCausalLM.from_pretrained(BASE, config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"target_length": target, "train_length": target, "sampler": "none"}
    if method == "pose":
        settings = {"target_length": target, "train_length": WINDOW, "content": "skip"}
    collate = PositionCollator(default_data_collator, settings)
    # Lists, as a data set returns them. Random tokens cost as much as real ones.
    documents = torch.randint(0, config.vocab_size, (warmup + steps, ROWS, target)).tolist()
    before = _resident("VmRSS")
    _forget_peak()
    seconds, clock = [], []
    for rows in documents:
        start, clock_start = time.process_time(), time.perf_counter()
        batch = collate([{"input_ids": row, "labels": row} for row in rows])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        clock.append(time.perf_counter() - clock_start)
    width = WINDOW if method == "pose" else target
    if batch["input_ids"].shape != (ROWS, width) or not torch.isfinite(loss):
        raise SystemExit(f"{method} {factor}x: trained on {tuple(batch['input_ids'].shape)}, loss {loss}")
    peak = _resident("VmHWM")
    return {
        "seconds": seconds[warmup:],
        "clock": clock[warmup:],
        "megabytes": (peak - before) / 1e6,
        "tokens": batch["input_ids"].numel(),
        "farthest": int(batch["position_ids"].max()),
    }


def summary(method: str, factor: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all rounds, with the extremes."""
    seconds = [s for run in runs for s in run["seconds"]]
    return {
        "method": method,
        "factor": factor,
        "target": factor * WINDOW,
        "tokens": runs[0]["tokens"],
        "farthest_position": max(run["farthest"] for run in runs),
        "seconds": round(statistics.median(seconds), 4),
        "seconds_range": [round(min(seconds), 4), round(max(seconds), 4)],
        "clock_seconds": round(statistics.median(s for run in runs for s in run["clock"]), 4),
        "megabytes": round(statistics.median(run["megabytes"] for run in runs), 1),
        "megabytes_range": [round(f(run["megabytes"] for run in runs), 1) for f in (min, max)],
    }


def table(result: dict[str, Any]) -> str:
    """Return the table of the README."""
    cases = {(c["method"], c["factor"]): c for c in result["cases"]}
    rows = []
    for factor in sorted({factor for _, factor in cases}):
        pose, full = cases["pose", factor], cases["full", factor]
        rows.append([
            f"{factor}x ({pose['target']})",
            f"{pose['seconds']:.3f}", f"{full['seconds']:.3f}", f"{full['seconds'] / pose['seconds']:.1f}",
            f"{pose['megabytes']:.0f}", f"{full['megabytes']:.0f}",
            f"{full['megabytes'] / pose['megabytes']:.1f}",
        ])  # fmt: skip
    header = ["target (tokens)", "PoSE s", "full s", "ratio", "PoSE MB", "full MB", "ratio"]
    return markdown(header, rows) + "\n\n" + about(result["machine"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw memory and time by target, PoSE next to full length."""
    from pose_plugin.utils.plots import COLOURS

    cases = {(c["method"], c["factor"]): c for c in result["cases"]}
    factors = sorted({factor for _, factor in cases})
    width = 0.38
    panels = {"megabytes": "peak memory of a step (MB)", "seconds": "processor time of a step (s)"}
    with canvas(path, 6.4, 2.9, columns=2) as (figure, grid):
        for axes, (key, label) in zip(grid, panels.items(), strict=True):
            for side, (method, name) in enumerate(METHODS.items()):
                values = [cases[method, factor][key] for factor in factors]
                places = [i + (side - 0.5) * width for i in range(len(factors))]
                bars = axes.bar(places, values, width * 0.94, color=COLOURS[side], label=name)
                shown = [f"{v:.0f}" if key == "megabytes" else f"{v:.2f}" for v in values]
                axes.bar_label(bars, shown, padding=1.5, fontsize=6.5, color="#444444")
            axes.set_xticks(range(len(factors)), [f"{f * WINDOW}\n{f}x" for f in factors])
            axes.tick_params(axis="x", length=0)
            axes.margins(y=0.1)
            axes.grid(True, axis="y")
            axes.set_xlabel("target window (tokens)")
            axes.set_ylabel(label)
        figure.get_layout_engine().set(wspace=0.08)
        handles, _ = grid[0].get_legend_handles_labels()
        labels = [f"PoSE, rows of {WINDOW} tokens", "full length, rows of the target's length"]
        figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)


def _in_a_fresh_process(method: str, factor: int, steps: int, warmup: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", f"{method}:{factor}"]
    command += ["--steps", str(steps), "--warmup", str(warmup)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method} {factor}x: the measuring process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _resident(key: str) -> int:
    """Return bytes of the resident set: VmRSS is its size now, VmHWM its peak so far."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}; this benchmark needs Linux")


def _forget_peak() -> None:
    """Reset the peak; otherwise that of loading the model could hide a small step's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    main()
