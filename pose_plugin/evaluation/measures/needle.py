"""Needles in a haystack: facts hidden at a depth of a long text, the grid of a heat map (after RULER's variants).

    single   one number for one place; asked for it
    multi    four numbers for the same place, spread over the text; asked for all of them
    kv       the haystack is a list of pairs, all alike; asked for the value of one key (Liu et al. 2023)

The texts are made here, so scores are not those of RULER; they compare models with each other. RULER's own tasks run
through `pose-plugin evaluate --harness`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.prompts import Haystack, require_room
from pose_plugin.evaluation.results import Result
from pose_plugin.evaluation.retrieval import Prompt, Retrieval, for_each_depth, require_depths
from pose_plugin.utils.errors import PoSEError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLES = 4
"""Numbers that `multi` hides."""
MOST_PAIRS = 40_000
"""Five-digit keys and values are distinct numbers, and there are 90,000 of them."""

PLACES = (
    "Avignon", "Bergen", "Cardiff", "Dakar", "Edmonton", "Florence", "Granada", "Hanover", "Innsbruck", "Jakarta",
    "Kyoto", "Lisbon", "Marseille", "Nairobi", "Odense", "Palermo", "Quito", "Riga", "Salzburg", "Tallinn", "Utrecht",
    "Verona", "Winnipeg", "Yerevan", "Zagreb",
)  # fmt: skip
DIGITS = {"single": 7, "multi": 6, "kv": 5}
INTRO = {
    "single": "Somewhere in the text below stands a secret number. Remember it; you will be asked for it.",
    "multi": "Somewhere in the text below stand several secret numbers. Remember them all; you will be asked for them.",
    "kv": "Below is a list of keys and their values. Remember them; you will be asked for one value.",
}


def needle(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure retrieval by length and depth; `options` are the fields of `Needle`.

    Example:
        >>> needle(model, tokenizer, [2048], kinds=["single"], trials=10).by_depth()[2048, 0.5].score
        1.0
    """
    return Needle(**options).measure(model, tokenizer, lengths)


class Needle(Retrieval):
    """Numbers hidden in a text, or among pairs of numbers."""

    name: ClassVar[str] = "needle"
    title: ClassVar[str] = "Needle, {kind}: mean score"
    label: ClassVar[str] = "needles found"
    depth_label: ClassVar[str] = "depth of the needle"
    rules: ClassVar[dict[str, str]] = {
        "single": "1 if the first run of digits is the number",
        "multi": f"the share of the {NEEDLES} numbers among the first {NEEDLES} runs of digits",
        "kv": "1 if the first run of digits is the value of the key asked for",
    }

    kinds: list[str] = Field(list(rules), description="kinds of needles")
    depths: list[float] | None = Field(None, description="depths of the needle; default: 0,0.25,0.5,0.75,1")

    _haystack: Any = None
    _per_pair: float = 0.0

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        unknown = [kind for kind in self.kinds if kind not in self.rules]
        if unknown or not self.kinds:
            raise PoSEError(f"kinds={self.kinds}: choose from {', '.join(self.rules)}")
        self.kinds = list(dict.fromkeys(self.kinds))
        if self.depths is not None:
            require_depths(self.depths, self.trials)
        self.trials = for_each_depth(self.trials, self.depths or DEPTHS)
        self._haystack = Haystack(tokenizer, self.filler)
        sample = _numbers(random.Random(0), 40, DIGITS["kv"])
        self._per_pair = len(self._pairs(sample, sample)) / len(sample)
        super().prepare(tokenizer, lengths, windows)

    def asked(self) -> Sequence[str]:
        return self.kinds

    def prompts(self, length: int) -> list[Prompt]:
        depths = self.depths or DEPTHS
        return [
            self.prompt(
                kind, length, depths[trial % len(depths)], random.Random(f"{self.seed}/{kind}/{length}/{trial}")
            )
            for kind in self.kinds
            for trial in range(self.trials)
        ]

    def score(self, answer: str, prompt: Prompt) -> float:
        """Numbers count in any order; for one number that is the first run of digits."""
        runs = re.findall("[0-9]+", answer)[: len(prompt.expected)]
        return len(set(runs) & set(prompt.expected)) / len(prompt.expected)

    def setting(self) -> str:
        where = "grass and sky" if self.filler is None else "a real text"
        shown = ", ".join(f"{depth:g}" for depth in self.depths or DEPTHS)
        return f"hidden in {where} (kv: among other pairs), depths {shown}"

    def chance(self, prompt: Prompt) -> str:
        """Among pairs, a blind guess takes any of the values."""
        pairs = self._tokenizer.decode(prompt.ids).count("Key ") - 1  # the question begins with one
        return f"1/{pairs}" if prompt.kind == "kv" else ""

    def prompt(self, kind: str, length: int, depth: float, rng: random.Random) -> Prompt:
        """Return one prompt; with its answer it is exactly `length` tokens.

        Raises:
            PoSEError: a length below what the text around the needle takes.
        """
        if kind == "kv":
            return self._pairs_prompt(length, depth, rng)
        count = 1 if kind == "single" else NEEDLES
        place, numbers = rng.choice(PLACES), _numbers(rng, count, DIGITS[kind])
        # Spread evenly from the depth asked for, and round again from the start.
        depths = sorted([depth, *((depth + i / count) % 1 for i in range(1, count))])
        facts = [self._haystack.line(f"The secret number of {place} is {number}.") for number in numbers]
        asked, verb = (
            (f"secret number of {place}", "is") if count == 1 else (f"{count} secret numbers of {place}", "are")
        )
        head, tail = self._around(kind, f"What {verb} the {asked}? The {asked} {verb}")
        room = length - _budget(kind) - len(head) - len(tail) - sum(map(len, facts))
        require_room(f"{kind} needle prompt", length, room)
        hidden = self._haystack.hide(list(zip(depths, facts, strict=True)), room)
        return Prompt(kind, head + hidden + tail, _budget(kind), length, depth, tuple(numbers))

    def _pairs_prompt(self, length: int, depth: float, rng: random.Random) -> Prompt:
        budget, state = _budget("kv"), rng.getstate()
        count = max(1, min(MOST_PAIRS, int((length - budget) / self._per_pair)))
        while True:
            rng.setstate(state)
            numbers = _numbers(rng, 2 * count, DIGITS["kv"])
            keys, values = numbers[:count], numbers[count:]
            asked = round(depth * (count - 1))
            lines = self._pairs(keys, values)
            head, tail = self._around("kv", f"What is the value of key {keys[asked]}? Key {keys[asked]} has value")
            room = length - budget - len(head) - len(tail) - len(lines)
            if room >= 0 or count == 1:
                break
            count = max(1, count + min(int(room / self._per_pair), -1))
        require_room("kv needle prompt", length, room)
        filler = self._haystack.filler(room)
        return Prompt("kv", head + filler + lines + tail, budget, length, depth, (values[asked],))

    def _pairs(self, keys: Sequence[str], values: Sequence[str]) -> list[int]:
        return self._haystack.line("\n".join(f"Key {k} has value {v}." for k, v in zip(keys, values, strict=True)))

    def _around(self, kind: str, question: str) -> tuple[list[int], list[int]]:
        hay = self._haystack
        return [*hay.begin, *hay.piece(INTRO[kind]), *hay.newline], [*hay.newline, *hay.piece(question)]


def _budget(kind: str) -> int:
    """Return the tokens of an answer: at most one per digit, and around a number a space and a comma or a word."""
    return (NEEDLES if kind == "multi" else 1) * (DIGITS[kind] + 3)


def _numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """Return distinct numbers of exactly `digits` digits."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
