"""Many questions on one cached haystack: facts hidden in a real text, each asked alone.

    intro | text … fact … text … fact … text | question answer
    ├───────────── read once ────────────────┤ ├── cropped ──┤

Reading 32,768 tokens takes minutes on a CPU, and answering a question takes seconds. So the text is read once into a
key-value cache. The questions are put behind it, answered greedily, and cropped from the cache again. No question sees
another one. Scores are grouped by the distance from a fact to the end of the text.

`build` is pure, `read` and `answer` run a model, `score` and `by_band` are pure.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pose_plugin.evaluation.model import prefill
from pose_plugin.evaluation.prompts import leading_ids, random_key

BANDS = (0, 2048, 4096, 8192, 16384, 24576, 32768)
"""Edges in tokens; band i holds distances from edge i (included) to edge i + 1 (excluded)."""


@dataclass(frozen=True)
class Wording:
    """The words of a haystack. `{name}` and `{key}` stand for a fact's name and its digits.

    Attributes:
        intro: the beginning of the text.
        fact: one fact, on a line of its own.
        question: what follows the text; the answer follows it. It may hold `{name}` only.
        names: what facts are about; each is used at most once in a haystack.
        digits: length of a key.
    """

    intro: str
    fact: str
    question: str
    names: tuple[str, ...]
    digits: int = 5


@dataclass(frozen=True)
class Fact:
    """One fact of a haystack; `distance` counts the tokens between its end and the end of the haystack."""

    name: str
    key: str
    distance: int


@dataclass(frozen=True)
class Haystack:
    """A text with facts, as token ids; `facts` stand in reading order."""

    ids: list[int]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Answer:
    """What a model answered to one question; `found` tells whether it gave the key."""

    name: str
    key: str
    distance: int
    answer: str
    found: bool


def build(tokenizer: Any, wording: Wording, filler: Sequence[int], length: int, count: int, seed: int) -> Haystack:
    """Build a haystack of exactly `length` tokens with `count` facts at even depths.

    A fact goes behind the last line break before its depth, so that it cuts no line.

    Args:
        tokenizer: a transformers tokenizer.
        wording: intro, fact and names; at least `count` names.
        filler: token ids of a real text, at least `length` of them.
        length: tokens of the haystack, questions not counted.
        count: number of facts.
        seed: of names and keys.

    Raises:
        ValueError: the text is too short for the length, or the names are too few.
    """
    draw = random.Random(f"{seed}/{length}/{count}")
    names = draw.sample(wording.names, count)
    keys = [random_key(draw, wording.digits) for _ in names]
    lines = [token_ids(tokenizer, "\n" + filled(wording.fact, n, k) + "\n") for n, k in zip(names, keys, strict=True)]
    head = leading_ids(tokenizer) + token_ids(tokenizer, wording.intro + "\n")
    room = length - len(head) - sum(map(len, lines))
    if not 0 <= room <= len(filler):
        raise ValueError(f"length={length}: {length - room} tokens are fixed, and the text has {len(filler)} tokens")
    cuts = [_line_end(tokenizer, filler, round((i + 0.5) / count * room)) for i in range(count)]
    ids, ends, before = list(head), [], 0
    for cut, line in zip(cuts, lines, strict=True):
        ids += [*filler[before:cut], *line]
        ends.append(len(ids))
        before = cut
    ids += filler[before:room]
    found = zip(names, keys, ends, strict=True)
    return Haystack(ids, tuple(Fact(name, key, length - end) for name, key, end in found))


def read(model: Any, haystack: Haystack, chunk: int | None = None) -> Any:
    """Read a haystack into a key-value cache and return the cache.

    Args:
        model: a causal language model.
        haystack: the text.
        chunk: tokens read at a time; None: all at once, which took a third less time on a CPU and takes more memory.
    """
    return prefill(model, torch.tensor([haystack.ids]), chunk)[1]


def answer(model: Any, cache: Any, questions: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Answer questions greedily behind a cached text, each as if alone, and leave the cache as it was.

    All questions go through the model together. A mask keeps them apart, and each starts at the position behind the
    text. With two questions of two and one tokens, the second one sees these keys:

        text text text | q0 q0 q1 | a0 a1 | a0 a1
         x    x    x           x        x       x

    Args:
        model: a causal language model with sdpa or eager attention.
        cache: of one text, as `read` returns it.
        questions: token ids of each.
        budget: tokens to decode.

    Returns:
        `budget` token ids per question.
    """
    length = cache.get_seq_length()
    ids = torch.tensor([token for question in questions for token in question])
    owners = torch.tensor([number for number, question in enumerate(questions) for _ in question])
    places = torch.tensor([length + i for question in questions for i in range(len(question))])
    last = torch.tensor([len(question) for question in questions]).cumsum(0) - 1
    known, written = owners[:0], []
    try:
        for step in range(budget):
            known = torch.cat([known, owners])
            mask = _apart(known, len(ids), length, model.dtype)
            fed = {"input_ids": ids[None], "position_ids": places[None], "attention_mask": mask}
            logits = model(**fed, past_key_values=cache, use_cache=True).logits[0]
            ids = (logits[last] if step == 0 else logits).argmax(-1)
            places = (places[last] if step == 0 else places) + 1
            owners = torch.arange(len(questions))
            written.append(ids)
    finally:
        added = cache.get_seq_length() - length
        if added:
            cache.crop(-added)
    return torch.stack(written, 1).tolist()


def _apart(owners: torch.Tensor, new: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Make the mask of the `new` last tokens: all of the text, and of the rest what is earlier and of the same owner.

    Args:
        owners: the question that each token behind the text belongs to, shape (tokens,).
        new: how many tokens are fed.
        length: tokens of the text.
        dtype: of the model.

    Returns:
        (1, 1, new, length + tokens); 0 where a key is seen, else the smallest number.
    """
    order = torch.arange(len(owners))
    seen = (owners[-new:, None] == owners) & (order[-new:, None] >= order)
    seen = torch.cat([torch.ones(new, length, dtype=torch.bool), seen], 1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def ask(model: Any, tokenizer: Any, cache: Any, facts: Sequence[Fact], question: str) -> list[Answer]:
    """Ask for each fact alone on the cache of its haystack.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        cache: of the haystack, as `read` returns it.
        facts: what is asked for.
        question: with `{name}`; the answer follows it.

    Returns:
        one answer per fact, in order.
    """
    asked = [token_ids(tokenizer, filled(question, fact.name)) for fact in facts]
    # One token per digit is the most that a tokenizer takes; a space and a line break may stand before them.
    written = answer(model, cache, asked, max(len(fact.key) for fact in facts) + 2)
    texts = [tokenizer.decode(ids) for ids in written]
    return [
        Answer(fact.name, fact.key, fact.distance, text, score(text, fact.key))
        for fact, text in zip(facts, texts, strict=True)
    ]


def score(text: str, key: str) -> bool:
    """Tell whether the first run of digits in an answer begins with the key."""
    run = re.search("[0-9]+", text)
    return run is not None and run.group().startswith(key)


def band(distance: int, edges: Sequence[int] = BANDS) -> str:
    """Name the band of a distance in tokens, e.g. "8192-16384"; the last band also holds what lies beyond it."""
    for low, high in itertools.pairwise(edges):
        if distance < high:
            return f"{low}-{high}"
    return f"{edges[-2]}-{edges[-1]}"


def by_band(answers: Iterable[Answer], edges: Sequence[int] = BANDS) -> dict[str, tuple[int, int]]:
    """Count (found, asked) in each band that has questions, the nearest band first."""
    counts: dict[str, tuple[int, int]] = {}
    for each in sorted(answers, key=lambda each: each.distance):
        name = band(each.distance, edges)
        found, asked = counts.get(name, (0, 0))
        counts[name] = (found + each.found, asked + 1)
    return counts


def filled(template: str, name: str, key: str = "") -> str:
    """Put a name and a key into a template; other braces stay."""
    return template.replace("{name}", name).replace("{key}", key)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a piece of text without special tokens of the tokenizer's own."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _line_end(tokenizer: Any, filler: Sequence[int], place: int, reach: int = 200) -> int:
    """Find the end of the last line before a place, within `reach` tokens; else the place itself."""
    for cut in range(place, max(0, place - reach), -1):
        if "\n" in tokenizer.decode([filler[cut - 1]]):
            return cut
    return place
