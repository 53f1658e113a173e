"""What all retrieval measures share: prompts of an exact length, greedy answers, scores by length and depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.memory import Fit, fitting, in_batches
from pose_plugin.evaluation.model import device_of, evaluating, greedy
from pose_plugin.evaluation.prompts import plain_tokenizer
from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        kind: e.g. "single".
        ids: the prompt; with `budget` tokens of answer it is exactly `length` tokens.
        budget: tokens that are decoded.
        length: tokens of prompt plus answer.
        depth: where the thing asked for stands, 0 (start) to 1 (end).
        expected: what has to be in the answer.
    """

    kind: str
    ids: list[int]
    budget: int
    length: int
    depth: float
    expected: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.ids) + self.budget != self.length:
            raise AssertionError(f"a prompt of {len(self.ids)} + {self.budget} tokens is not {self.length}")


@dataclass(frozen=True)
class RetrievalTrial:
    """One prompt and what came of it; `score` is 0…1."""

    kind: str
    length: int
    depth: float
    expected: tuple[str, ...]
    answer: str
    score: float


class OfTrials:
    """What every result that is worked out from trials has."""

    trials: tuple[Any, ...]

    @property
    def lengths(self) -> list[int]:
        """In tokens, the shortest first."""
        return sorted({trial.length for trial in self.trials})


@dataclass(frozen=True)
class RetrievalResult(OfTrials):
    """All trials of one measure and one model; every figure is worked out from them.

    Attributes:
        measure: "needle" or "topics".
        trials: in the order of kinds and lengths.
        rule: how an answer is scored, in a sentence for each kind.
        chance: by kind, what blind guessing among all that stands in the prompt is worth.
        examples: by kind, one whole prompt as text, to show.
        setting: what the definition says besides, e.g. the text that things are hidden in.
    """

    measure: str
    trials: tuple[RetrievalTrial, ...]
    rule: dict[str, str]
    chance: dict[str, str]
    examples: dict[str, str]
    setting: str

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(trial.kind for trial in self.trials))

    def by_length(self, kind: str) -> dict[int, float]:
        """Mean score by prompt length in tokens."""
        lengths = sorted({trial.length for trial in self.trials if trial.kind == kind})
        return {n: _mean(t for t in self.trials if (t.kind, t.length) == (kind, n)) for n in lengths}

    def cells(self, kind: str) -> dict[tuple[int, float], float]:
        """Mean score by (length, depth)."""
        found: dict[tuple[int, float], list[RetrievalTrial]] = {}
        for trial in self.trials:
            if trial.kind == kind:
                found.setdefault((trial.length, round(trial.depth, 4)), []).append(trial)
        return {cell: _mean(found[cell]) for cell in sorted(found)}

    @property
    def definition(self) -> str:
        counts = {(t.kind, t.length): 0 for t in self.trials}
        for trial in self.trials:
            counts[trial.kind, trial.length] += 1
        asked = "/".join(map(str, sorted(set(counts.values()))))
        rules = "; ".join(f"{kind}: {self.rule[kind]} (chance {self.chance[kind]})" for kind in self.kinds)
        return (
            f"{self.measure.capitalize()}: {asked} prompts a length and kind, {self.setting}; prompt and answer "
            f"together are exactly `length` tokens; plain text without a chat template, greedy decoding. {rules}."
        )

    def metrics(self) -> dict[str, float]:
        """{"needle/single/2048": 0.98, …}"""
        return {f"{self.measure}/{kind}/{n}": value for kind in self.kinds for n, value in self.by_length(kind).items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "definition": self.definition,
            "measure": self.measure,
            "setting": self.setting,
            "rule": self.rule,
            "chance": self.chance,
            "by_length": {kind: {str(n): v for n, v in self.by_length(kind).items()} for kind in self.kinds},
            "cells": [
                {"kind": kind, "length": n, "depth": depth, "score": value}
                for kind in self.kinds
                for (n, depth), value in self.cells(kind).items()
            ],
            "examples": self.examples,
            "trials": [asdict(trial) for trial in self.trials],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RetrievalResult:
        """The opposite of `to_dict`."""
        trials = tuple(RetrievalTrial(**{**t, "expected": tuple(t["expected"])}) for t in data["trials"])
        return cls(data["measure"], trials, data["rule"], data["chance"], data["examples"], data["setting"])

    @classmethod
    def joined(cls, parts: Sequence[RetrievalResult]) -> RetrievalResult:
        """Results of single lengths as one; examples are those of the shortest."""
        first = parts[0]
        trials = tuple(trial for part in parts for trial in part.trials)
        chance = {kind: _range([part.chance[kind] for part in parts]) for kind in first.chance}
        return cls(first.measure, trials, first.rule, chance, first.examples, first.setting)


def ask(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    score: Callable[[str, str, tuple[str, ...]], float],
    measure: str,
    batch_size: int | None = None,
    progress: bool = True,
) -> list[RetrievalTrial]:
    """Greedy answers to prompts, scored.

    Args:
        score: of (kind, answer, expected), 0…1.
        measure: for the progress bar.

    Raises:
        PoSEError: too little memory for one prompt, found before the model runs where it can be foreseen.
    """
    tokenizer = plain_tokenizer(tokenizer)
    groups: dict[tuple[int, int], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.length, prompt.budget), []).append(prompt)
    device = device_of(model)
    fits = {n: fitting(model, device, n, batch_size or max(1, 16384 // n)) for n, _ in groups}
    ends = end_tokens(tokenizer, model)
    trials: list[RetrievalTrial] = []
    total = sum(map(len, groups.values()))
    with evaluating(model), tqdm(total=total, desc=measure, unit="prompt", disable=not progress) as bar:
        for (length, _), rows in groups.items():
            bar.set_postfix_str(f"{length} tokens")
            run = functools.partial(_decode, model, device=device, fit=fits[length])
            written = [ids for batch in in_batches(rows, fits[length].batch, run) for ids in _seen(batch, bar)]
            for prompt, ids in zip(rows, written, strict=True):
                end = next((i for i, token in enumerate(ids) if token in ends), None)
                answer = tokenizer.decode(ids[:end], skip_special_tokens=True)
                value = score(prompt.kind, answer, prompt.expected)
                trials.append(RetrievalTrial(prompt.kind, length, prompt.depth, prompt.expected, answer, value))
    order = {kind: i for i, kind in enumerate(dict.fromkeys(trial.kind for trial in trials))}
    return sorted(trials, key=lambda trial: (order[trial.kind], trial.length))


def require_counts(lengths: Sequence[int], trials: int, depths: Sequence[float] | None = None) -> None:
    """Checks what every retrieval measure is given.

    Raises:
        PoSEError: no lengths, no trials, fewer trials than depths, a depth outside 0…1.
    """
    if not whole(lengths):
        raise PoSEError("lengths is empty; give the prompt lengths in tokens, e.g. lengths=[2048, 4096]")
    if trials < 1:
        raise PoSEError(f"trials={trials} measures nothing; use at least 1")
    if depths is None:
        return
    if not 1 <= len(depths) <= trials:
        raise PoSEError(
            f"depths has {len(depths)} values for trials={trials}; each depth needs a trial: raise trials to "
            f"{max(len(depths), 1)} or give 1 to {trials} depths"
        )
    outside = [depth for depth in depths if not 0 <= depth <= 1]
    if outside:
        raise PoSEError(f"depths={outside[0]} is outside 0…1; 0 is the start of the text, 1 its end")


def end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Tokens that end an answer, by the tokenizer and by the model's generation config."""
    config = getattr(model, "generation_config", None)
    ends = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    return {i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None}


def _decode(model: Any, rows: Sequence[Prompt], device: torch.device, fit: Fit) -> list[list[int]]:
    ids = torch.tensor([row.ids for row in rows], device=device)
    return greedy(model, ids, rows[0].budget, fit.chunk).tolist()


def _seen(batch: list[list[int]], bar: Any) -> list[list[int]]:
    bar.update(len(batch))
    return batch


def _mean(trials: Iterable[RetrievalTrial]) -> float:
    scores = [trial.score for trial in trials]
    return sum(scores) / len(scores)


def _range(values: list[str]) -> str:
    values = list(dict.fromkeys(values))
    return values[0] if len(values) == 1 else f"{values[0]} … {values[-1]}"
