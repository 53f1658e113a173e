"""Make the quick start's table: means over three seeds of data, positions, order and evaluation prompts.

    python benchmarks/quickstart.py                  # about ten minutes on two idle cores
    python benchmarks/quickstart.py --quick --output /tmp/quick

All rows but the first two are trained with Axolotl and the plugin. In addition to the runs of `make demo` there is "cut
apart": PoSE without the mask, which is what a naive use of its positions trains. The script writes
results/quickstart.json, the table in docs/quickstart.md and docs/figures/quickstart.png. Its seeds were not used to
choose settings.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from common import canvas

ROOT = Path(__file__).parent.parent
CUT_APART = {"cut apart": {"plugins": ["pose_plugin", "benchmarks.cut_apart.CutApart"], "pose": {"self_test": False}}}
MARKS = ("<!-- quickstart table: written by benchmarks/quickstart.py -->", "<!-- end -->")


def quickstart() -> Any:
    # On sys.path, because the evaluation processes import it by its name.
    sys.path.insert(0, str(ROOT / "example_configs" / "quickstart"))
    import run

    return run


def summary(reports: list[Any], lengths: list[int]) -> dict[str, Any]:
    """Return each model's passkey accuracy and perplexity by length: the mean and the value of each seed."""
    models: dict[str, Any] = {}
    for report in reports:
        for model in report.models:
            row = models.setdefault(model.name, {"passkey": {}, "perplexity": {}})
            for length in lengths:
                for measure, found in row.items():
                    found.setdefault(str(length), []).append(model.results[measure].by_length()[length].score)
    for row in models.values():
        for measure in ("passkey", "perplexity"):
            row[measure] = {
                length: {"mean": statistics.fmean(values), "seeds": values} for length, values in row[measure].items()
            }
    return models


def table(models: dict[str, Any], lengths: list[int]) -> str:
    base = lengths[0]
    head = ["passkey, exact match", *(f"{n} ({n // base}×)" for n in lengths), f"perplexity {base} → {lengths[-1]}"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in models.items():
        cells = [f"{row['passkey'][str(n)]['mean']:.2f}" for n in lengths]
        first, last = (row["perplexity"][str(n)]["mean"] for n in (base, lengths[-1]))
        bold = "**" if name == "PoSE" else ""
        lines.append(f"| {bold}{name}{bold} | {' | '.join(cells)} | {first:.0f} → {last:.0f} |")
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    begin, end = (re.escape(mark) for mark in MARKS)
    return re.sub(f"({begin}).*?({end})", lambda match: f"{match[1]}\n{text}\n{match[2]}", page, flags=re.S)


def draw(models: dict[str, Any], lengths: list[int], path: Path) -> None:
    with canvas(path, 7.2, 3.4) as (figure, (axes,)):
        for name, row in models.items():
            means = [row["passkey"][str(n)]["mean"] for n in lengths]
            style = {"color": "black", "linewidth": 2.6, "zorder": 5} if name == "PoSE" else {"linewidth": 1.3}
            (line,) = axes.plot(lengths, means, marker="o", label=name, **style)
            seeds = [row["passkey"][str(n)]["seeds"] for n in lengths]
            low, high = [min(values) for values in seeds], [max(values) for values in seeds]
            axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n}\n{n // lengths[0]}×" for n in lengths])
        axes.axvline(lengths[0], color="grey", linestyle=":", linewidth=1)
        axes.text(lengths[0] * 1.04, 0.5, "trained window", color="grey", rotation=90, va="center")
        axes.set_xlabel("prompt, tokens")
        axes.set_ylabel("passkey retrieved")
        axes.set_ylim(-0.03, 1.05)
        figure.legend(loc="outside right upper")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmark-quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="two steps and prompts and one seed; changes no committed file"
    )
    args = parser.parse_args()
    run = quickstart()
    runs = run.RUNS | CUT_APART
    few = {"trials": 2, "steps": 2} if args.quick else {}
    seeds = range(1 if args.quick else args.seeds)
    # Seeds below 10 were used to choose the settings.
    reports = [run.run(args.output / str(seed), seed=10 + seed, runs=runs, **few) for seed in seeds]
    models = summary(reports, run.LENGTHS)
    result = {
        "seeds": [10 + seed for seed in seeds],
        "trials": few.get("trials", 50),
        "lengths": run.LENGTHS,
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "models": models,
    }
    print(f"\nmeans over {len(reports)} seeds\n{table(models, run.LENGTHS)}")
    results = args.output if args.quick else ROOT / "benchmarks" / "results"
    figures = args.output if args.quick else ROOT / "docs" / "figures"
    for folder in (results, figures):
        folder.mkdir(parents=True, exist_ok=True)
    (results / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(models, run.LENGTHS, figures / "quickstart.png")
    if not args.quick:
        page = ROOT / "docs" / "quickstart.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), table(models, run.LENGTHS)), encoding="utf-8")


if __name__ == "__main__":
    main()
