"""Which of several models is best, by measure and over all: users found early checkpoints better than late ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pose_plugin.evaluation.report import Report


@dataclass(frozen=True)
class Best:
    """One measure: every model's figure, and who leads; several names are a tie."""

    measure: str
    values: dict[str, float]
    higher: bool

    @property
    def names(self) -> list[str]:
        best = (max if self.higher else min)(self.values.values())
        return [name for name, value in self.values.items() if value == best]

    def rank(self, name: str) -> float:
        """1 for the best; models with equal figures share the mean of their places."""
        mine = self.values[name]
        better = sum((value > mine) if self.higher else (value < mine) for value in self.values.values())
        return better + (sum(value == mine for value in self.values.values()) + 1) / 2


def best_by_measure(report: Report) -> list[Best]:
    """The measures that at least two models have at the same lengths, each as one figure.

    Retrieval counts as the mean over the lengths beyond the trained window, where there are any; losses are taken at
    the longest length.
    """
    retrieval: dict[str, dict[str, dict[int, float]]] = {}
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for m in report.models:
        if m.passkey:
            retrieval.setdefault("passkey", {})[m.name] = {n: a.value for n, a in m.passkey.by_length.items()}
        for result in (m.needle, m.topics):
            for kind in result.kinds if result else ():
                assert result is not None
                retrieval.setdefault(f"{result.measure} {kind}", {})[m.name] = result.by_length(kind)
        if m.perplexity:
            losses.setdefault("perplexity", {})[m.name] = {n: w.perplexity for n, w in m.perplexity.by_length.items()}
        if m.longppl:
            losses.setdefault("LongPPL", {})[m.name] = {n: w.longppl for n, w in m.longppl.by_length.items()}
        if m.gap:
            losses.setdefault("gap loss", {})[m.name] = {n: p.loss for n, p in m.gap.by_length.items()}
    found = []
    for measure, figures in retrieval.items():
        shared = _shared(figures)
        far = [n for n in shared if report.train_length and n > report.train_length]
        used = far or shared
        if used:
            where = f"mean beyond {report.train_length}" if far else "mean over lengths"
            values = {name: sum(row[n] for n in used) / len(used) for name, row in figures.items()}
            found.append(Best(f"{measure}, {where}", values, True))
    for measure, figures in losses.items():
        shared = _shared(figures)
        last = {name: row[shared[-1]] for name, row in figures.items()} if shared else {}
        values = {name: value for name, value in last.items() if math.isfinite(value)}
        if len(values) > 1:
            found.append(Best(f"{measure} at {shared[-1]}", values, False))
    return found


def _shared(figures: dict[str, dict[int, float]]) -> list[int]:
    """The lengths that all of several models have; none for a model alone, as it has nothing to be better than."""
    if len(figures) < 2:
        return []
    return sorted(set.intersection(*(set(row) for row in figures.values())))


def overall(found: list[Best]) -> list[tuple[str, float]]:
    """(name, mean rank) of the models that have every measure, the best first."""
    names = [name for name in (found[0].values if found else {}) if all(name in best.values for best in found)]
    return sorted(((name, sum(b.rank(name) for b in found) / len(found)) for name in names), key=lambda pair: pair[1])
