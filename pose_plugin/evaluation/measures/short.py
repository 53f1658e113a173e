"""The short-context guard: perplexity at the window that the base was made with. Has short skill suffered?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.config import Length, PositiveInt
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.measures.perplexity import Perplexity
from pose_plugin.evaluation.results import ERRORS, FEWEST, Result, Row

WORSE = 5
"""Per cent of perplexity that a model may lose against the first one before the guard says so."""
TOKENS, LEAST = 100_000, 20
"""Tokens and windows that are read by default: eight windows differ by more than most models do."""


class Short(Perplexity):
    """Perplexity at one window, compared with that of the first model."""

    name: ClassVar[str] = "short"
    title: ClassVar[str] = "Short-context guard: perplexity at {length}"
    by_default: ClassVar[bool] = False
    ranked: ClassVar[bool] = False
    reads_lengths: ClassVar[bool] = False
    size: ClassVar[tuple[str, str]] = ("short_length", "a smaller short_length")
    comparison: ClassVar[tuple[str, str] | None] = ("against {first}", "skill")

    short_length: Length | None = Field(None, description="window length in tokens; default: the base's window")
    max_windows: PositiveInt | None = Field(
        None, description=f"windows (the command reads as many as hold {TOKENS} tokens, at least {LEAST})",
        json_schema_extra={"training": 10},
    )  # fmt: skip

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        known = windows or Windows()
        self.short_length = self.short_length or known.base or known.trained or min(lengths)
        self.max_windows = self.max_windows or max(LEAST, TOKENS // self.short_length)
        super().prepare(tokenizer, [self.short_length], windows)

    def run(self, model: Any, length: int) -> Result:
        found = super().run(model, length)
        definition = f"Short-context guard, at the window that the base was made with. {found.definition}"
        return replace(found, definition=definition, rows=found.rows[:1], logged_as="short_perplexity")

    @classmethod
    def compare(cls, row: Row, first: Row) -> tuple[str, str]:
        """Return the change of perplexity with its 95 % interval, and a verdict if the interval allows one.

        Both models read the same windows, so what counts is how the difference varies between windows.
        """
        differences = [mine - theirs for mine, theirs in zip(row.samples, first.samples, strict=False)]
        if not math.isfinite(first.score) or len(row.samples) != len(first.samples):
            return "-", "-"
        if not math.isfinite(row.score):
            return "-", "lost"
        if len(differences) < FEWEST:
            return f"{100 * (row.score / first.score - 1):+.1f} %", f"not clear: fewer than {FEWEST} windows"
        change = math.log(row.score / first.score)
        error = ERRORS * statistics.stdev(differences) / math.sqrt(len(differences))
        low, middle, high = (100 * math.expm1(change + part) for part in (-error, 0, error))
        verdict = f"worse by more than {WORSE} %" if low > WORSE else "kept" if high < WORSE else "not clear"
        return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})", verdict
