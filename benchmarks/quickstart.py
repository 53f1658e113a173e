"""The quick start's table: means over three seeds, each of data, positions, order and judging documents.

    python benchmarks/quickstart.py                  # about ten minutes on two idle cores
    python benchmarks/quickstart.py --quick --output /tmp/quick

Every row but the first two is trained through Axolotl with the plugin. Beside the runs of `make demo` there is "cut
apart": PoSE without the mask, which is what a naive use of its positions trains. Writes results/quickstart.json, the
table in README.md and the picture docs/figures/quickstart.png. Judging seeds were not used to choose settings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CUT_APART = {
    "cut apart": {"plugins": ["pose_plugin", "benchmarks.cut_apart.CutApart"], "pose": {"self_test": False}}
}
MARKS = ("<!-- quickstart table: written by benchmarks/quickstart.py -->", "<!-- end -->")


def quickstart() -> Any:
    spec = importlib.util.spec_from_file_location("quickstart_run", ROOT / "example_configs/quickstart/run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The judging processes import it by this name.
    import sys

    sys.modules["quickstart_run"] = module
    sys.path.insert(0, str(ROOT / "example_configs/quickstart"))
    spec.loader.exec_module(module)
    return module


def summary(reports: list[Any], lengths: list[int]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each model's passkey accuracy and perplexity, by length."""
    models: dict[str, Any] = {}
    for report in reports:
        for model in report.models:
            row = models.setdefault(model.name, {"passkey": {}, "perplexity": {}})
            for length in lengths:
                row["passkey"].setdefault(str(length), []).append(model.passkey.by_length[length].value)
                row["perplexity"].setdefault(str(length), []).append(model.perplexity.by_length[length].perplexity)
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


def with_table(readme: str, text: str) -> str:
    begin, end = (re.escape(mark) for mark in MARKS)
    return re.sub(f"({begin}).*?({end})", lambda match: f"{match[1]}\n{text}\n{match[2]}", readme, flags=re.S)


def draw(models: dict[str, Any], lengths: list[int], path: Path) -> None:
    from pose_plugin.evaluation.figures import require_matplotlib

    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    styles = {"PoSE": {"color": "#c0392b", "linewidth": 2.6, "zorder": 5}}
    for name, row in models.items():
        means = [row["passkey"][str(n)]["mean"] for n in lengths]
        axes.plot(lengths, means, marker="o", label=name, **styles.get(name, {"linewidth": 1.4, "alpha": 0.85}))
        seeds = list(zip(*(row["passkey"][str(n)]["seeds"] for n in lengths), strict=True))
        axes.fill_between(lengths, [min(s[i] for s in seeds) for i in range(len(lengths))],
                          [max(s[i] for s in seeds) for i in range(len(lengths))], alpha=0.12,
                          color=axes.lines[-1].get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.axvline(128, color="grey", linestyle=":", linewidth=1)
    axes.text(131, 0.5, "trained window", color="grey", rotation=90, va="center", fontsize=8)
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("passkey retrieved")
    axes.set_ylim(-0.03, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmark-quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two steps and prompts, one seed; changes no committed file")
    args = parser.parse_args()
    run = quickstart()
    runs = run.RUNS | CUT_APART
    few = {"trials": 2, "steps": 2} if args.quick else {}
    seeds = range(1 if args.quick else args.seeds)
    # Seeds from 10 on: those below were used to choose the settings.
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
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), table(models, run.LENGTHS)), encoding="utf-8")


if __name__ == "__main__":
    main()
