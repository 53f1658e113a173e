"""Which of several models is best, by measure and over all: users found early checkpoints better than late ones.

Models answer the same prompts and read the same windows, so two of them are compared prompt by prompt: what counts
is the mean difference against its own standard error, which is smaller than those of the two figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pose_plugin.evaluation.measures import MEASURES
from pose_plugin.evaluation.results import ERRORS, FEWEST, Report, Row


@dataclass(frozen=True)
class Best:
    """One measure: every model's figure, and the best of them; several names are a tie.

    Attributes:
        measure: what is compared, e.g. "passkey, mean beyond 2048".
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
        """Models with another figure than the best whose difference from it is within noise."""
        first = self.names
        return [name for name in self.values if name not in first and not all(self.apart(name, one) for one in first)]

    def apart(self, one: str, other: str) -> bool:
        """Return whether the mean difference of two models is above two standard errors of it."""
        if math.isinf(self.values[one]) != math.isinf(self.values[other]):
            return True
        mine, theirs = self.samples.get(one, ()), self.samples.get(other, ())
        differences = [a - b for a, b in zip(mine, theirs, strict=False)]
        if len(mine) != len(theirs) or len(mine) < FEWEST or not all(map(math.isfinite, differences)):
            return False
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return abs(statistics.fmean(differences)) > ERRORS * error

    def rank(self, name: str) -> float:
        """Return 1 for the best; models with equal figures share the mean of their places."""
        mine = self.values[name]
        better = sum((value > mine) if self.higher else (value < mine) for value in self.values.values())
        return better + (sum(value == mine for value in self.values.values()) + 1) / 2


def best_by_measure(report: Report) -> list[Best]:
    """Return the measures that at least two models have at the same lengths, each as one figure.

    Shares count as the mean over the lengths beyond the trained window, if any; kinds without such a length then do not
    count. Losses are taken at the longest length, of models whose tokenizers make the same tokens as the first one's.
    """
    found = []
    trained = report.train_length or 0
    for name in report.measures:
        measure = MEASURES[name]
        if not measure.ranked:
            continue
        # Losses per token mean something else where tokens differ.
        models = [m for m in report.models if name in m.results]
        models = [m for m in models if measure.higher_is_better or m.tokens == report.models[0].tokens]
        shared = {}
        for kind in dict.fromkeys(kind for m in models for kind in m.results[name].kinds):
            rows = {m.name: m.results[name].by_length(kind) for m in models if kind in m.results[name].kinds}
            lengths = sorted(set.intersection(*(set(row) for row in rows.values())))
            if len(rows) > 1 and lengths and kind in (measure.ranked_kinds or (kind,)):
                shared[f"{name} {kind}".strip()] = rows, lengths
        reaches = any(lengths[-1] > trained for _, lengths in shared.values())
        for title, (rows, lengths) in shared.items():
            if not measure.higher_is_better:
                if any(math.isfinite(row[lengths[-1]].score) for row in rows.values()):
                    found.append(_longest(title, rows, lengths[-1]))
            elif lengths[-1] > trained or not reaches:
                found.append(_mean(title, rows, lengths, trained))
    return found


def _mean(title: str, rows: dict[str, dict[int, Row]], lengths: list[int], trained: int) -> Best:
    far = [n for n in lengths if trained and n > trained]
    used = far or lengths
    where = f"mean beyond {trained}" if far else "mean over lengths"
    values = {name: sum(row[n].score for n in used) / len(used) for name, row in rows.items()}
    samples = {name: tuple(sample for n in used for sample in row[n].compared) for name, row in rows.items()}
    return Best(f"{title}, {where}", values, True, samples)


def _longest(title: str, rows: dict[str, dict[int, Row]], length: int) -> Best:
    # NaN would compare as neither better nor worse.
    values = {name: math.inf if math.isnan(row[length].score) else row[length].score for name, row in rows.items()}
    return Best(f"{title} at {length}", values, False, {name: row[length].samples for name, row in rows.items()})


def overall(found: Sequence[Best]) -> list[tuple[str, float]]:
    """Return (name, mean rank) of the models that have every measure, the best first."""
    names = [name for name in (found[0].values if found else {}) if all(name in best.values for best in found)]
    return sorted(((name, sum(b.rank(name) for b in found) / len(found)) for name in names), key=lambda pair: pair[1])


def best_sentence(found: Sequence[Best]) -> str | None:
    """Return the name of the best model over all measures, and of those within noise of it; None without measures."""
    ranks = overall(found)
    if not ranks:
        return None
    leaders = [name for name, rank in ranks if rank == ranks[0][1]]
    listed = ", ".join(f"{name} {rank:.2f}" for name, rank in ranks)
    alike = [name for name, _ in ranks if name not in leaders and not any(b.apart(name, leaders[0]) for b in found)]
    text = f"Best over all measures: {' = '.join(leaders)} (mean rank: {listed}; 1 is best in every measure)."
    if not alike:
        return text
    return (
        f"{text} Differences between {leaders[0]} and {' or '.join(alike)} are within noise in every measure; use more "
        "trials or longer texts."
    )
