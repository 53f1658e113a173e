"""Passkey retrieval: can the model repeat five digits from anywhere in its window? (PoSE paper, section 4.3)

What is scored is greedy decoding of as many tokens as the answer has. Most prompts need a single forward
for that: with the right answer in place, the argmax at each answer position is what greedy decoding would
have written up to its first mistake, and a first mistake usually settles the case. Only where it does not
(say, the model begins with a line break and may still write the key) the answer is decoded token by token.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.memory import Fit, fitting, in_batches
from pose_plugin.evaluation.model import device_of, evaluating, greedy, last_logits
from pose_plugin.evaluation.prompts import (
    PasskeyBuilder,
    PasskeyDocument,
    PasskeyTemplate,
    build_document,
    build_prompt,
    plain_tokenizer,
    random_key,
)
from pose_plugin.evaluation.retrieval import OfTrials, end_tokens
from pose_plugin.evaluation.sharded import agreed
from pose_plugin.utils.errors import PoSEError

__all__ = [
    "Accuracy",
    "PasskeyBuilder",
    "PasskeyDocument",
    "PasskeyResult",
    "PasskeyTemplate",
    "PasskeyTrial",
    "build_document",
    "build_prompt",
    "passkey",
    "random_key",
]


@dataclass(frozen=True)
class Accuracy:
    """`correct` of `trials`."""

    correct: int
    trials: int

    @property
    def value(self) -> float:
        return self.correct / self.trials

    @property
    def standard_error(self) -> float:
        """√(p(1-p)/n). It is 0 at p = 0 and 1, where `interval` still says what n trials can tell."""
        return math.sqrt(self.value * (1 - self.value) / self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927)."""
        z, n, p = 1.959964, self.trials, self.value
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class PasskeyTrial:
    """One prompt and what came of it; `answer` is the greedy text as far as it was needed to score."""

    length: int
    depth: float
    key: str
    answer: str
    correct: bool


@dataclass(frozen=True)
class PasskeyResult(OfTrials):
    """All trials of one model; every figure is worked out from them.

    Attributes:
        trials: in the order of lengths.
        depths: the depths that were asked for; None when each trial drew its own.
        seed: of keys and depths.
        example: one whole prompt as text, to show.
    """

    trials: tuple[PasskeyTrial, ...]
    depths: tuple[float, ...] | None
    seed: int
    example: str

    @property
    def by_length(self) -> dict[int, Accuracy]:
        return {length: _accuracy(t for t in self.trials if t.length == length) for length in self.lengths}

    @property
    def by_depth(self) -> dict[tuple[int, float], Accuracy]:
        """By (length, depth); depths drawn at random are put together in fifths, named by their middle."""
        cells: dict[tuple[int, float], list[PasskeyTrial]] = {}
        for trial in self.trials:
            depth = trial.depth if self.depths else min(int(trial.depth * 5), 4) / 5 + 0.1
            cells.setdefault((trial.length, round(depth, 4)), []).append(trial)
        return {cell: _accuracy(cells[cell]) for cell in sorted(cells)}

    def k_max(self, threshold: float = 0.2) -> int:
        """The effective window of Chen et al. (2023, arXiv 2306.15595).

        The largest measured length at which, and at all measured lengths below, at least `threshold` of the
        keys are found; 0 if there is none.
        """
        best = 0
        for length, accuracy in self.by_length.items():
            if accuracy.value < threshold:
                break
            best = length
        return best

    @property
    def definition(self) -> str:
        per_length = sorted({accuracy.trials for accuracy in self.by_length.values()})
        depths = "drawn at random" if self.depths is None else ", ".join(map("{:g}".format, self.depths))
        return (
            f"Passkey retrieval: {'/'.join(map(str, per_length))} prompts a length, 5-digit keys, depths "
            f"{depths}, seed {self.seed}; prompt and answer together are exactly `length` tokens (a space that is a "
            f"token of its own ends the prompt); greedy "
            "decoding of as many tokens as the answer has; correct if the first run of digits is the key."
        )

    def metrics(self) -> dict[str, float]:
        """{"passkey/2048": 0.98, …}"""
        return {f"passkey/{length}": accuracy.value for length, accuracy in self.by_length.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "definition": self.definition,
            "k_max": self.k_max(),
            "seed": self.seed,
            "depths": self.depths,
            "by_length": {
                str(length): {"accuracy": a.value, "standard_error": a.standard_error, "trials": a.trials}
                for length, a in self.by_length.items()
            },
            "by_depth": [
                {"length": length, "depth": depth, "accuracy": a.value, "trials": a.trials}
                for (length, depth), a in self.by_depth.items()
            ],
            "example": self.example,
            "trials": [asdict(trial) for trial in self.trials],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PasskeyResult:
        """The opposite of `to_dict`."""
        depths = None if data["depths"] is None else tuple(data["depths"])
        return cls(tuple(PasskeyTrial(**t) for t in data["trials"]), depths, data["seed"], data["example"])

    @classmethod
    def joined(cls, parts: Sequence[PasskeyResult]) -> PasskeyResult:
        """Results of single lengths as one; the example is that of the first."""
        trials = tuple(trial for part in parts for trial in part.trials)
        return cls(trials, parts[0].depths, parts[0].seed, parts[0].example)


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    trials: int = 50,
    depths: Sequence[float] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    template: PasskeyTemplate | None = None,
    filler_text: str | None = None,
) -> PasskeyResult:
    """Measures passkey retrieval. Prompts depend on the seed alone, so every model gets the same ones.

    Positions are plain, mode and random state of the model are as before afterwards.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        lengths: in tokens, prompt plus answer; at least what the template takes.
        trials: prompts at each length; the papers use 50.
        depths: None draws one in 0…1 for each trial; a list shares out the trials of a length among its own.
        seed: of keys, depths and the piece of `filler_text`.
        batch_size: prompts in one forward; default: about 16k tokens.
        progress: whether to show a progress bar.
        template: the texts.
        filler_text: a real text to hide the key in.

    Raises:
        PoSEError: a length the template does not fit in, no trials, fewer trials than depths, too little
            memory for one prompt; found before the model runs where it can be foreseen.
    """
    prompts = documents(PasskeyBuilder(tokenizer, template, filler_text), lengths, trials, depths, seed)
    tokenizer = plain_tokenizer(tokenizer)
    reader = _Reader(tokenizer, model)
    device = device_of(model)
    fits = {n: fitting(model, device, n, batch_size or max(1, 16384 // n)) for n in prompts}
    done: list[PasskeyTrial] = []
    total = sum(map(len, prompts.values()))
    with evaluating(model), tqdm(total=total, desc="passkey", unit="prompt", disable=not progress) as bar:
        for length, rows in prompts.items():
            bar.set_postfix_str(f"{length} tokens")
            scored: list[tuple[str, bool]] = []
            run = functools.partial(_answers, model, reader=reader, fit=fits[length])
            for answers in in_batches(rows, fits[length].batch, run):
                scored += answers
                bar.update(len(answers))
            for row, (answer, correct) in zip(rows, scored, strict=True):
                done.append(PasskeyTrial(length, row.depth, row.key, answer, correct))
    shown = next(iter(prompts.values()))[0]
    return PasskeyResult(tuple(done), tuple(depths) if depths else None, seed, shown.text)


def documents(
    builder: PasskeyBuilder, lengths: Sequence[int], trials: int, depths: Sequence[float] | None, seed: int
) -> dict[int, list[PasskeyDocument]]:
    """The prompts of `passkey`, by length; the arguments and what is raised are the same."""
    if not whole(lengths):
        raise PoSEError("lengths is empty; give the prompt lengths in tokens, e.g. lengths=[2048, 4096]")
    if trials < 1:
        raise PoSEError(f"trials={trials} measures nothing; use at least 1, the papers use 50")
    if depths is not None and not 1 <= len(depths) <= trials:
        raise PoSEError(
            f"depths has {len(depths)} values for trials={trials}; each depth needs a trial: raise trials to "
            f"{max(len(depths), 1)} or give 1 to {trials} depths (None draws them at random)"
        )
    found: dict[int, list[PasskeyDocument]] = {}
    for length in sorted(set(lengths)):
        found[length] = rows = []
        for trial in range(trials):
            rng = random.Random(f"{seed}/{length}/{trial}")
            key, drawn, start = random_key(rng), rng.random(), rng.random()
            depth = drawn if depths is None else depths[trial % len(depths)]
            rows.append(builder.document(length, depth, key, start))
    return found


class _Reader:
    """Reads tokens as an answer and knows when more tokens could not change the score."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer = tokenizer
        self.ends = end_tokens(tokenizer, model)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.most_digits = max((_digits(t) for t in tokenizer.get_vocab() if t not in special), default=0)

    def __call__(self, tokens: list[int], budget: int, key: str) -> tuple[str, bool | None]:
        """The text of the first `budget` tokens, and: right, wrong, or None if the rest decides."""
        tokens = tokens[:budget]
        end = next((i for i, token in enumerate(tokens) if token in self.ends), None)
        left = budget - len(tokens) if end is None else 0
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return text, verdict(text, key, left * self.most_digits)


def verdict(text: str, key: str, digits_to_come: int) -> bool | None:
    """Whether the first run of digits is the key; None while `digits_to_come` more digits could decide it."""
    run = re.search("[0-9]+", text)
    found = run.group() if run else ""
    if run and (run.end() < len(text) or digits_to_come == 0):
        return found == key
    if key.startswith(found) and len(found) + digits_to_come >= len(key):
        return None
    return False


def _digits(token: str) -> int:
    # A byte token such as <0x31> stands for one character.
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else sum(letter in "0123456789" for letter in token)


def _answers(model: Any, rows: Sequence[PasskeyDocument], reader: _Reader, fit: Fit) -> list[tuple[str, bool]]:
    """Text and score of greedy decoding for rows of one length."""
    device = device_of(model)
    longest = max(len(row.answer) for row in rows)
    input_ids = torch.tensor([row.input_ids for row in rows], device=device)
    # The logits at a token say what follows it, so the last position has nothing to say.
    chosen = last_logits(model, input_ids, longest + 1, fit.chunk)[:, :-1].argmax(-1).tolist()
    results: list[tuple[str, bool | None]] = []
    for row, argmax in zip(rows, chosen, strict=True):
        answer, argmax = row.answer, argmax[longest - len(row.answer) :]
        first = next((i for i in range(len(answer)) if argmax[i] != answer[i]), len(answer))
        results.append(reader(argmax[: first + 1], len(answer), row.key))
    # As rank 0 sees it where ranks go in step: another rounding elsewhere must not make another forward.
    unsettled = agreed(model, [i for i, (_, correct) in enumerate(results) if correct is None])
    # Prompts of one length differ in theirs only where keys are split into different numbers of tokens.
    for budget in sorted({len(rows[i].answer) for i in unsettled}):
        open_rows = [i for i in unsettled if len(rows[i].answer) == budget]
        prompts = torch.tensor([rows[i].prompt for i in open_rows], device=device)
        for i, tokens in zip(open_rows, greedy(model, prompts, budget, fit.chunk).tolist(), strict=True):
            results[i] = reader(tokens, budget, rows[i].key)
    return [(text, bool(correct)) for text, correct in results]


def _accuracy(trials: Iterable[PasskeyTrial]) -> Accuracy:
    scores = [trial.correct for trial in trials]
    return Accuracy(sum(scores), len(scores))
