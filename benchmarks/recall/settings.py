"""What is fixed before the runs: the judged question, the haystacks, their places in the texts."""

from __future__ import annotations

from dataclasses import dataclass

from recall import words

from pose_plugin.evaluation.measures.haystack import Wording

LENGTH, COUNT = 32704, 40
"""Tokens of a haystack and facts in it; 64 tokens of the window are left for the question and its answer."""
WITHIN = 8128
"""Tokens of the shorter haystacks, which fit the base's own window in the same way."""

FAR = 65472
"""Tokens of the haystacks that fit a window of 65,536 tokens in the same way."""


@dataclass(frozen=True)
class Place:
    """Where the text of a haystack comes from: `start` in tokens; `seed` draws the facts."""

    text: str
    start: int
    seed: int


WORDING = Wording(
    words.MEMORIZE,
    "{name} {key}.\n{name} {key}.\n{name} {key}.",
    "\n\n{name}",
    words.NUMBERS,
    digits=4,
)
JUDGED = (Place("lcet10", 0, 1), Place("alice29", 0, 2), Place("topics", 0, 3))
JUDGED_FAR = (Place("lcet10", 0, 1), Place("topics", 0, 2), Place("topics", 80_000, 3))
"""For `FAR` tokens, which alice29 does not have."""
PILOT = (Place("britannica", 0, 101), Place("plrabn12", 0, 102), Place("britannica", 40000, 103))
