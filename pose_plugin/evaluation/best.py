"""Which of several models is best, by measure and over all: users found early checkpoints better than late ones.

Models are asked the same prompts and read the same windows, so two of them are compared prompt by prompt: what counts
is the mean difference against its own standard error, which is smaller than those of the two figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.evaluation.results import ModelResult, Report

FEWEST = 5
"""Prompts or windows below which nothing is told apart."""
ERRORS = 2
"""Standard errors of the mean difference that tell two models apart."""


@dataclass(frozen=True)
class Best:
    """One measure: every model's figure, and who leads; several names are a tie.

    Attributes:
        values: the figure of each model.
        higher: whether more is better.
        samples: what each figure is the mean of, prompt by prompt or window by window; losses in nats.
    """

    measure: str
    values: dict[str, float]
    higher: bool
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        best = (max if self.higher else min)(self.values.values())
        return [name for name, value in self.values.items() if value == best]

    @property
    def close(self) -> list[str]:
        """Models with another figure than the best that cannot be told apart from it."""
        first = self.names
        return [name for name in self.values if name not in first and not all(self.apart(name, one) for one in first)]

    def apart(self, one: str, other: str) -> bool:
        """Whether the mean difference of two models is above two standard errors of it, from five samples on."""
        if math.isinf(self.values[one]) != math.isinf(self.values[other]):
            return True
        mine, theirs = self.samples.get(one, ()), self.samples.get(other, ())
        differences = [a - b for a, b in zip(mine, theirs, strict=False)]
        if len(mine) != len(theirs) or len(mine) < FEWEST or not all(map(math.isfinite, differences)):
            return False
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return abs(statistics.fmean(differences)) > ERRORS * error

    def rank(self, name: str) -> float:
        """1 for the best; models with equal figures share the mean of their places."""
        mine = self.values[name]
        better = sum((value > mine) if self.higher else (value < mine) for value in self.values.values())
        return better + (sum(value == mine for value in self.values.values()) + 1) / 2


@dataclass(frozen=True)
class _Figure:
    """One model's figure at one length, and what it is the mean of."""

    value: float
    samples: tuple[float, ...] = ()


def best_by_measure(report: Report) -> list[Best]:
    """The measures that at least two models have at the same lengths, each as one figure.

    Retrieval counts as the mean over the lengths beyond the trained window, where there are any; losses are taken at
    the longest length, of models whose tokenizers make the same tokens as the first one's.
    """
    retrieval: dict[str, dict[str, dict[int, _Figure]]] = {}
    losses: dict[str, dict[str, dict[int, _Figure]]] = {}
    for m in report.models:
        for measure, figures in _retrieval(m).items():
            retrieval.setdefault(measure, {})[m.name] = figures
        for measure, figures in _losses(m).items() if m.tokens == report.models[0].tokens else ():
            losses.setdefault(measure, {})[m.name] = figures
    found = []
    for measure, rows in retrieval.items():
        shared = _shared(rows)
        far = [n for n in shared if report.train_length and n > report.train_length]
        used = far or shared
        if used:
            where = f"mean beyond {report.train_length}" if far else "mean over lengths"
            values = {name: sum(row[n].value for n in used) / len(used) for name, row in rows.items()}
            samples = {name: tuple(s for n in used for s in row[n].samples) for name, row in rows.items()}
            found.append(Best(f"{measure}, {where}", values, True, samples))
    for measure, rows in losses.items():
        shared = _shared(rows)
        last = {name: row[shared[-1]] for name, row in rows.items()} if shared else {}
        # What is not a number is no good loss.
        values = {name: math.inf if math.isnan(figure.value) else figure.value for name, figure in last.items()}
        if any(map(math.isfinite, values.values())):
            samples = {name: figure.samples for name, figure in last.items()}
            found.append(Best(f"{measure} at {shared[-1]}", values, False, samples))
    return found


def _retrieval(m: ModelResult) -> dict[str, dict[int, _Figure]]:
    found = {}
    if m.passkey:
        found["passkey"] = _means((t.length, float(t.correct)) for t in m.passkey.trials)
    for result in (m.needle, m.topics):
        for kind in result.kinds if result else ():
            assert result is not None
            found[f"{result.measure} {kind}"] = _means((t.length, t.score) for t in result.trials if t.kind == kind)
    return found


def _losses(m: ModelResult) -> dict[str, dict[int, _Figure]]:
    found = {}
    if m.perplexity:
        found["perplexity"] = {n: _Figure(w.perplexity, w.losses) for n, w in m.perplexity.by_length.items()}
    if m.longppl:
        found["LongPPL"] = {n: _Figure(w.longppl, w.losses) for n, w in m.longppl.by_length.items()}
    if m.gap:
        found["gap loss"] = {n: _Figure(p.loss, p.losses) for n, p in m.gap.by_length.items()}
    return found


def _means(scores: Any) -> dict[int, _Figure]:
    rows: dict[int, list[float]] = {}
    for length, score in scores:
        rows.setdefault(length, []).append(score)
    return {n: _Figure(sum(row) / len(row), tuple(row)) for n, row in rows.items()}


def _shared(rows: dict[str, dict[int, _Figure]]) -> list[int]:
    """The lengths that all of several models have; none for a model alone, as it has nothing to be better than."""
    if len(rows) < 2:
        return []
    return sorted(set.intersection(*(set(row) for row in rows.values())))


def overall(found: Sequence[Best]) -> list[tuple[str, float]]:
    """(name, mean rank) of the models that have every measure, the best first."""
    names = [name for name in (found[0].values if found else {}) if all(name in best.values for best in found)]
    return sorted(((name, sum(b.rank(name) for b in found) / len(found)) for name in names), key=lambda pair: pair[1])


def sentence(found: Sequence[Best]) -> str | None:
    """Names the best model over all measures, and those that no measure tells apart from it; None for no measure."""
    ranks = overall(found)
    if not ranks:
        return None
    leaders = [name for name, rank in ranks if rank == ranks[0][1]]
    listed = ", ".join(f"{name} {rank:.2f}" for name, rank in ranks)
    alike = [name for name, _ in ranks if name not in leaders and not any(b.apart(name, leaders[0]) for b in found)]
    said = f"Best over all measures: {' = '.join(leaders)} (mean rank: {listed}; 1 is best in every measure)."
    if not alike:
        return said
    return f"{said} No measure tells {' or '.join(alike)} apart from {leaders[0]}: more trials or longer texts would."
