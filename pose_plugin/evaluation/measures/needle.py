"""Needles in a haystack: facts hidden at a depth of a long text, the grid of a heat map (after RULER's variants).

    single   one number for one place; asked for it
    multi    four numbers for the same place, spread over the text; asked for all of them
    kv       the haystack is a list of pairs, all alike; asked for the value of one key (Liu et al. 2023)

The texts are ours, so figures are not those of RULER; they compare models with each other. RULER's own tasks run
through `pose-plugin evaluate --harness`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from pose_plugin.evaluation.prompts import PasskeyBuilder
from pose_plugin.evaluation.retrieval import Prompt, RetrievalResult, ask, require_counts
from pose_plugin.utils.errors import PoSEError

KINDS = ("single", "multi", "kv")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLES = 4
"""Numbers that `multi` hides."""

PLACES = [
    "Avignon",
    "Bergen",
    "Cardiff",
    "Dakar",
    "Edmonton",
    "Florence",
    "Granada",
    "Hanover",
    "Innsbruck",
    "Jakarta",
    "Kyoto",
    "Lisbon",
    "Marseille",
    "Nairobi",
    "Odense",
    "Palermo",
    "Quito",
    "Riga",
    "Salzburg",
    "Tallinn",
    "Utrecht",
    "Verona",
    "Winnipeg",
    "Yerevan",
    "Zagreb",
]
DIGITS = {"single": 7, "multi": 6, "kv": 5}
RULES = {
    "single": "1 if the first run of digits is the number",
    "multi": f"the share of the {NEEDLES} numbers among the first {NEEDLES} runs of digits",
    "kv": "1 if the first run of digits is the value of the key asked for",
}
INTRO = {
    "single": "Somewhere in the text below stands a secret number. Remember it; you will be asked for it.",
    "multi": "Somewhere in the text below stand several secret numbers. Remember them all; you will be asked for them.",
    "kv": "Below is a list of keys and their values. Remember them; you will be asked for one value.",
}


def needle(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    kinds: Sequence[str] = KINDS,
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    filler_text: str | None = None,
) -> RetrievalResult:
    """Measures retrieval by length and depth. Prompts depend on the seed alone, so every model gets the same ones.

    Positions are plain, mode and random state of the model are as before afterwards.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        lengths: in tokens, prompt plus answer.
        kinds: of "single", "multi", "kv".
        depths: of the needle; the trials of a length and kind are shared out among them.
        trials: prompts at each length and of each kind.
        seed: of numbers and places.
        batch_size: prompts in one forward; default: about 16k tokens.
        progress: whether to show a progress bar.
        filler_text: a real text to hide needles in, instead of the passkey task's grass and sky; not for kv.

    Raises:
        PoSEError: an unknown kind, a length the text around the needle does not fit in, counts that cannot work.
    """
    prompts = needle_prompts(tokenizer, lengths, kinds, depths, trials, seed, filler_text)
    done = ask(model, tokenizer, prompts, score, "needle", batch_size, progress)
    examples: dict[str, str] = {}
    for prompt in prompts:
        examples.setdefault(prompt.kind, PasskeyBuilder(tokenizer).tokenizer.decode(prompt.ids))
    pairs = NeedleBuilder(tokenizer, filler_text)
    chance = {
        "single": "0",
        "multi": "0",
        "kv": " … ".join(f"1/{count}" for count in dict.fromkeys(map(pairs.pairs, sorted(set(lengths))))),
    } if "kv" in kinds else dict.fromkeys(kinds, "0")  # fmt: skip
    where = "hidden in grass and sky" if filler_text is None else "hidden in a real text"
    shown = ", ".join(f"{depth:g}" for depth in depths)
    setting = f"{where} (kv: among other pairs), depths {shown}, seed {seed}"
    rules = {kind: RULES[kind] for kind in kinds}
    return RetrievalResult("needle", tuple(done), rules, {k: chance[k] for k in kinds}, examples, setting)


def needle_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    kinds: Sequence[str] = KINDS,
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    seed: int = 0,
    filler_text: str | None = None,
) -> list[Prompt]:
    """The prompts of `needle`; the arguments and what is raised are the same."""
    require_counts(lengths, trials, depths)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise PoSEError(f"kinds={list(kinds)}: choose from {', '.join(KINDS)}")
    builder = NeedleBuilder(tokenizer, filler_text)
    return [
        builder.prompt(kind, length, depths[trial % len(depths)], random.Random(f"{seed}/{kind}/{length}/{trial}"))
        for kind in kinds
        for length in sorted(set(lengths))
        for trial in range(trials)
    ]


def score(kind: str, answer: str, expected: tuple[str, ...]) -> float:
    """The rule of each kind, see RULES."""
    runs = re.findall("[0-9]+", answer)[: len(expected)]
    return len(set(runs) & set(expected)) / len(expected)


class NeedleBuilder:
    """Builds prompts of an exact token length for one tokenizer; keeps what it has tokenised.

    Args:
        tokenizer: a transformers tokenizer (or a processor that holds one).
        filler_text: see `needle`.
    """

    def __init__(self, tokenizer: Any, filler_text: str | None = None) -> None:
        # Its way to tokenise piece by piece makes the length exact.
        self._text = PasskeyBuilder(tokenizer, filler_text=filler_text)
        self._per_pair = 0.0

    def prompt(self, kind: str, length: int, depth: float, rng: random.Random) -> Prompt:
        """One prompt; with its answer it is exactly `length` tokens.

        Raises:
            PoSEError: a length below what the text around the needle takes (which is named).
        """
        if kind == "kv":
            return self._pairs_prompt(length, depth, rng)
        count = 1 if kind == "single" else NEEDLES
        place, numbers = rng.choice(PLACES), _numbers(rng, count, DIGITS[kind])
        # Spread evenly from the depth asked for, and round again from the start.
        depths = sorted([depth, *((depth + i / count) % 1 for i in range(1, count))])
        facts = [self._line(f"The secret number of {place} is {number}.") for number in numbers]
        asked, verb = (
            (f"secret number of {place}", "is") if count == 1 else (f"{count} secret numbers of {place}", "are")
        )
        head, tail = self._around(kind, f"What {verb} the {asked}? The {asked} {verb}")
        budget = self._budget(kind)
        room = length - budget - len(head) - len(tail) - sum(map(len, facts))
        self._require_room(kind, length, room)
        filler = self._text._filler_ids(room)[:room]
        ids, before = list(head), 0
        for at, fact in zip(depths, facts, strict=True):
            ids += filler[before : round(at * room)] + fact
            before = round(at * room)
        return Prompt(kind, ids + filler[before:] + tail, budget, length, depth, tuple(numbers))

    def pairs(self, length: int) -> int:
        """How many pairs a kv prompt of `length` tokens has, about: keys differ in their tokens."""
        prompt = self._pairs_prompt(length, 0.0, random.Random(0))
        return self._text.tokenizer.decode(prompt.ids).count("Key ")

    def _pairs_prompt(self, length: int, depth: float, rng: random.Random) -> Prompt:
        budget = self._budget("kv")
        state = rng.getstate()
        count, shrunk = max(1, min(40_000, int((length - budget) / (self._per_pair or 8)))), False
        while True:
            rng.setstate(state)
            numbers = _numbers(rng, 2 * count, DIGITS["kv"])
            keys, values = numbers[:count], numbers[count:]
            asked = round(depth * (count - 1))
            lines = self._line("\n".join(f"Key {k} has value {v}." for k, v in zip(keys, values, strict=True)))
            head, tail = self._around("kv", f"What is the value of key {keys[asked]}? Key {keys[asked]} has value")
            room = length - budget - len(head) - len(tail) - len(lines)
            self._per_pair = len(lines) / count
            # Towards the count that fits, at last only downwards, so it ends.
            step = int(room / self._per_pair)
            if room < 0:
                if count == 1:
                    self._require_room("kv", length, room)
                count, shrunk = max(1, count + min(step, -1)), True
            elif step > 2 and count < 40_000 and not shrunk:
                count = min(40_000, count + step - 1)
            else:
                break
        filler = self._text._filler_ids(room)[:room]
        return Prompt("kv", head + filler + lines + tail, budget, length, depth, (values[asked],))

    def _around(self, kind: str, question: str) -> tuple[list[int], list[int]]:
        text = self._text
        head = [*self._begin(), *text._piece(INTRO[kind]), *text._newline]
        return head, [*text._newline, *text._piece(question)]

    def _begin(self) -> list[int]:
        from pose_plugin.evaluation.prompts import leading_ids

        return leading_ids(self._text.tokenizer)

    def _line(self, text: str) -> list[int]:
        newline = self._text._newline
        return [*newline, *self._text._piece(text), *newline]

    def _budget(self, kind: str) -> int:
        """A token a digit is the most that any tokenizer takes; around a number are a space and a comma or a word."""
        return (NEEDLES if kind == "multi" else 1) * (DIGITS[kind] + 3)

    def _require_room(self, kind: str, length: int, room: int) -> None:
        if room < 0:
            raise PoSEError(
                f"length={length} is smaller than the {kind} needle prompt, which takes {length - room} tokens with "
                f"this tokenizer; use a length of at least {length - room}"
            )


def _numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """Distinct numbers of exactly `digits` digits."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
