"""Test whether beacons learn to remember what left the window: the quick start's tiny model, window 128, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/beacon_learning.py                  # all parts, three seeds
    OMP_NUM_THREADS=1 python benchmarks/beacon_learning.py --parts beacons  # one part
    python benchmarks/beacon_learning.py --quick --output /tmp/learning     # only checks that it runs

Parts, each of which replaces its own numbers in beacon_learning.json:
- untrained: the frozen base with a sliding window of 128 or 64 tokens, and in the same intervals as beacons without any
  memory.
- mixed: beacons (beacon_training.py), judged at 4 to 32 times the window (beacon_judging.py). Half of the training
  steps have library texts, half documents with a fact. The loss is the paper's, the mean over all labelled tokens: all
  tokens of texts, and as in instruction data the answers in documents with a fact.
- text, prose: beacons trained on library texts only, or on prose, which the base does not know. Prose
  comes from the Python package index.
- mean: as mixed, with all tokens of the documents labelled.
- weighted: as mixed, with three steps of facts to one of texts; digits weigh as much as all other tokens.
- unfrozen: the base itself, all weights trained on the batches of `weighted` with a sliding window.
- far: the gain from tokens beyond the window in library texts, for a model of this size trained on long texts.
- ablation: masks, ways to draw ratios, and projections, with fewer steps and a loss on the digits only.
- axolotl: `axolotl train example_configs/beacon/quickstart.yaml`, and its adapter judged in the same way.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import beacon_training as training
from beacon_judging import MEASURES, OFFSETS, Alone, Beacons, Sliding, by_window, judge, short_inputs_are_the_bases
from common import about, arguments, canvas, machine, markdown, places, save

WINDOW, INTERVAL = training.WINDOW, training.INTERVAL
LENGTHS = [512, 1024, 2048, 4096]
FAR = [32, 64, 128, 512, 2048]
QUICK = ("untrained", "mixed", "unfrozen", "far", "ablation")
PARTS = ("untrained", "mixed", "text", "prose", "mean", "weighted", "unfrozen", "far", "ablation", "axolotl")
ABLATION: dict[str, dict[str, Any]] = {
    "stepwise, ratio per interval": {},
    "segmentation": {"mask": "segmentation"},
    "full coverage": {"mask": "full"},
    "ratio per instance": {"train_ratio": "instance"},
    "ratio fixed at 8": {"train_ratio": 8},  # the smallest that holds the longest training text
    "q, k, v": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "q, k, v, o, MLP": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    },
}
NAMES = {
    "mixed": "beacons",
    "mixed, another": "beacons, another text's memory",
    "text": "beacons",
    "text, another": "beacons, another text's memory",
    "prose": "beacons",
    "prose, another": "beacons, another text's memory",
    "weighted": "beacons, weighted digits",
    "weighted, another": "beacons, weighted digits, another text's memory",
    "mean": "beacons, all tokens labelled",
    "axolotl": "beacons, by Axolotl",
    "alone": "no memory",
    "sliding": "sliding window",
    "half": "sliding window of 64",
    "unfrozen": "sliding window, base trained too",
}
BEACONS = ("mixed", "mixed, another")
UNTRAINED = ("alone", "sliding", "half")
ROWS = {
    "digit": ("digit found", ("mixed", "weighted", "axolotl", "sliding", "unfrozen")),
    "facts": ("perplexity, recurring facts", (*BEACONS, *UNTRAINED, "unfrozen")),
    "fact digits": ("perplexity, the facts' digits", (*BEACONS, "axolotl", *UNTRAINED, "unfrozen")),
    "text": ("perplexity, library texts", (*BEACONS, "weighted", *UNTRAINED, "unfrozen")),
}
TEXT_ROWS = {
    "text": ("library texts", ("text", "text, another", *UNTRAINED)),
    "prose": ("prose", ("prose", "prose, another", *UNTRAINED)),
}


def values_of(runs: list[dict[str, Any]], measure: str, length: int) -> list[float]:
    """Return one value per seed."""
    return [run[measure][str(length)] for run in runs]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def shown(measure: str, values: list[float]) -> str:
    """Return the mean (of perplexities, over their logarithms) and, for several seeds, the minimum and maximum."""
    text = f"{in_unit(measure, mean(values)):.2f}"
    if len(values) == 1:
        return text
    return f"{text} ({in_unit(measure, min(values)):.2f}–{in_unit(measure, max(values)):.2f})"


def in_unit(measure: str, value: float) -> float:
    """Return the perplexity of a loss; return shares unchanged."""
    return value if measure in ("digit", "training") else math.exp(value)


def table(result: dict[str, Any]) -> str:
    """Return the main table, by measure and reader: mean and range over the seeds."""
    return by_length(result, ROWS) + "\n\n" + about(result["machine"])


def text_table(result: dict[str, Any]) -> str:
    """Return the table of beacons that were trained on one kind of text only."""
    return by_length(result, TEXT_ROWS)


def by_length(result: dict[str, Any], rows_of: dict[str, tuple[str, tuple[str, ...]]]) -> str:
    lengths, rows = result["lengths"], []
    for measure, (label, readers) in rows_of.items():
        for reader in readers:
            runs = [run for run in result["readers"].get(reader, []) if measure in run]
            if runs:
                cells = [shown(measure, values_of(runs, measure, length)) for length in lengths]
                note = "" if len(runs) >= 3 else f" ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
                rows.append([f"{label}: {NAMES[reader]}{note}", *cells])
    return markdown(["", *(f"{n} ({n // WINDOW}x)" for n in lengths)], rows)


def values(result: dict[str, Any], reader: str, measure: str) -> list[dict[str, float]]:
    """Return a reader's values by length, one dict per seed."""
    return [run[measure] for run in result["readers"].get(reader, []) if measure in run]


def offset_table(result: dict[str, Any]) -> str:
    """Return the loss of beacons minus that of other readers on the same texts, and by offset in the interval."""
    names = ["", *(f" offset {low}–{high - 1}" for low, high in OFFSETS)]
    rows = []
    trained = {"mixed": "both", "text": "library texts", "prose": "prose", "weighted": "both, weighted digits"}
    for reader in trained:
        measure = "prose" if reader == "prose" else "text"
        for other in ("alone", f"{reader}, another", "sliding"):
            cells = []
            for name in names:
                key = measure + name
                ours, theirs = (values(result, each, key) for each in (reader, other))
                gaps = [mean([a[n] - b[n] for n in a]) for a, b in zip(ours, theirs, strict=False)]
                spread = f" ({min(gaps):+.3f} to {max(gaps):+.3f})" if not name and len(gaps) > 1 else ""
                cells.append(f"{mean(gaps):+.3f}{spread}" if gaps else "")
            if any(cells):
                name = NAMES[other].removeprefix("beacons, weighted digits, ").removeprefix("beacons, ")
                rows.append([f"trained on {trained[reader]}: minus {name}", *cells])
    return markdown(["nats, beacons minus …", "all tokens", *(name.strip() for name in names[1:])], rows)


def far_table(result: dict[str, Any]) -> str:
    """Return the perplexity of library texts by the window that the model reads with."""
    windows = [window for window in FAR if str(window) in result["far"]["long texts"][0]]
    header = ["library texts, perplexity by window", *map(str, windows)]
    rows = []
    for name, runs in result["far"].items():
        read = [[run[str(n)] for run in runs if str(n) in run] for n in windows]
        rows.append([name, *(shown("text", each) if each else "" for each in read)])
    return markdown(header, rows)


def ablation_table(result: dict[str, Any]) -> str:
    runs_of = result["ablation"]["runs"]
    lengths = [int(n) for n in next(iter(runs_of.values()))[0]["digit"]]
    columns = [("digit", "digit found"), ("fact digits", "perplexity, the facts' digits")]
    header = ["", *(f"{label}, {n // WINDOW}x" for _, label in columns for n in lengths), "training loss"]
    rows = [
        [
            name,
            *(shown(key, values_of(runs, key, n)) for key, _ in columns for n in lengths),
            shown("training", [run["digit_loss"] for run in runs]),
        ]
        for name, runs in runs_of.items()
    ]
    return markdown(header, rows)


def draw(result: dict[str, Any], path: Path) -> None:
    from pose_plugin.utils.plots import COLOURS

    lengths = result["lengths"]
    panels = {"digit": "digit found, key outside the window", "facts": "perplexity, recurring facts"}
    with canvas(path, 6.6, 2.9, columns=2) as (figure, grid):
        for axes, (measure, label) in zip(grid, panels.items(), strict=True):
            for side, reader in enumerate(("mixed", "sliding", "unfrozen")):
                if not (runs := result["readers"].get(reader)):
                    continue
                seen = [values_of(runs, measure, n) for n in lengths]
                line, low, high = ([in_unit(measure, of(each)) for each in seen] for of in (mean, min, max))
                axes.plot(lengths, line, marker="o", color=COLOURS[side], label=NAMES[reader])
                axes.fill_between(lengths, low, high, color=COLOURS[side], alpha=0.2, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{n}\n{n // WINDOW}x" for n in lengths])
            axes.set_xlabel("text, tokens")
            axes.set_ylabel(label)
        grid[0].axhline(1 / 9, color="grey", linestyle=":", linewidth=1)
        grid[0].set_ylim(-0.03, 1.03)
        grid[1].set_yscale("log")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)


class Run:
    """The result so far, saved after each finished part."""

    def __init__(self, path: Path, sizes: dict[str, Any]) -> None:
        self.path = path
        self.result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if {key: self.result.get(key) for key in sizes} != sizes:
            self.result = {"readers": {}, "far": {}, "ablation": {}, "about": {}}
        self.result |= {"machine": machine("torch", "transformers", "peft")} | sizes
        self.sizes = sizes

    def add(self, reader: str, found: dict[str, Any]) -> None:
        self.result["readers"].setdefault(reader, []).append(found)

    def kept(self, part: str, steps: int, readers: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the finished runs with this many steps; if there are none, drop the readers' numbers."""
        done = [each for each in self.result["about"].get(part, []) if each["steps"] == steps]
        if not done:
            for reader in readers:
                self.result["readers"].pop(reader, None)
        return done

    def judge(
        self,
        readers: dict[str, Any],
        seed: int,
        lengths: list[int] | None = None,
        measures: tuple[str, ...] = MEASURES,
    ) -> dict[str, Any]:
        sizes = self.sizes
        return judge(readers, seed, lengths or sizes["lengths"], sizes["trials"], sizes["texts"], measures)

    def save(self) -> None:
        save(self.result, self.path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; a quick run leaves axolotl out")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 10 on; finished ones are kept")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--short", type=int, default=500, help="steps of the ablation's runs")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    results, figures = places(args.output)
    steps, short, tokens, seeds = args.steps, args.short, training.STEP_TOKENS, args.seeds
    sizes = {"window": WINDOW, "interval": INTERVAL, "lengths": LENGTHS, "trials": 100, "texts": 16}
    if args.quick:
        steps, short, tokens, seeds = 4, 4, 512, 1
        sizes |= {"lengths": LENGTHS[:1], "trials": 2, "texts": 2}
    run = Run(results / "beacon_learning.json", sizes)
    # From 10 on, because smaller seeds were used to choose the settings.
    chosen = [10 + seed for seed in range(seeds)]
    for part in args.parts or (QUICK if args.quick else PARTS):
        if part in training.KINDS:
            part_trained(run, part, chosen, steps, tokens)
        else:
            globals()[f"part_{part}"](run, chosen, short if part == "ablation" else steps, tokens)
        run.save()
        draw(run.result, figures / "beacon_learning.png")
    print(table(run.result))
    for print_it in (text_table, offset_table):
        print("\n" + print_it(run.result))
    for section, print_it in (("far", far_table), ("ablation", ablation_table)):
        if run.result[section]:
            print("\n" + print_it(run.result))


def part_untrained(run: Run, seeds: list[int], steps: int, tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    done = run.kept("untrained", 0, UNTRAINED)
    base = AutoModelForCausalLM.from_pretrained(training.BASE).eval()
    readers = {"alone": Alone(base), "sliding": Sliding(base), "half": Sliding(base, WINDOW // 2)}
    for seed in [seed for seed in seeds if seed not in [each["seed"] for each in done]]:
        print(f"untrained, seed {seed}", flush=True)
        found = run.judge(readers, seed)
        if tokens == training.STEP_TOKENS:  # a quick run fetches nothing
            prose = run.judge(readers, seed, measures=("prose",))
            found = {reader: found[reader] | prose[reader] for reader in readers}
        for reader in readers:
            run.add(reader, found[reader])
        done.append({"seed": seed, "steps": 0})
        run.result["about"]["untrained"] = done
        run.save()


def part_trained(run: Run, kind: str, seeds: list[int], steps: int, tokens: int) -> None:
    """Train beacons on one kind of batches (see `training.batches`), and judge them on what they were trained on."""
    steps = min(steps, training.KINDS[kind])
    done = run.kept(kind, steps, (kind, f"{kind}, another"))
    for seed in [seed for seed in seeds if seed not in [each["seed"] for each in done]]:
        print(f"beacons, {kind}, seed {seed}", flush=True)
        start = time.process_time()
        model, losses = training.beacons(steps, seed, tokens, kind)
        spent = time.process_time() - start
        readers = {kind: Beacons(model), f"{kind}, another": Beacons(model, another=True)}
        measures = (kind,) if kind in ("text", "prose") else MEASURES
        for reader, found in run.judge(readers, seed, measures=measures).items():
            run.add(reader, found)
        digits = [round(sum(part) / len(part), 3) for part in (losses[:30], losses[-30:])] if losses else []
        done.append(
            {
                "seed": seed,
                "steps": steps,
                "training_seconds": round(spent),
                "digit_loss": digits,
                "short_inputs_identical": short_inputs_are_the_bases(model),
            }
        )
        run.result["about"][kind] = done
        run.save()


def part_unfrozen(run: Run, seeds: list[int], steps: int, tokens: int) -> None:
    done = run.kept("unfrozen", steps, ("unfrozen",))
    for seed in [seed for seed in seeds if seed not in [each["seed"] for each in done]]:
        print(f"the base, trained too, seed {seed}", flush=True)
        model = training.unfrozen(steps, seed, tokens)
        run.add("unfrozen", run.judge({"unfrozen": Sliding(model)}, seed)["unfrozen"])
        done.append({"seed": seed, "steps": steps})
        run.result["about"]["unfrozen"] = done
        run.save()


def part_far(run: Run, seeds: list[int], steps: int, tokens: int) -> None:
    """Train with full attention, then read with several windows; the largest is full attention."""
    from transformers import AutoModelForCausalLM

    length = max(FAR) if tokens == training.STEP_TOKENS else run.sizes["lengths"][0]
    steps, windows, texts = min(steps, 500), [window for window in FAR if window <= length], run.sizes["texts"]
    base = AutoModelForCausalLM.from_pretrained(training.BASE).eval()
    done = [each for each in run.result["about"].get("far", []) if each["steps"] == steps]
    if not done:
        run.result["far"] = {"base": [], "long texts": []}
    for seed in [seed for seed in seeds if seed not in [each["seed"] for each in done]]:
        print(f"full attention on {length} tokens, seed {seed}", flush=True)
        model = training.long_base(steps, seed, length, tokens)
        run.result["far"]["base"].append(by_window(base, seed, length, [n for n in windows if n <= WINDOW], texts))
        run.result["far"]["long texts"].append(by_window(model, seed, length, windows, texts))
        done.append({"seed": seed, "steps": steps, "length": length})
        run.result["about"]["far"] = done
        run.save()


def part_ablation(run: Run, seeds: list[int], steps: int, tokens: int) -> None:
    names = [*ABLATION] if tokens == training.STEP_TOKENS else [*ABLATION][-1:]
    if run.result["ablation"].get("steps") != steps:
        run.result["ablation"] = {"steps": steps, "runs": {}}
    runs, lengths = run.result["ablation"]["runs"], run.sizes["lengths"][:3:2]
    for seed in seeds:
        for name in names:
            if any(each["seed"] == seed for each in runs.get(name, [])):
                continue
            print(f"{name}, seed {seed}", flush=True)
            model, losses = training.beacons(steps, seed, tokens, "digits", **ABLATION[name])
            found = run.judge({name: Beacons(model)}, seed, lengths, ("digit", "facts"))[name]
            last = losses[-30:]
            runs.setdefault(name, []).append({"seed": seed, "digit_loss": round(sum(last) / len(last), 3), **found})
            print(f"  {runs[name][-1]}", flush=True)
            run.save()


def part_axolotl(run: Run, seeds: list[int], steps: int, tokens: int) -> None:
    """Train from the committed YAML, with its seed and the next ones, into outputs/beacon_quickstart."""
    import yaml
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    root = training.EXAMPLES.parent
    config = training.EXAMPLES / "beacon" / "quickstart.yaml"
    values = yaml.safe_load(config.read_text())
    axolotl = [str(Path(sys.executable).with_name("axolotl")), "train", str(config), "--launcher", "python"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, str(config.with_name("quickstart_data.py"))], check=True, cwd=root, env=environment)
    done = run.kept("axolotl", values["max_steps"], ("axolotl",))
    for number, seed in enumerate(seeds):
        own = values["seed"] + number
        if own in [each["seed"] for each in done]:
            continue
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([*axolotl, "--seed", str(own)], check=True, cwd=root, env=environment)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
        base = AutoModelForCausalLM.from_pretrained(training.BASE)
        model = PeftModel.from_pretrained(base, root / values["output_dir"]).eval()
        run.add("axolotl", run.judge({"axolotl": Beacons(model)}, seed, measures=("digit", "facts"))["axolotl"])
        done.append(
            {
                "config": str(config.relative_to(root)),
                "seed": own,
                "steps": values["max_steps"],
                "seconds": round(spent),
                "axolotl": machine("axolotl")["axolotl"],
                "short_inputs_identical": short_inputs_are_the_bases(model),
            }
        )
        run.result["about"]["axolotl"] = done
        run.save()


if __name__ == "__main__":
    main()
