"""What several models were measured to be: the data that tables, pictures and the best model are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pose_plugin.evaluation.measures.gap import GapResult
from pose_plugin.evaluation.measures.harness import HarnessResult
from pose_plugin.evaluation.measures.longppl import LongPPLResult
from pose_plugin.evaluation.measures.passkey import PasskeyResult
from pose_plugin.evaluation.measures.perplexity import PerplexityResult
from pose_plugin.evaluation.retrieval import RetrievalResult


@dataclass
class ModelResult:
    """One row of the tables.

    Attributes:
        name: how the model is called in tables and pictures.
        passkey: its passkey result, if that was measured.
        perplexity: its perplexity result, if that was measured.
        notes: what a reader must know, e.g. lengths beyond the config's maximum.
        facts: what is known about the model (path, rope parameters, …), kept in the JSON.
        needle, topics, longppl, gap: the results of these measures.
        short: perplexity at the window that the base was made with, the guard against lost short skill.
        harness: tasks of lm-eval.
        tokens: what tells the tokens of its texts from those of other tokenizers, whose losses are of other tokens.
    """

    name: str
    passkey: PasskeyResult | None = None
    perplexity: PerplexityResult | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    needle: RetrievalResult | None = None
    topics: RetrievalResult | None = None
    longppl: LongPPLResult | None = None
    gap: GapResult | None = None
    short: PerplexityResult | None = None
    harness: HarnessResult | None = None
    tokens: str = ""

    def results(self) -> dict[str, Any]:
        """What was measured, by name."""
        found = {name: getattr(self, name) for name in RESULTS}
        return {name: result for name, result in found.items() if result is not None}


RESULTS = ("passkey", "perplexity", "needle", "topics", "longppl", "gap", "short", "harness")


@dataclass
class Report:
    """Results of several models, and the two windows to mark.

    Attributes:
        models: in the order of the rows; usually base, RoPE-only, trained.
        train_length: L_c, the trained window in tokens, if known.
        target_length: L_t, the wanted window in tokens, if known.
    """

    models: list[ModelResult]
    train_length: int | None = None
    target_length: int | None = None
