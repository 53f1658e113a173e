"""Finds a question that the base model answers everywhere inside its own window.

    OMP_NUM_THREADS=1 python benchmarks/recall/calibrate.py TRY ...     # no name: lists the tries
    python benchmarks/recall/calibrate.py --table                       # what has been measured

Each try reads its haystack once and asks every fact in one or more wordings. The texts are Paradise Lost and the
Encyclopaedia Britannica; no other part of the experiment uses them. Results go to results/recall_calibration.json.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import RESULTS, machine, markdown  # noqa: E402
from recall import texts, words  # noqa: E402
from recall.bands import ask, by_band  # noqa: E402
from recall.rows import load_rows, save_row  # noqa: E402

from pose_plugin.evaluation.generation import cached  # noqa: E402
from pose_plugin.evaluation.measures.haystack import Wording, build  # noqa: E402

OUTPUT = RESULTS / "recall_calibration.json"


@dataclass(frozen=True)
class Try:
    """One calibration: a wording of the facts and, by name, the questions that are asked on the same cache."""

    wording: Wording
    questions: dict[str, str]
    length: int = 8192
    count: int = 20
    text: str = "plrabn12"
    start: int = 0
    seed: int = 100
    dtype: str = "float32"


_PLACE = Wording(
    words.MEMORIZE, "The number of {name} is {key}. Remember it: the number of {name} is {key}.",
    "\nWhat is the number of {name}? The number of {name} is", words.PLACES,
)  # fmt: skip
_THING = Wording(
    words.MEMORIZE, "The {name} is {key}. Remember it. {key} is the {name}.",
    "\nWhat is the {name}? The {name} is", words.THINGS,
)  # fmt: skip
_COLON = Wording(words.MEMORIZE, "Pass key of {name}: {key}. Remember it. {name}: {key}.", "\n{name}:", words.PLACES)
_CLOZE = Wording(words.MEMORIZE, "{name} {key}.", "\n{name}", words.SENTENCES)
_NUMBER = Wording(words.MEMORIZE, "{name} {key}. Remember it.", "\n{name}", words.NUMBERS)
_NUMBER_TWICE = replace(_NUMBER, fact="{name} {key}. Remember it. {name} {key}.")
_NOUN = Wording(words.MEMORIZE, "{name} {key}. Remember: {name} {key}.", "\n{name}", words.NOUNS)
_NOUN_THRICE = replace(_NOUN, fact="{name} {key}. Remember: {name} {key}. Again: {name} {key}.")
_LINES = replace(_NUMBER, fact="{name} {key}.\n{name} {key}.\n{name} {key}.")
_FORMS = {
    "plain": "\n{name}",
    "doubled": "\nQuestion: {name}?\nAnswer: {name}",
    "as the fact": "\n\n{name}",
    "read again": "\n\nNow copy the line from the text that begins with: {name}\n\n{name}",
    "exact": "\n\nWhat was written above about this? Copy it exactly.\n{name}",
}

TRIES = {
    "places": Try(_PLACE, {"plain": _PLACE.question}),
    "things": Try(_THING, {"plain": _THING.question, "short": "\nThe {name} is"}),
    "places-colon": Try(_COLON, {"plain": _COLON.question, "pass key": "\nPass key of {name}:"}),
    "cloze": Try(_CLOZE, {"plain": _CLOZE.question, "remember": "\nRemember: {name}"}),
    "cloze, bf16": Try(_CLOZE, {"plain": _CLOZE.question}, dtype="bfloat16"),
    "numbers twice, 10": Try(
        _NUMBER_TWICE,
        {"plain": _NUMBER.question, "quiz": "\n\nQuiz. Answer with the number from the text.\n{name}"},
        count=10,
        text="britannica",
    ),
    "numbers twice, 10, poem": Try(_NUMBER_TWICE, {"plain": _NUMBER.question}, count=10, seed=200),
    "numbers twice, 10, later prose": Try(
        _NUMBER_TWICE, {"plain": _NUMBER.question}, count=10, text="britannica", start=40000, seed=300
    ),
    "nouns thrice, 10, poem": Try(_NOUN_THRICE, {"plain": _NOUN.question}, count=10, seed=200),
    "lines thrice, 10, poem": Try(_LINES, {"plain": _LINES.question}, count=10, seed=200),
    "lines thrice, 10, later prose": Try(_LINES, _FORMS, count=10, text="britannica", start=40000, seed=300),
    "lines thrice, 10, poem, again": Try(_LINES, _FORMS, count=10, seed=200),
    "four digits, 10, poem": Try(replace(_LINES, digits=4), _FORMS, count=10, seed=200),
    "four digits, 10, later prose": Try(
        replace(_LINES, digits=4), _FORMS, count=10, text="britannica", start=40000, seed=300
    ),
}


def main() -> None:
    """Run the tries that are named and not yet measured."""
    names = [name for name in sys.argv[1:] if name != "--table"]
    if not names and "--table" not in sys.argv:
        raise SystemExit(f"{__doc__}\ntries: {', '.join(TRIES)}")
    rows = load_rows(OUTPUT)
    for name in names:
        if not any(row["try"] == name for row in rows):
            for row in run(name, TRIES[name]):
                rows = save_row(OUTPUT, row, machine("torch", "transformers"))
                print(line(row), flush=True)
    if "--table" in sys.argv:
        print(table(rows))


def run(name: str, what: Try) -> list[dict[str, Any]]:
    """Measure one try on the base model; one row of results for each wording of the question."""
    from pose_plugin.evaluation.model import evaluating

    model, tokenizer = texts.base(dtype=what.dtype)
    filler = texts.ids(tokenizer, what.text)[what.start :]
    haystack = build(tokenizer, what.wording, filler, what.length, what.count, what.seed)
    rows = []
    with evaluating(model):
        begin = time.process_time()
        cache = cached(model, haystack.ids)
        reading = time.process_time() - begin
        for label, question in what.questions.items():
            begin = time.process_time()
            answers = ask(model, tokenizer, cache, haystack.facts, question)
            rows.append({
                "try": name, "question": label, "text": what.text, "length": what.length, "facts": what.count,
                "dtype": what.dtype, "read_cpu_s": round(reading, 1),
                "ask_cpu_s": round(time.process_time() - begin, 1),
                "bands": {key: list(value) for key, value in by_band(answers).items()},
                "intro": what.wording.intro, "fact": what.wording.fact, "asked": question,
                "answers": [[a.name, a.key, a.distance, a.answer, a.found] for a in answers],
            })  # fmt: skip
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of results in one line."""
    bands = "  ".join(f"{name}: {found}/{asked}" for name, (found, asked) in row["bands"].items())
    return f"{row['try']}, {row['question']}: {bands}  ({row['read_cpu_s']} + {row['ask_cpu_s']} CPU s)"


def table(rows: list[dict[str, Any]]) -> str:
    """All tries as a Markdown table."""
    names = list(dict.fromkeys(name for row in sorted(rows, key=lambda r: r["length"]) for name in row["bands"]))
    names.sort(key=lambda name: int(name.partition("-")[0]))
    cells = [
        [
            row["try"], row["question"], row["text"], str(row["length"]), str(row["facts"]),
            *("/".join(map(str, row["bands"].get(name, "–"))) for name in names),
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(["try", "question", "text", "tokens", "facts", *names], cells)


if __name__ == "__main__":
    main()
