"""Does training on short rows lose a long window, and do PoSE positions keep it? SmolLM2-135M and its own 8,192 tokens.

    OMP_NUM_THREADS=1 python benchmarks/keep.py all                # every run and its judging; hours of one core
    python benchmarks/keep.py train plain --rate 3e-4              # one run; about an hour of one idle core
    python benchmarks/keep.py judge base plain-3e-4-1              # haystacks of 8,128 tokens, and perplexity at 2,048
    python benchmarks/keep.py ruler base plain-3e-4-1              # RULER at 4,096 tokens; needs its data (.[ruler])
    python benchmarks/keep.py table

All weights are trained on 512 windows of 512 tokens of plays, without a RoPE change. `plain` has ordinary positions.
`pose` has PoSE positions over the model's own window. Both read the same tokens in the same order. A model is judged on
nine haystacks with ten facts each (see recall/PREREGISTRATION.md for the question), by distance from the end.

Fixed before the first run:

- Plain training loses the window if `plain` finds at least .15 fewer facts than the base beyond 4,096 tokens, and the
  interval of the difference over haystacks is below 0. It is tried at three rates, the largest first.
- PoSE keeps the window if `pose` then finds at least .15 more than `plain` at that rate, likewise, with three seeds.
- `pose` is trained only at rates at which `plain` loses the window. If nothing is lost, nothing has to be kept.

RULER (13 tasks of 2 prompts) was added before it was measured, and decides nothing.

Each command resumes. Results: results/keep_training.json, keep.json and keep_ruler.json. Training needs Axolotl.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
from common import RESULTS, machine, markdown  # noqa: E402
from recall import compare, data, judge, run, texts  # noqa: E402
from recall.bands import by_band  # noqa: E402
from recall.rows import load_rows, save_row  # noqa: E402
from recall.settings import WITHIN, Place  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"sampler": "none", "target_margin": 0, "unskipped_ratio": 0.0},
    "pose": {"sampler": "pose", "target_margin": 512, "unskipped_ratio": 0.1},
}
TITLES = {"plain": "ordinary positions", "pose": "PoSE"}
WINDOW, ROWS, BATCH = 512, 512, 2
RATES = ("3e-4", "1e-4", "2e-5")
FAR, LOST, DRAWS = 4096, 0.15, 10_000
PLACES = tuple(
    Place(text, start, 10 * number + start // 10000)
    for number, text in enumerate(("lcet10", "alice29", "topics"), 1)
    for start in (0, 10000, 20000)
)
EDGES = (0, 2048, 4096, 6144, 8192)
TRAINING, JUDGED, RULER = (RESULTS / f"keep{name}.json" for name in ("_training", "", "_ruler"))
RULER_LENGTH, RULER_TRIALS = 4096, 2


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "judge", "ruler", "all", "table"))
    parser.add_argument(
        "names", nargs="*", help="an arm to train (plain, pose), or models to judge (base, plain-1e-4-1)"
    )
    parser.add_argument("--rate", choices=RATES, default=RATES[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("outputs/keep"))
    args = parser.parse_args()
    if args.command == "train":
        for arm in args.names:
            train(args.work, arm, args.rate, args.seed)
    elif args.command == "judge":
        for name in args.names:
            judged(args.work, name)
    elif args.command == "ruler":
        for name in args.names:
            rulered(args.work, name)
    elif args.command == "all":
        judged(args.work, "base")
        for rate in RATES:
            run_one(args.work, "plain", rate, 1)
            if not lost("base", f"plain-{rate}-1"):
                continue
            for seed in (1, 2, 3):
                run_one(args.work, "plain", rate, seed)
                run_one(args.work, "pose", rate, seed)
    rows = load_rows(JUDGED)
    print(table(rows))
    print(differences(rows))


def run_one(work: Path, arm: str, rate: str, seed: int) -> None:
    """Train one model and judge it; nothing if that is done."""
    train(work, arm, rate, seed)
    judged(work, f"{arm}-{rate}-{seed}")


def lost(before: str, after: str) -> bool:
    """Return whether a model finds fewer far facts than another, by the criterion above."""
    mean, _, high = difference(load_rows(JUDGED), [after], [before])
    return mean <= -LOST and high < 0


def difference(rows: list[dict[str, Any]], some: list[str], others: list[str]) -> tuple[float, float, float]:
    """Return how many more far facts some models find than others, and a 95 % interval.

    Args:
        rows: of keep.json.
        some: models, one for each seed.
        others: models with the same seeds, in the same order.

    Returns:
        the mean difference of shares, and the ends of its interval by a bootstrap over haystacks and seeds.
    """
    found = {(row["model"], place_of(row)): far(row) for row in rows}
    read = [{place for model, place in found if model == name} for name in (*some, *others)]
    pairs = list(zip(some, others, strict=True))
    gaps = np.array(
        [[found[a, place] - found[b, place] for a, b in pairs] for place in sorted(set.intersection(*read))]
    )
    return compare.bootstrap(gaps, np.zeros_like(gaps), DRAWS)


def place_of(row: dict[str, Any]) -> str:
    return f"{row['text']}/{row['start']}"


def far(row: dict[str, Any]) -> float:
    """Return the share of facts that were found beyond `FAR` tokens."""
    found = [answer.found for answer in judge.answers_of(row) if answer.distance >= FAR]
    return sum(found) / len(found)


def differences(rows: list[dict[str, Any]]) -> str:
    """Return each trained model's far facts minus the base's, and those of `pose` minus those of `plain`."""
    models = [name for name in dict.fromkeys(row["model"] for row in rows) if name != "base"]
    compared = [(name, "base", [name], ["base"]) for name in models]
    for rate in RATES:
        seeds = [name.removeprefix("pose") for name in models if name.startswith(f"pose-{rate}-")]
        seeds = [seed for seed in seeds if f"plain{seed}" in models]
        if seeds:
            some, others = [f"pose{seed}" for seed in seeds], [f"plain{seed}" for seed in seeds]
            compared.append((f"pose-{rate}", f"plain-{rate}, seeds in both {len(seeds)}", some, others))
    lines = []
    for name, other, some, others in compared:
        mean, low, high = difference(rows, some, others)
        lines.append(f"{name} minus {other}, beyond {FAR}: {mean:+.3f} (95 %: {low:+.3f} to {high:+.3f})")
    return "\n".join(lines)


def train(work: Path, arm: str, rate: str, seed: int) -> None:
    """Train all weights of one arm with Axolotl, from its last checkpoint if there is one; nothing if finished."""
    texts.fetch()
    place = work / f"{arm}-{rate}-{seed}"
    if (place / "model.safetensors").exists():
        return
    file = configured(place, arm, rate, seed)
    run.drop_torn_checkpoints(place)
    begin, before, steps = time.monotonic(), run.last_step(place), ROWS // BATCH
    print(f"$ axolotl train {file}", flush=True)
    run.call(
        [sys.executable, "-m", "axolotl.cli.main", "train", str(file), "--launcher", "python"],
        place.with_suffix(".log"),
    )
    seconds = (time.monotonic() - begin) / max(steps - before, 1)
    row = {"run": place.name, "steps": steps, "seconds_a_step": round(seconds, 2), "loss": run.losses(place)}
    save_row(TRAINING, row, machine("torch", "transformers", "axolotl"))


def configured(place: Path, arm: str, rate: str, seed: int) -> Path:
    """Write the rows and the YAML of one run, and return the YAML's path."""
    import yaml

    config = yaml.safe_load((HERE / "recall" / "train.yaml").read_text(encoding="utf-8"))
    for key in [key for key in config if "lora" in key or key == "adapter"]:
        del config[key]
    rows = place.parent / f"plays-{seed}.jsonl"
    write_plays(rows, seed)
    settings = {"target_length": 8192, "train_length": WINDOW, "rope": "none", "content": "window", "seed": seed}
    config |= {
        "pose": settings | ARMS[arm], "base_model": str(texts.FOLDER / "model"), "output_dir": str(place),
        "dataset_prepared_path": str(place.parent / "prepared"), "learning_rate": float(rate), "seed": seed,
        "micro_batch_size": BATCH, "max_steps": ROWS // BATCH, "bf16": False, "fp16": False, "save_steps": 25,
    }  # fmt: skip
    config["datasets"][0]["path"] = str(rows)
    file = place.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def write_plays(path: Path, seed: int) -> None:
    """Write pieces of plays of 4,096 tokens as JSON lines; nothing if the file exists."""
    import json
    import random

    from transformers import AutoTokenizer

    if path.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(texts.FOLDER / "model")
    plays, draw = data.read_plays(tokenizer, texts.FOLDER), random.Random(f"keep/{seed}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with data.atomic_file(path) as part, part.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            ids = data.play(plays, draw, data.LONG)
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}) + "\n")


def judged(work: Path, name: str) -> None:
    """Judge one model on the haystacks that it has not read yet, and measure its perplexity once."""
    known = {(row["model"], row["text"], row["start"]) for row in load_rows(JUDGED)}
    missing = [place for place in PLACES if (name, place.text, place.start) not in known]
    if not missing:
        return
    model, tokenizer = judge.load(name if name == "base" else str(work / name))
    for place in missing:
        row = {"model": name, **judge.one(model, tokenizer, place, WITHIN)}
        row["bands"] = {band: list(counts) for band, counts in by_band(judge.answers_of(row), EDGES).items()}
        if place.start == 0:
            row["loss_2048"] = loss(model, tokenizer, place.text)
        save_row(JUDGED, row, machine("torch", "transformers"))
        print(f"{name}, {place.text} from {place.start}: {row['bands']}", flush=True)


def rulered(work: Path, name: str) -> None:
    """Measure RULER of one model, once."""
    from pose_plugin.evaluation.measures.ruler import ruler

    if any(row["model"] == name for row in load_rows(RULER)):
        return
    model, tokenizer = judge.load(name if name == "base" else str(work / name))
    scores = ruler(model, tokenizer, [RULER_LENGTH], trials=RULER_TRIALS).metrics()
    save_row(RULER, {"model": name, "trials": RULER_TRIALS, "scores": scores}, machine("torch", "transformers"))
    print(name, scores, flush=True)


def loss(model: Any, tokenizer: Any, text: str, length: int = 2048, windows: int = 8) -> float:
    """Return the mean loss over windows of a text, in nats per token."""
    import torch

    ids = torch.tensor(texts.ids(tokenizer, text)[: length * windows]).view(windows, length)
    with torch.no_grad():
        return sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in ids) / windows


def table(rows: list[dict[str, Any]]) -> str:
    """Found of asked by distance, the perplexity at 2,048 tokens, and RULER's average, by model."""
    averages = {row["model"]: row["scores"][f"ruler/average/{RULER_LENGTH}"] for row in load_rows(RULER)}
    bands = [f"{low}-{high}" for low, high in itertools.pairwise(EDGES)]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        counts = by_band([answer for row in mine for answer in judge.answers_of(row)], EDGES)
        losses = [row["loss_2048"] for row in mine if "loss_2048" in row]
        cells = ["/".join(map(str, counts[band])) if band in counts else "–" for band in bands]
        perplexity = f"{math.exp(sum(losses) / len(losses)):.2f}" if losses else "–"
        ruler = f"{averages[model]:.2f}" if model in averages else "–"
        lines.append([title_of(model), str(len(mine)), *cells, perplexity, ruler])
    return markdown(["model", "texts", *bands, "perplexity, 2048", f"RULER, {RULER_LENGTH}"], lines)


def title_of(model: str) -> str:
    """Return the name of a model in tables, e.g. "PoSE, 3e-4, seed 1"."""
    arm, _, run_of = model.partition("-")
    rate, _, seed = run_of.rpartition("-")
    return f"{TITLES[arm]}, {rate}, seed {seed}" if arm in TITLES else model


if __name__ == "__main__":
    main()
