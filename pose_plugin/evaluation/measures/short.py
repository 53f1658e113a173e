"""The short-context guard: perplexity at the window that the base was made with. Has short skill suffered?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.measures.perplexity import Perplexity
from pose_plugin.evaluation.results import Result

WORSE = 5
"""Per cent of perplexity that a model may lose against the first one before the guard says so."""


class Short(Perplexity):
    """Perplexity at one window, compared with that of the first model."""

    name: ClassVar[str] = "short"
    title: ClassVar[str] = "Short-context guard: perplexity at {length}"
    by_default: ClassVar[bool] = False
    ranked: ClassVar[bool] = False
    comparison: ClassVar[tuple[str, str] | None] = ("against {first}", "skill")

    short_length: PositiveInt | None = Field(None, description="window length in tokens; default: the base's window")
    max_windows: PositiveInt | None = Field(20, description="windows", json_schema_extra={"training": 10})

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        known = windows or Windows()
        self.short_length = self.short_length or known.base or known.trained or min(lengths)
        super().prepare(tokenizer, [self.short_length], windows)

    def run(self, model: Any, length: int) -> Result:
        found = super().run(model, length)
        definition = f"Short-context guard, at the window that the base was made with. {found.definition}"
        return replace(found, definition=definition, rows=found.rows[:1], logged_as="short_perplexity")

    @classmethod
    def compare(cls, score: float, first: float) -> tuple[str, str]:
        if not math.isfinite(first):
            return "-", "-"
        if not math.isfinite(score):
            return "-", "lost"
        change = 100 * (score / first - 1)
        return f"{change:+.1f} %", f"worse by more than {WORSE} %" if change > WORSE else "kept"
