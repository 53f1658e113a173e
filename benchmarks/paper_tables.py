"""Repeat the PoSE paper's tables at small scale: the quick start's tiny model, data and evaluation, three seeds.

    python benchmarks/paper_tables.py --tables 5,4,6,content,settings,2     # hours on one core, needs Axolotl
    python benchmarks/paper_tables.py --tables 5 --quick --output /tmp/tables
    python benchmarks/paper_tables.py --page                       # only write docs/paper_tables.md again

Each finished run is written to `results/paper_table_<name>.json` at once, and a rerun continues after it. Rows that the
quick start's benchmark has trained come from `results/quickstart.json`, which has the same seeds. The script then
writes docs/paper_tables.md, which shows the runs that exist. "Full length" (table 1) takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, machine, markdown, save

from pose_plugin.utils.tables import counted

ROOT = HERE.parent
PAGE = ROOT / "docs" / "paper_tables.md"
BASE, TARGET, FAR = 128, 2048, 8192
LENGTHS = [128, 256, 512, 1024, TARGET]
FAR_LENGTHS = [128, 512, 2048, 4096, FAR]
THETA = 10_000  # of the tiny model
SEEDS = (10, 11, 12)
PLACES = {
    "3c": "Figure 3c",
    "content": "Content",
    "settings": "Settings",
    "base": "Base change",
    "x2": "Stretch",
    "x4": "Stretch",
}
VERDICTS = "What the paper says, and whether these numbers agree. Thresholds in brackets are ours, and some measures:"

Values = dict[str, dict[str, dict[int, float]]]
"""Mean over seeds by row, measure ("passkey", "perplexity") and length."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        changes: what differs from the quick start's pose.yaml; None for a model that is not trained.
        committed: its name in quickstart.json, if it has been trained there.
        rope: `rope` of a model that is not trained; None for the base as it is.
        long_documents: whether the passkey documents are as long as the target, for training at full length.
        same_as: folder of another table's row with the same settings; its model is judged if it has been trained.
    """

    changes: dict[str, Any] | None = field(default_factory=dict)
    committed: str = ""
    rope: dict[str, Any] | None = None
    long_documents: bool = False
    same_as: str = ""


@dataclass(frozen=True)
class Table:
    """One table of the paper.

    Attributes:
        title: what it compares.
        rows: ours, by name.
        paper: header and rows of the paper's table, quoted.
        source: where the paper's numbers are.
        claims: what the paper says, and whether our means agree.
        lengths: of the evaluation, in tokens.
        every: for a table by step: steps between two measurements.
        note: what a reader must know about our rows.
    """

    title: str
    rows: dict[str, Row]
    paper: list[list[str]]
    source: str
    claims: dict[str, Callable[[Values], bool]]
    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    every: int | None = None
    note: str = ""


def _pose(**settings: Any) -> Row:
    return Row({"pose": settings})


def _no_skip(**settings: Any) -> Row:
    return Row({"pose": {"sampler": "none", "content": "window", **settings}})


def _full(**changes: Any) -> Row:
    return Row(
        {"pose": {"sampler": "none", "content": "contiguous", "train_length": TARGET, "target_margin": 0}, **changes},
        long_documents=True,
    )


POSE, NO_SKIP = Row(committed="PoSE"), Row(committed="no skip")
RANDPOS, ORIGINAL = Row(committed="RandPos"), Row(None, committed="original")


ROPES: dict[str, dict[str, Any]] = {name: {"type": name.lower()} for name in ("linear", "NTK", "YaRN")}


def _each_way(kind: str, rope: dict[str, Any], target: int) -> dict[str, Row]:
    """Return three rows of one RoPE: untrained, without skips, and with PoSE."""
    return {
        f"{kind}, RoPE only": Row(None, rope=rope),
        f"{kind}, no skip": _no_skip(rope=rope, target_length=target),
        f"{kind}, PoSE": _pose(rope=rope, target_length=target),
    }


def _stretch(target: int) -> Table:
    """Return the rows of table 6 for a smaller target."""
    rows: dict[str, Row] = {}
    for kind, rope in ROPES.items():
        rows |= _each_way(kind, rope, target)
    lengths = [length for length in LENGTHS if length <= target]
    return Table(f"{target // BASE} times the window (128 → {target})", rows, [], "not in the paper", {}, lengths)


def _loss(values: Values, name: str, length: int = TARGET) -> float:
    return values[name]["perplexity"][length]


def _keys(values: Values, name: str, length: int = TARGET) -> float:
    return values[name]["passkey"][length]


def _alike(values: Values, names: Sequence[str], length: int = TARGET) -> bool:
    losses = [_loss(values, name, length) for name in names]
    return max(losses) <= 1.03 * min(losses)


TABLES = {
    "5": Table(
        "Number of chunks",
        {
            "1 chunk (no skip, content: window)": NO_SKIP,
            "2 chunks (content: skip)": POSE,
            "3 chunks (content: skip)": _pose(chunks=3),
            "one chunk per token (RandPos, content: window)": RANDPOS,
        },
        [
            ["chunks, Proof-pile perplexity", "2k", "4k", "8k", "16k"],
            ["1", "2.83", "> 10³", "> 10³", "> 10³"],
            ["2", "2.95", "2.74", "2.61", "2.60"],
            ["3", "2.93", "2.72", "2.60", "2.59"],
            ["2048", "7.26", "6.83", "6.76", "7.73"],
        ],
        "Table 5",
        {
            "Without a skip the model fails at the target (passkeys below 20 %).": lambda v: (
                _keys(v, "1 chunk (no skip, content: window)") < 0.2 < _keys(v, "2 chunks (content: skip)")
            ),
            "Three chunks are at least as good as two at the target (perplexity).": lambda v: (
                _loss(v, "3 chunks (content: skip)") <= _loss(v, "2 chunks (content: skip)")
            ),
            "One chunk per token damages the model within the trained window (perplexity 10 % higher).": lambda v: (
                _loss(v, "one chunk per token (RandPos, content: window)", BASE)
                > 1.1 * _loss(v, "2 chunks (content: skip)", BASE)
            ),
        },
    ),
    "4": Table(
        "The content of the chunks",
        {
            "v random (content: skip)": POSE,
            "v = 0 (content: contiguous)": _pose(content="contiguous"),
            "v = u (content: aligned)": _pose(content="aligned"),
        },
        [
            ["GovReport perplexity", "2k", "4k", "8k", "16k"],
            ["v random", "4.84", "4.68", "4.60", "4.60"],
            ["v = 0", "4.85", "4.72", "4.64", "4.68"],
            ["v = u", "4.84", "4.68", "4.60", "4.60"],
        ],
        "Table 4",
        {
            "The three have nearly the same perplexity at the target (within 3 %).": lambda v: _alike(v, list(v)),
        },
        note="*u* is the skip of a chunk's positions, and *v* the skip of its text. With v = 0, every epoch reads the "
        "same first\n128 tokens of a document. With v = u, positions are those of the tokens in their document, so the "
        "passkey\ndocuments, which have at most 128 tokens, have no skip.",
    ),
    "6": Table(
        "Kinds of interpolation",
        {
            "original": ORIGINAL,
            "linear, RoPE only": Row(None, committed="RoPE only"),
            "linear, no skip": NO_SKIP,
            "linear, PoSE": POSE,
        }
        | _each_way("NTK", ROPES["NTK"], TARGET)
        | _each_way("YaRN", ROPES["YaRN"], TARGET),
        [
            ["GovReport perplexity", "2k", "4k", "8k", "16k"],
            ["original", "4.74", "> 10³", "> 10³", "> 10³"],
            ["linear, PI only", "43.80", "43.35", "45.89", "54.33"],
            ["linear, full length", "4.87", "4.70", "4.61", "4.59"],
            ["linear, PoSE", "4.84", "4.68", "4.60", "4.60"],
            ["NTK, PI only", "5.62", "5.61", "5.80", "550"],
            ["NTK, full length", "4.78", "4.63", "4.57", "7.24"],
            ["NTK, PoSE", "4.79", "4.63", "4.57", "7.24"],
            ["YaRN, PI only", "5.57", "5.51", "5.57", "5.83"],
            ["YaRN, full length", "4.78", "4.62", "4.54", "4.53"],
            ["YaRN, PoSE", "4.79", "4.63", "4.55", "4.55"],
        ],
        "Table 6",
        {
            f"{kind}: PoSE is better than RoPE only, and RoPE only than the original, at the target (perplexity).": (
                lambda v, kind=kind: _loss(v, f"{kind}, PoSE") < _loss(v, f"{kind}, RoPE only") < _loss(v, "original")
            )
            for kind in ("linear", "NTK", "YaRN")
        }
        | {
            "NTK fails at the target, where YaRN does not (perplexity of PoSE 10 % higher).": lambda v: (
                _loss(v, "NTK, PoSE") > 1.1 * _loss(v, "YaRN, PoSE")
            ),
        },
    ),
    "content": Table(
        "Unbroken text instead of a skip in the content",
        {
            "content: skip": POSE,
            "content: window": _pose(content="window"),
            "content: window, no skip": NO_SKIP,
        },
        [],
        "not in the paper",
        {},
        note="The two rows with *content: window* differ in positions only. Both read one unbroken window of each "
        "document, drawn\nin the same way. So this pair shows what the positions alone give.",
    ),
    "settings": Table(
        "Margin, unskipped rows, and clamped positions",
        {
            "PoSE, target_margin: 128": POSE,
            "PoSE, target_margin: 0": _pose(target_margin=0),
            "PoSE, target_margin: 128, unskipped_ratio: 0.1": _pose(unskipped_ratio=0.1),
            "clamped, target_margin: 0": _pose(sampler="clamped", target_margin=0),
        },
        [],
        "not in the paper",
        {},
        note="All rows use `content: skip`. *clamped* leaves about as many rows unskipped as it moves to the very end.",
    ),
    "base": Table(
        "A larger RoPE base, 16 times the window (128 → 2,048)",
        _each_way("base × 256", {"type": "base", "theta": 256 * THETA}, TARGET)
        | _each_way("base × 1,350", {"type": "base", "theta": 1350 * THETA}, TARGET),
        [],
        "not in the paper",
        {},
        note="The tiny model's base is 10,000. NTK, in table 6, is a base × 24. For a stretch *s*, × 256 is *s*², and "
        "× 1,350 is\n*s*^2.6. By this power the [80K recipe](recipe_80k.md) raises its base: from 5e5 to 2e8, for a "
        "stretch of 10.",
    ),
    "2": Table(
        "64 times the window (128 → 8,192)",
        {f"{kind}, PoSE": _pose(rope=rope, target_length=FAR) for kind, rope in ROPES.items()},
        [
            ["PG-19 perplexity, 2k → 128k", "32k", "64k", "96k", "128k"],
            ["linear, PoSE", "16.90", "22.47", "26.77", "31.18"],
            ["NTK, PoSE", "8.04", "14.84", "29.48", "34.80"],
            ["YaRN, PoSE", "9.32", "10.36", "10.77", "11.33"],
        ],
        "Table 2",
        {
            "YaRN has a lower perplexity than linear at 64 times.": lambda v: (
                _loss(v, "YaRN, PoSE", FAR) < _loss(v, "linear, PoSE", FAR)
            ),
        },
        FAR_LENGTHS,
    ),
    "x4": _stretch(512),
    "x2": _stretch(256),
    "3c": Table(
        "Perplexity while training",
        {"PoSE": _pose(), "full length": _full()},
        [],
        "Figure 3c, a picture: both fall within 100 steps and stay close",
        {
            "PoSE and full length stay close (perplexity within 3 % at the last step).": lambda v: _alike(
                v, ["PoSE", "full length"], max(v["PoSE"]["perplexity"])
            )
        },
        [TARGET],
        every=50,
        note="All scores are at 2,048 tokens. Table 1 measures the same *full length* models with more prompts. Its\n"
        "PoSE models are other runs with the same seeds.",
    ),
    "1": Table(
        "Full length, with as many rows as PoSE",
        {
            "original": ORIGINAL,
            "full length": replace(_full(), same_as="table-3c-row-1"),
            "RandPos": RANDPOS,
            "PoSE": POSE,
        },
        [
            ["GovReport perplexity, 2k → 16k", "2k", "4k", "8k", "16k"],
            ["original", "4.74", "> 10³", "> 10³", "> 10³"],
            ["full length", "4.87", "4.70", "4.61", "4.59"],
            ["RandPos", "11.63", "11.17", "11.54", "15.16"],
            ["PoSE", "4.84", "4.68", "4.60", "4.60"],
        ],
        "Table 1; passkeys in Figure 2b: PoSE and full length at least 90 %, the others near 0",
        {
            "PoSE is as good as full length at the target (perplexity within 3 %).": lambda v: _alike(
                v, ["PoSE", "full length"]
            ),
            "PoSE and full length find at least 90 % of the keys at the target.": lambda v: (
                min(_keys(v, "PoSE"), _keys(v, "full length")) >= 0.9
            ),
            "RandPos is worse than PoSE at every length (perplexity).": lambda v: all(
                _loss(v, "RandPos", n) > _loss(v, "PoSE", n) for n in LENGTHS
            ),
        },
    ),
}


# The tables of `when_to_skip` and the target of each.
STRETCHES = {"x2": 256, "x4": 512, "6": TARGET}


def quickstart() -> Any:
    # On sys.path, because the evaluation processes import it by its name.
    sys.path.insert(0, str(ROOT / "example_configs" / "quickstart"))
    import run

    return run


def result_path(results: Path, name: str) -> Path:
    return results / f"paper_table_{name}.json"


def kept(results: Path, name: str) -> dict[str, Any]:
    path = result_path(results, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"table": name, "runs": {}}


def committed_runs(row: Row) -> dict[str, Any]:
    """Return a row's scores by seed as quickstart.json has them; {} if it is not there."""
    data = json.loads((RESULTS / "quickstart.json").read_text(encoding="utf-8"))
    found = data["models"].get(row.committed, {})
    return {
        str(seed): {m: {n: by["seeds"][i] for n, by in scores.items()} for m, scores in found.items()}
        for i, seed in enumerate(data["seeds"])
        if found
    }


def make_data(run: Any, folder: Path, seed: int, long_documents: bool) -> None:
    """Write the quick start's data of a seed, or the same with passkey documents as long as the target."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(run.HERE / "make_data.py"), "--out", str(folder / "data"), "--seed", str(seed)]
    run.command(command, folder / "data.log")
    if not long_documents:
        return
    import corpus
    import make_data as quick
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.HERE / "base")
    maker = corpus.PasskeyMaker(tokenizer)
    filler = tokenizer.encode(maker.builder.template.filler * 2 * TARGET, add_special_tokens=False)[:TARGET]
    stop = tokenizer.convert_tokens_to_ids(".")
    maker.ends = [0, *(index + 1 for index, token in enumerate(filler) if token == stop)]
    rng, texts = random.Random(seed), corpus.tokenise(tokenizer, corpus.read_texts(corpus.TRAINING_FILES))
    rows = [maker.draw(rng, longest=TARGET)[0] for _ in range(quick.DOCUMENTS)]
    rows += [corpus.text_document(texts, TARGET, rng) for _ in range(quick.DOCUMENTS)]
    quick.write_rows(folder / "data" / "train.jsonl", rows)


def one_run(table: Table, name: str, row: Row, seed: int, work: Path, quick: bool) -> dict[str, Any]:
    """Train and evaluate one row with one seed; `name` is that of its folder.

    Returns:
        scores by measure and length; for a table by step, by measure and step.
    """
    run = quickstart()
    folder = work / str(seed) / ("long" if row.long_documents else "short")
    if not (folder / "data" / "judge.txt").exists():
        make_data(run, folder, seed, row.long_documents)
    source = (name, str(run.HERE / "base"), row.rope or None)
    if row.changes is not None:
        changes = row.changes
        if table.every:
            block = {"every": 1 if quick else table.every, "tasks": ["passkey", "perplexity"], "lengths": table.lengths}
            block |= {"texts": str(folder / "data" / "judge.txt"), "max_windows": 8, "trials": 2 if quick else 20}
            saved = {"save_strategy": "steps", "save_steps": 2 if quick else 600}
            changes = {**changes, **saved, "pose": {**changes["pose"], "evaluate": block}}
        trained = folder / row.same_as
        if not row.same_as or not (trained / "model.safetensors").exists():
            config = run.write_config(name, changes, folder, seed, 2 if quick else None)
            run.train(config)
            trained = config.parent
        source = (name, str(trained), None)
        if table.every:
            return by_step(trained)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as judges:
        trials = 2 if quick else 50
        (model,) = judges.submit(run.judge, [source], folder, trials, seed, table.lengths).result()
    if row.changes is not None:
        shutil.rmtree(Path(source[1]) / "prepared", ignore_errors=True)
    return {
        measure: {str(n): result.by_length()[n].score for n in table.lengths}
        for measure, result in model.results.items()
    }


def by_step(folder: Path) -> dict[str, Any]:
    """Return what was logged while training, by measure and step."""
    state = next(folder.glob("checkpoint-*/trainer_state.json"))
    found: dict[str, dict[str, float]] = {"passkey": {}, "perplexity": {}}
    for entry in json.loads(state.read_text(encoding="utf-8"))["log_history"]:
        for measure in found:
            if f"{measure}/{TARGET}" in entry:
                found[measure][str(entry["step"])] = entry[f"{measure}/{TARGET}"]
    return found


def run_table(name: str, seeds: Sequence[int], work: Path, results: Path, quick: bool) -> None:
    """Do the runs of a table that are missing, a seed at a time, and write each to its file at once."""
    table, data = TABLES[name], kept(results, name)
    for seed in seeds:
        for number, (title, row) in enumerate(table.rows.items()):
            done = data["runs"].setdefault(title, {})
            done.update(committed_runs(row))
            if str(seed) not in done:
                print(f"… table {name}, {title}, seed {seed}", flush=True)
                done[str(seed)] = one_run(table, f"table {name} row {number}", row, seed, work, quick)
                data |= {"lengths": table.lengths, "machine": machine("torch", "transformers", "axolotl")}
                print(f"✓ {done[str(seed)]}", flush=True)
            save(data, result_path(results, name))


def means(data: dict[str, Any], table: Table) -> tuple[Values, int]:
    """Return the means over the seeds that all rows have, and the number of those seeds."""
    runs = {title: data["runs"].get(title, {}) for title in table.rows}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
    values = {
        title: {
            measure: {
                int(n): statistics.fmean(by_seed[s][measure][n] for s in seeds) for n in by_seed[seeds[0]][measure]
            }
            for measure in ("passkey", "perplexity")
        }
        for title, by_seed in runs.items()
        if seeds
    }
    return values, len(seeds)


def section(name: str, data: dict[str, Any]) -> str:
    """Return the part of the page about one table."""
    table = TABLES[name]
    values, seeds = means(data, table)
    where = PLACES.get(name, f"Table {name}")
    parts = [f"## {where}: {table.title[0].lower()}{table.title[1:]}"]
    if not seeds:
        return f"{parts[0]}\n\nNot run yet: `python benchmarks/paper_tables.py --tables {name}`."
    if not table.paper and table.claims:
        parts.append(f"The paper ({table.source}).")
    if table.paper:
        parts.append(f"The paper ({table.source}):\n\n{markdown(table.paper[0], table.paper[1:])}")
    columns = sorted(next(iter(values.values()))["passkey"])
    unit = "step {}" if table.every else "{}"
    for measure, digits in (("perplexity", 1), ("passkey", 2)):
        header = [f"ours, {measure}, mean of {counted(seeds, 'seed')}", *(unit.format(n) for n in columns)]
        rows = [[title, *(f"{row[measure][n]:.{digits}f}" for n in columns)] for title, row in values.items()]
        parts.append(markdown(header, rows))
    verdicts = [
        f"- {claim} **{'Agrees' if holds(values) else 'Does not agree'}.**" for claim, holds in table.claims.items()
    ]
    if table.note:
        parts.append(table.note)
    if verdicts:
        parts.append(f"{VERDICTS}\n\n" + "\n".join(verdicts))
    return "\n\n".join(parts)


def when_to_skip(results: Path) -> str:
    """Return the part about what training gives, with and without skips, by stretch and RoPE; "" if nothing was run."""
    ways, measures = ("RoPE only", "no skip", "PoSE"), ("passkey", "perplexity")
    rows, most, least = [], 0, 0
    for name, target in STRETCHES.items():
        values, seeds = means(kept(results, name), TABLES[name])
        for kind in ROPES if values else ():
            each = [values[f"{kind}, {way}"] for way in ways]
            keys, losses = ([row[measure][target] for row in each] for measure in measures)
            most += keys[-1] == max(keys) and keys.count(max(keys)) == 1
            least += losses[-1] == min(losses)
            scores = [*(f"{each:.2f}" for each in keys), *(f"{each:.1f}" for each in losses)]
            rows.append([f"{target // BASE}", kind, *scores, f"{seeds}"])
    if not rows:
        return ""
    header = ["stretch", "RoPE", *(f"{measure}, {way}" for measure in measures for way in ways), "seeds"]
    return f"""## When skipping pays

These are the scores at the target length, by stretch and RoPE. *RoPE only* is not trained; the paper calls it PI only.
*No skip* trains as many steps on the same documents, with ordinary positions. It reads one unbroken window of each.

{markdown(header, rows)}

PoSE finds the most passkeys in {most} of {len(rows)} rows, and has the lowest perplexity in {least}. This is the tiny
model. On [SmolLM2-135M](smollm2.md), *no skip* has the lower loss, with YaRN and with linear. At 4 times, PoSE was not
shown to find more far facts than *no skip*, with either."""


INTRODUCTION = """# The paper's tables at small scale

The paper extends LLaMA-7B from 2,048 tokens. These runs extend the tiny model of the [quick start](quickstart.md) from
128 tokens on a CPU: 600 steps of 16 rows, half passkey documents of up to 128 tokens, half pieces of Python's library.
So the numbers cannot be compared with the paper's, but the order of the rows can. *Full length* trains on rows of up to
2,048 tokens with ordinary positions; its passkey documents have up to 2,048 tokens. The evaluation is the quick
start's: perplexity in sliding windows on held-out files, and 50 passkey prompts per length (20 in Figure 3c). No seed
was used to choose settings. A claim is judged by the means over the seeds. If it names no threshold, any difference
counts.

The paper's numbers are quoted from [PoSE, arXiv 2309.10400](https://arxiv.org/abs/2309.10400).
`benchmarks/paper_tables.py` makes the runs and writes this page from `benchmarks/results/paper_table_….json`. Some rows
come from the quick start (`benchmarks/results/quickstart.json`), with the same seeds. Of these, "no skip" and "RandPos"
differ from PoSE in `content` as well: they read one contiguous window of each document."""


def page(results: Path) -> str:
    sections = [section(name, kept(results, name)) for name in TABLES]
    return "\n\n".join(part for part in [INTRODUCTION, when_to_skip(results), *sections] if part) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help=f"of {','.join(TABLES)}; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="default: those of the quick start's table")
    parser.add_argument("--output", type=Path, help="folder for JSON and page; default: results/ and docs/")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "paper-tables", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="two steps and prompts; needs --output")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    if args.quick and not args.output:
        parser.error("--quick needs --output, so that no committed file changes")
    results = args.output or RESULTS
    results.mkdir(parents=True, exist_ok=True)
    names = args.tables.split(",")
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"--tables {unknown[0]} is unknown; choose from {', '.join(TABLES)}")
    for name in [] if args.page else names:
        run_table(name, [int(seed) for seed in args.seeds.split(",")], args.work, results, args.quick)
    (args.output / "paper_tables.md" if args.output else PAGE).write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
