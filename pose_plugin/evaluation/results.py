"""The data of an evaluation: every measure returns a `Result`, and its rows make tables, files, pictures and logs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

FEWEST = 5
"""Prompts or windows below which any difference is within noise."""
SHORTEST_HALF = 512
"""Tokens down to which k_max halves a measured length."""
ERRORS = 2
"""Standard errors of the mean difference above which two models differ."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        length: tokens of the prompt or window, or the farthest position + 1.
        score: the figure, e.g. the share of answers found, or a perplexity.
        n: prompts or tokens that `score` is the mean of.
        kind: e.g. "single"; "" for a measure of one kind.
        depth: where the answer is, 0 (start of the prompt) to 1 (end); None if that does not apply.
        distance: how many tokens from the end the answer is; None if that does not apply.
        samples: what two models are compared by: one value per prompt, window, text or piece. Losses in nats.
        note: what a reader must know about this length, e.g. the chance level.
        view: the name of a second look at the same data, e.g. "position"; tables and the best skip these rows.
        details: more columns, e.g. the answer.
    """

    length: int
    score: float
    n: int = 1
    kind: str = ""
    depth: float | None = None
    distance: int | None = None
    samples: tuple[float, ...] = ()
    note: str = ""
    view: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def compared(self) -> tuple[float, ...]:
        """The samples; the score itself if it is the only one."""
        return self.samples or (self.score,)

    @property
    def standard_error(self) -> float:
        """√(p(1-p)/n) for shares. It is 0 at p = 0 and 1, where `interval` still says what n trials can tell."""
        with np.errstate(invalid="ignore"):
            return float(np.std(self.compared)) / math.sqrt(len(self.compared))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927) for a share."""
        z, n, p = 1.959964, self.n, self.score
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def to_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults."""
        empty = Row(0, 0.0)
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: v for name, v in values.items() if name in ("length", "score") or v != getattr(empty, name)}


@dataclass(frozen=True)
class Result:
    """What one measure found of one model.

    Attributes:
        measure: name of the measure.
        definition: what was measured, in a sentence: figures with different definitions cannot be compared.
        rows: in the order of kinds and lengths.
        examples: one prompt of each kind, to show.
        logged_as: the name in logs while training; default: `measure`.

    Example:
        >>> found = passkey(model, tokenizer, [512, 1024], trials=5)
        >>> {length: row.score for length, row in found.by_length().items()}
        {512: 1.0, 1024: 0.8}
    """

    measure: str
    definition: str
    rows: tuple[Row, ...]
    examples: dict[str, str] = field(default_factory=dict)
    logged_as: str = ""

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(row.kind for row in self.rows if not row.view))

    @property
    def lengths(self) -> list[int]:
        """In tokens, the shortest first."""
        return sorted({row.length for row in self.rows if not row.view})

    @property
    def described(self) -> str:
        """The definition with the notes of each length."""
        notes = {" ".join(filter(None, [row.kind, str(row.length)])): row.note for row in self.rows if row.note}
        listed = "; ".join(f"{where}: {note}" for where, note in notes.items())
        return f"{self.definition} By length: {listed}." if listed else self.definition

    def by_length(self, kind: str | None = None) -> dict[int, Row]:
        """Return one row per length, over all depths.

        Args:
            kind: default: the first one.
        """
        kind = kind if kind is not None else next(iter(self.kinds), "")
        rows = [row for row in self.rows if row.kind == kind and not row.view]
        return {n: replace(_merged(r for r in rows if r.length == n), depth=None) for n in self.lengths if
                any(r.length == n for r in rows)}  # fmt: skip

    def by_depth(self, kind: str | None = None) -> dict[tuple[int, float], Row]:
        """Return one row per (length, depth); {} for a measure without depths."""
        kind = kind if kind is not None else next(iter(self.kinds), "")
        cells: dict[tuple[int, float], list[Row]] = {}
        for row in self.rows:
            if row.kind == kind and row.depth is not None and not row.view:
                cells.setdefault((row.length, round(row.depth, 4)), []).append(row)
        return {cell: _merged(cells[cell]) for cell in sorted(cells)}

    def view(self, name: str) -> list[Row]:
        """Return the rows of a second look at the same data, e.g. "position"."""
        return [row for row in self.rows if row.view == name]

    def k_max(self, threshold: float = 0.2) -> int:
        """Return the effective length of Chen et al. (2023, arXiv 2306.15595).

        It is the largest distance to the end, in tokens, at which, and at all smaller ones, a share of at least
        `threshold` is found; 0 if there is none. A model that sees exactly its last w tokens has a k_max of w, in
        prompts of any length. Distances are judged in steps of a quarter of the way from one measured length to the
        next, several together if they hold fewer than five prompts; prompts that remain are judged one by one. Where a
        measured length is more than twice the one before, its half, its quarter and so on count as lengths too, down to
        512 tokens.
        """
        marks = [0]
        for length in self.lengths:
            halves = {length >> k for k in range(32)}
            marks += sorted({length, *(half for half in halves if half > marks[-1] and half >= SHORTEST_HALF)})
        steps = [low + (high - low) * quarter // 4 for low, high in itertools.pairwise(marks)
                 for quarter in (1, 2, 3, 4)]  # fmt: skip
        trials = sorted((row.distance, row.score) for row in self.rows if row.distance is not None)
        best, found, group = 0, 0, list[tuple[int, float]]()
        for edge in steps:
            while trials and trials[0][0] <= edge:
                group.append(trials.pop(0))
            if not group or (len(group) < FEWEST and trials):
                continue
            # One hit among fewer than five says nothing about the nearer ones, so these are judged one by one.
            few = len(group) < FEWEST
            if not few and sum(score for _, score in group) / len(group) < threshold:
                return best
            judged = itertools.takewhile(lambda trial: trial[1] >= threshold, group) if few else group
            hits = [distance for distance, score in judged if score]
            if not hits:
                return best
            found, farthest, group = hits[-1], group[-1][0], []
            best = next(step for step in steps if step >= found)
        # The words around a fact keep it from being at the longest distance itself.
        return steps[-1] if best and found == farthest >= 7 / 8 * steps[-1] else best

    def metrics(self) -> dict[str, float]:
        """Return the scores by name, e.g. {"needle/single/2048": 0.98}."""
        return {
            "/".join(filter(None, [self.logged_as or self.measure, kind, str(length)])): row.score
            for kind in self.kinds
            for length, row in self.by_length(kind).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, down to the single prompt, for JSON."""
        return {
            "measure": self.measure,
            "definition": self.definition,
            "scores": self.metrics(),
            "rows": [row.to_dict() for row in self.rows],
            "examples": self.examples,
            "logged_as": self.logged_as,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Read what `to_dict` returned."""
        rows = tuple(Row(**{**row, "samples": tuple(row.get("samples", ()))}) for row in data["rows"])
        return cls(data["measure"], data["definition"], rows, data["examples"], data["logged_as"])


def joined(parts: Sequence[Result]) -> Result:
    """Return results of single lengths as one; definition and examples are those of the first."""
    rows = [row for part in parts for row in part.rows]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    return replace(parts[0], rows=tuple(sorted(rows, key=lambda row: (kinds.index(row.kind), row.length))))


def _merged(rows: Iterable[Row]) -> Row:
    rows = list(rows)
    if len(rows) == 1:
        return rows[0]
    n = sum(row.n for row in rows)
    score = sum(row.score * row.n for row in rows) / n
    samples = tuple(sample for row in rows for sample in row.compared)
    return replace(rows[0], score=score, n=n, samples=samples, details={})


@dataclass(frozen=True)
class Work:
    """What a measurement takes: `sequences` forwards of `length` tokens, and `steps` tokens decoded after each."""

    length: int
    sequences: int
    steps: int = 0


@dataclass
class ModelResult:
    """One model's line of the tables.

    Attributes:
        name: how the model is called in tables and pictures.
        results: what was measured, by the name of the measure.
        notes: what a reader must know, e.g. lengths beyond the config's maximum.
        facts: what is known about the model (path, rope parameters, …), kept in the JSON.
        tokens: a hash of the tokens of the texts. Losses are compared only between models with equal tokens.
    """

    name: str
    results: dict[str, Result] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tokens: str = ""


@dataclass
class Report:
    """Results of several models, and the two windows to mark.

    Attributes:
        models: in the order of the rows; usually base, RoPE-only, trained.
        train_length: L_c, the trained window in tokens, if known.
        target_length: L_t, the target window in tokens, if known.
    """

    models: list[ModelResult]
    train_length: int | None = None
    target_length: int | None = None

    @property
    def measures(self) -> list[str]:
        """Names of what was measured of any model."""
        return list(dict.fromkeys(name for model in self.models for name in model.results))
