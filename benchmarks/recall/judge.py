"""Judges models on cached haystacks, one haystack at a time; goes on after a stop where it was.

    OMP_NUM_THREADS=1 python benchmarks/recall/judge.py base yarn-4 outputs/recall/pose_skip-yarn-4-1
    python benchmarks/recall/judge.py base --length 8128
    python benchmarks/recall/judge.py yarn-8 --length 65472                      # on a GPU
    python benchmarks/recall/judge.py --pilot linear-4 ntk-4 yarn-4 yarn-8 --haystacks 1
    python benchmarks/recall/judge.py --table

MODEL is `base`, an untrained rope (`yarn-4`: the kind and its factor), or a folder of run.py. Every model reads the
same haystacks. Results go to results/recall.json, and those of 65,472 tokens to recall_64k.json. With --pilot the texts
are those of the calibration, and the results go to results/recall_pilot.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import RESULTS, machine, markdown  # noqa: E402
from recall import texts  # noqa: E402
from recall.bands import BANDS, FAR_BANDS, Answer, ask, by_band  # noqa: E402
from recall.rows import load_rows, save_row  # noqa: E402
from recall.run import TITLES  # noqa: E402
from recall.settings import COUNT, FAR, JUDGED, JUDGED_FAR, LENGTH, PILOT, WITHIN, WORDING, Place  # noqa: E402
from recall.texts import NEAR  # noqa: E402

from pose_plugin.evaluation.generation import cached  # noqa: E402
from pose_plugin.evaluation.measures.haystack import build  # noqa: E402


def main() -> None:
    """Judge the models that are named on the haystacks that they have not read yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--pilot", action="store_true", help="on the texts of the calibration")
    parser.add_argument("--haystacks", type=int, help="how many of them; default: all")
    parser.add_argument(
        "--length",
        type=int,
        default=LENGTH,
        help=f"tokens of a haystack; {WITHIN} fits the base's window, {FAR} that of yarn-8",
    )
    parser.add_argument("--table", action="store_true", help="print what has been measured")
    args = parser.parse_args()
    output = RESULTS / ("recall_pilot.json" if args.pilot else file_of(args.length))
    judged = JUDGED_FAR if args.length > LENGTH else JUDGED
    places = (PILOT if args.pilot else judged)[: args.haystacks]
    for model in args.models:
        judge(model, places, args.length, output)
    if args.table or not args.models:
        print(table(load_rows(output)))


def file_of(length: int) -> str:
    """Return the file of results for haystacks of a length."""
    return "recall_64k.json" if length > LENGTH else "recall.json"


def edges_of(length: int) -> tuple[int, ...]:
    """Return the edges of the bands for haystacks of a length."""
    return FAR_BANDS if length > LENGTH else BANDS


def judge(name: str, places: Sequence[Place], length: int, output: Path) -> None:
    """Judge one model; each haystack is saved as soon as its last question is answered.

    Args:
        name: as on the command line.
        places: texts, places in them and seeds of the haystacks.
        length: tokens of a haystack; the number of facts grows with it.
        output: file of the results.
    """
    label = Path(name).name
    known = {(row["model"], row["text"], row["start"], row["length"]) for row in load_rows(output)}
    missing = [place for place in places if (label, place.text, place.start, length) not in known]
    if not missing:
        return
    model, tokenizer = load(name)
    for place in missing:
        row = {"model": label, "length": length, **one(model, tokenizer, place, length)}
        save_row(output, row, machine("torch", "transformers", "peft"))
        print(f"{label}, {place.text} from {place.start}: {row['bands']} in {row['cpu_s']} CPU s", flush=True)


def one(model: Any, tokenizer: Any, place: Place, length: int) -> dict[str, Any]:
    """Read one haystack and ask for all of its facts."""
    from pose_plugin.evaluation.model import evaluating

    filler = texts.ids(tokenizer, place.text)[place.start : place.start + length]
    facts = min(round(COUNT * length / LENGTH), len(WORDING.names))
    haystack = build(tokenizer, WORDING, filler, length, facts, place.seed)
    begin = time.process_time()
    with evaluating(model):
        answers = ask(model, tokenizer, cached(model, haystack.ids), haystack.facts, WORDING.question)
    return {
        **asdict(place), "cpu_s": round(time.process_time() - begin),
        "bands": {band: list(counts) for band, counts in by_band(answers, edges_of(length)).items()},
        "answers": [[a.name, a.key, a.distance, a.answer, a.found] for a in answers],
    }  # fmt: skip


def load(name: str) -> tuple[Any, Any]:
    """Load the base, the base with a rope that nothing was trained with, or a trained folder; in float32."""
    from pose_plugin.checkpoints import load as loading

    texts.fetch()
    kind, _, factor = name.partition("-")
    source = loading.describe(name if Path(name).is_dir() else str(texts.FOLDER / "model"))
    if factor.isdigit():
        rope = {"type": kind, "factor": int(factor)}
        source = loading.extended(source, NEAR * int(factor), rope, name)
    elif not Path(name).is_dir() and name != "base":
        raise SystemExit(f"MODEL={name}: give base, a rope such as yarn-4, or a folder of run.py")
    return loading.load(source, dtype="float32"), source.tokenizer


def answers_of(row: dict[str, Any]) -> list[Answer]:
    """Read the answers of one row of results."""
    return [Answer(*fields) for fields in row["answers"]]


def table(rows: list[dict[str, Any]]) -> str:
    """Found of asked by model and band over all haystacks, and the share beyond the old window; models by arm."""
    edges = edges_of(max((row["length"] for row in rows), default=0))
    bands = [f"{low}-{high}" for low, high in itertools.pairwise(edges)]
    lines = []
    for model, length in sorted({(row["model"], row["length"]) for row in rows}, key=lambda row: (_order(row[0]), row)):
        mine = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        answers = [answer for row in mine for answer in answers_of(row)]
        counts = by_band(answers, edges)
        shares = [share([a for a in answers if (a.distance >= NEAR) == far]) for far in (False, True)]
        cells = ["/".join(map(str, counts[band])) if band in counts else "–" for band in bands]
        lines.append([title_of(model), str(length), str(len(mine)), *cells, *shares])
    return markdown(["model", "tokens", "texts", *bands, "share within 8192", "share beyond 8192"], lines)


def _order(model: str) -> int:
    """Sort models that are not trained before the arms, which keep the order of TITLES."""
    return [*TITLES].index(arm) + 1 if (arm := model.partition("-")[0]) in TITLES else 0


def title_of(model: str) -> str:
    """Name a model for readers: `pose_skip-yarn-4-1` is "PoSE, yarn-4, seed 1"."""
    arm, _, rest = model.partition("-")
    if arm not in TITLES:
        return model if model == "base" else f"RoPE only, {model}"
    rope, _, seed = rest.rpartition("-")
    return f"{TITLES[arm]}, {rope}, seed {seed}"


def share(answers: Sequence[Answer]) -> str:
    """Give the share of questions that were answered, or a dash if there are none."""
    return f"{sum(a.found for a in answers) / len(answers):.2f}" if answers else "–"


if __name__ == "__main__":
    main()
