"""Fills a length in tokens with one of RULER's questions, and scores an answer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pose_plugin.evaluation.ruler.tasks import Ask, Question


@dataclass(frozen=True)
class Fitted:
    """A question with its token ids and its size."""

    question: Question
    ids: list[int]
    size: int


def fitted(
    ask: Ask, seed: str, ids_of: Callable[[str], list[int]], room: int, guess: int = 0, filled: float = 0.98
) -> Fitted:
    """Return the question of about the largest size whose prompt has at most `room` tokens.

    Args:
        seed: each size is built from the same seed.
        ids_of: returns the token ids of a text.
        guess: a size to try first, e.g. that of the last question.
        filled: the share of the room that is enough. Sizes are tried until it is reached, or until one more unit
            does not fit.

    Returns:
        that question; if not even the smallest one fits, the smallest one, with more than `room` tokens.
    """

    def tried(size: int) -> Fitted:
        question = ask.build(size, random.Random(seed))
        return Fitted(question, ids_of(question.text), size)

    best = other = tried(ask.least)
    # The smallest size that is known not to fit.
    end = math.inf if ask.most is None else ask.most + 1
    size = max(guess, 2 * ask.least)
    while len(best.ids) < filled * room and end - best.size > 1:
        found = tried(int(min(max(size, best.size + 1), end - 1)))
        other, best = (best, found) if len(found.ids) <= room else (found, best)
        end = other.size if other.size > best.size else end
        slope = (len(other.ids) - len(best.ids)) / (other.size - best.size)
        # A little below the room, as the next size differs from the estimate by a few tokens.
        size = best.size + int((room * (1 + filled) / 2 - len(best.ids)) / max(slope, 1e-3))
    return best


def score(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that an answer contains, as lm-eval scores it; case does not count."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(each.lower() in text for each in expected) / len(expected)
