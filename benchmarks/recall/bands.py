"""Answers to the questions on a haystack, and their scores by distance, in the bands that were fixed beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pose_plugin.evaluation.generation import answer
from pose_plugin.evaluation.measures.haystack import Fact, band, filled, score
from pose_plugin.evaluation.prompts import token_ids

BANDS = (0, 2048, 4096, 8192, 16384, 24576, 32768)
"""Edges in tokens; band i holds distances from edge i (included) to edge i + 1 (excluded)."""

FAR_BANDS = (*BANDS, 49152, 65536)
"""Edges for haystacks of more than 32,768 tokens."""


@dataclass(frozen=True)
class Answer:
    """What a model answered to one question; `found` is whether it gave the key."""

    name: str
    key: str
    distance: int
    answer: str
    found: bool


def ask(model: Any, tokenizer: Any, cache: Any, facts: Sequence[Fact], question: str) -> list[Answer]:
    """Ask for each fact alone on the cache of its text.

    Args:
        cache: of the text, as `cached` returns it; it stays as it was.
        question: with `{name}`; the answer follows it.
    """
    asked = [token_ids(tokenizer, filled(question, fact.name)) for fact in facts]
    # One token per digit is the most that a tokenizer takes; a space and a line break may be before them.
    written = answer(model, cache, asked, max(len(fact.key) for fact in facts) + 2)
    texts = [tokenizer.decode(ids) for ids in written]
    return [
        Answer(fact.name, fact.key, fact.distance, text, score(text, fact.key))
        for fact, text in zip(facts, texts, strict=True)
    ]


def by_band(answers: Iterable[Answer], edges: Sequence[int] = BANDS) -> dict[str, tuple[int, int]]:
    """Count (found, asked) in each band that has questions, the nearest band first, e.g. "8192-16384"."""
    counts: dict[str, tuple[int, int]] = {}
    for each in sorted(answers, key=lambda each: each.distance):
        low, high = band(each.distance, edges)
        found, asked = counts.get(f"{low}-{high}", (0, 0))
        counts[f"{low}-{high}"] = (found + each.found, asked + 1)
    return counts
