"""LongPPL: perplexity over the tokens that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

Plain perplexity hardly depends on far tokens, as most tokens follow from the last few hundred. A *key token* is one
that an evaluator model predicts much better with the whole text before it than with the last K tokens:

    log P(x | all before) - log P(x | last K) > alpha     and     log P(x | all before) > beta

LongPPL of a model is exp(mean loss of the key tokens), given everything before them. The evaluator alone decides which
tokens are key, for all models; so figures with different evaluators cannot be compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from pose_plugin.config import Length
from pose_plugin.evaluation.measure import Measure, Windows
from pose_plugin.evaluation.measures.perplexity import tokenized
from pose_plugin.evaluation.prompts import ids_of_each, leading_ids
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import lengths_of
from pose_plugin.utils.tables import counted


def longppl(
    model: Any, judge: Any, tokenizer: Any, texts: Sequence[Any], lengths: Sequence[int], **options: Any
) -> Result:
    """Measure LongPPL; `options` are the fields of `LongPPL`.

    Args:
        judge: the evaluator, a model that can use the lengths and has the same tokenizer.
        tokenizer: of both.
        texts: texts, or their token ids without special tokens; each is cut to its first `length` tokens.
        lengths: of the long context in tokens, the begin-of-text token included.
    """
    measure = LongPPL(texts=list(texts), **options)
    measure.prepare(tokenizer, lengths_of(lengths))
    measure.answers = {n: measure.ask(judge, n) for n in measure.pieces()}
    return measure.measure(model, tokenizer, lengths)


class LongPPL(Measure):
    """Mean loss of key tokens. The answer of the evaluator is a list of positions in the window for each text.

    Attributes:
        alpha: least gain in nats; 2 in the paper.
        beta: least log-probability in nats; -2 in the paper.
    """

    name: ClassVar[str] = "longppl"
    title: ClassVar[str] = "LongPPL"
    label: ClassVar[str] = "LongPPL"
    needs_texts: ClassVar[bool] = True
    needs_evaluator: ClassVar[bool] = True

    evaluator: str | None = Field(
        None,
        description="the model (folder or hub name) that selects the key tokens; the command: the last MODEL",
    )
    short_context: Length | None = Field(
        None, description="K, the short context in tokens; default: the trained window"
    )
    max_tokens: Length | None = Field(None, description="tokens used from the start of each text; default: all")
    alpha: float = 2.0
    beta: float = -2.0

    _ids: list[list[int]] = PrivateAttr([])
    _begin: list[int] = PrivateAttr([])
    _short: int = 0

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        super().prepare(tokenizer, lengths, windows)
        self._begin = leading_ids(self._tokenizer)
        self._short = self.short_context or (windows or Windows()).trained or self._lengths[0]
        self._lengths = [n for n in self._lengths if n > self._short]
        if not self._lengths:
            raise PoSEError(
                f"longppl compares with the last short_context={self._short} tokens, and no length of {list(lengths)} "
                "is longer; give longer lengths, or a smaller short_context"
            )
        self._ids = ids_of_each(self._tokenizer, self.texts)
        for n in self._lengths:
            self._documents(n)

    def pieces(self) -> list[int]:
        return [n for n in self._lengths if self.answers is None or n in self.answers]

    def work(self, length: int) -> Work:
        return Work(length, len(self._documents(length)))

    def ask_work(self, length: int) -> list[Work]:
        texts, pieces = len(self._documents(length)), len(self._starts(length))
        return [Work(length, texts), Work(min(self._first + self._step, length), texts * pieces)]

    def ask(self, evaluator: Any, length: int) -> list[list[int]]:
        """Return the positions of the key tokens of each text.

        Raises:
            PoSEError: there are none.
        """
        from pose_plugin.evaluation.losses import losses_of

        windows, first = self._documents(length), self._first
        far: list[np.ndarray] = losses_of(evaluator, windows, lambda _, row: row[first - 1 :], self)
        near = [np.empty(length - first, np.float64) for _ in windows]
        # Tokens first … length-1, `step` at a time, each group with the K tokens before it.
        step = self._step
        starts = [(i, start) for i in range(len(windows)) for start in self._starts(length)]
        for size in dict.fromkeys(min(step, length - start) for _, start in starts):
            same = [(i, start) for i, start in starts if min(step, length - start) == size]
            rows = [[*self._begin, *windows[i][start - self._short : start + size]] for i, start in same]
            found: list[np.ndarray] = losses_of(evaluator, rows, functools.partial(_last, size), self)
            for (i, start), losses in zip(same, found, strict=True):
                near[i][start - first : start - first + size] = losses
        keys = [
            (np.flatnonzero((n - f > self.alpha) & (-f > self.beta)) + first).tolist()
            for n, f in zip(near, far, strict=True)
        ]
        if not any(keys):
            raise PoSEError(
                f"length={length}: no token gains {self.alpha:g} nats over the last short_context={self._short} "
                "tokens, so LongPPL is not defined; give longer or more texts, an evaluator that uses its context, or "
                "a smaller short_context"
            )
        return keys

    def run(self, model: Any, length: int) -> Result:
        from pose_plugin.evaluation.losses import losses_of

        windows, keys = self._documents(length), (self.answers or {})[length]
        if len(windows) != len(keys):
            raise PoSEError(f"{len(windows)} texts, but key tokens of {len(keys)}; let the evaluator read these texts")

        def sums(i: int, row: np.ndarray) -> tuple[float, float]:
            # row[p - 1] is the loss of the token at position p.
            return float(row[np.array(keys[i], int) - 1].sum()), float(row[self._first - 1 :].sum())

        found = losses_of(model, windows, sums, self)
        count, all_tokens = sum(map(len, keys)), len(windows) * (length - self._first)
        loss, plain = (sum(column) / n for column, n in zip(zip(*found, strict=True), (count, all_tokens), strict=True))
        means = tuple(key / len(own) for (key, _), own in zip(found, keys, strict=True) if own)
        note = f"{count} of {all_tokens} tokens in {counted(len(windows), 'text')} are key"
        details = {"loss": loss, "plain_loss": plain, "plain_tokens": all_tokens}
        row = Row(length, math.exp(min(loss, 700)), count, samples=means, note=note, details=details)
        return Result(self.name, self._definition(), (row,))

    @property
    def _first(self) -> int:
        """The first position that is compared."""
        return self._short + len(self._begin)

    @property
    def _step(self) -> int:
        """The windows of the short side slide on by a quarter of K, so each token has K to 1.25 K before it."""
        return max(1, self._short // 4)

    def _starts(self, length: int) -> range:
        """Return the first position of each group of tokens that the evaluator reads with a short context."""
        return range(self._first, length, self._step)

    def _documents(self, length: int) -> list[list[int]]:
        used = tokenized(self._tokenizer, self._ids, length, self._begin, self.max_tokens)
        return [[*self._begin, *ids[: length - len(self._begin)]] for ids in used]

    def _definition(self) -> str:
        return (
            "LongPPL (arXiv 2410.23771): perplexity over key tokens of the texts that have `length` tokens, each cut "
            f"to them; lengths of up to {self._short} tokens are left out. A token is key if the evaluator, "
            f"{self.evaluator}, gives it a log-probability above {self.beta:g} with all before it, and gains more than "
            f"{self.alpha:g} over the last {self._short} (to "
            f"{self._short + self._step}) tokens alone. An evaluator that is one of the models favours that model."
        )

    def depends(self) -> dict[str, Any]:
        return {**super().depends(), "short": self._short}


def _last(count: int, number: int, losses: np.ndarray) -> np.ndarray:
    return losses[-count:]
