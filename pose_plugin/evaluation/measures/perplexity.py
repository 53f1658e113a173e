"""Sliding-window perplexity at each window size (Press et al. 2021; PoSE paper, section 4.2).

    length 8, stride 4        window 1   [a b c d e f g h]
    . = seen, not scored      window 2           [. . . . i j k l]
                              window 3             [. . . . . . . m]  ends with the text

Every token of a text is scored once, with at least length - stride tokens before it except at the text's start.
So each length scores the same tokens, unless `max_windows` picks some windows out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from pose_plugin.config import Length, PositiveInt
from pose_plugin.evaluation.measure import Measure, Windows
from pose_plugin.evaluation.prompts import ids_of_each, leading_ids
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.tables import counted

Window = tuple[list[int], int]
"""Token ids, and how many of the first are context only."""


def perplexity(
    model: Any, tokenizer: Any, texts: str | Sequence[Any], lengths: Sequence[int], **options: Any
) -> Result:
    """Measure sliding-window perplexity; `options` are the fields of `Perplexity`.

    Args:
        texts: texts, or their token ids without special tokens. Those shorter than the largest length are left out
            at every length.
        lengths: window sizes in tokens, the begin-of-text token included.

    Example:
        >>> perplexity(model, tokenizer, [book], [2048], max_windows=50).by_length()[2048].score
        8.1
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    return Perplexity(texts=texts, **options).measure(model, tokenizer, lengths)


class Perplexity(Measure):
    """Mean loss of tokens, by window size and by position in the window.

    Attributes:
        bos: whether the begin-of-text token is put before every window; default: as the tokenizer does it.
        buckets: into how many position ranges a window is split.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Sliding-window perplexity"
    label: ClassVar[str] = "perplexity (log scale)"
    log_scale: ClassVar[bool] = True
    needs_texts: ClassVar[bool] = True
    by_default: ClassVar[bool] = True
    size: ClassVar[tuple[str, str]] = ("length", "other lengths")
    """The setting that a text can be too short for, and what else to give."""

    stride: Length | None = Field(
        None, description="tokens between the starts of two windows; default: half of each length"
    )
    max_windows: PositiveInt | None = Field(
        None, description="windows per length, spread evenly (the command reads all)",
        json_schema_extra={"training": 10},
    )  # fmt: skip
    max_tokens: Length | None = Field(None, description="tokens used from the start of each text; default: all")
    bos: bool | None = None
    buckets: PositiveInt = 8

    _documents: list[list[int]] = PrivateAttr([])
    _begin: list[int] = PrivateAttr([])

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        super().prepare(tokenizer, lengths, windows)
        self._begin = leading_ids(self._tokenizer)
        if self.bos is not None:
            self._begin = [self._tokenizer.bos_token_id] if self.bos else []
        if self._begin == [None]:
            raise PoSEError("bos=True, but this tokenizer has no begin-of-text token; leave bos out")
        longest = self._lengths[-1]
        self._documents = tokenized(self._tokenizer, self.texts, longest, self._begin, self.max_tokens, self.size)

    def work(self, length: int) -> Work:
        return Work(length, len(self._windows(length)))

    def run(self, model: Any, length: int) -> Result:
        from pose_plugin.evaluation.losses import losses_of

        windows = self._windows(length)
        tally = _Tally(length, self.buckets)
        losses = losses_of(model, [ids for ids, _ in windows], lambda i, row: tally.add(windows[i][1], row), self)
        count, stride = len(windows), self._stride(length)
        note = f"stride {stride}, {tally.tokens} tokens in {counted(count, 'window')}"
        loss = tally.total / tally.tokens
        row = Row(
            length, _exp(loss), tally.tokens, samples=tuple(losses), note=note,
            details={"loss": loss, "windows": count, "stride": stride},
        )  # fmt: skip
        return Result(self.name, self._definition(), (row, *tally.rows()))

    def depends(self) -> dict[str, Any]:
        return {**super().depends(), "longest": self._lengths[-1]}

    def _stride(self, length: int) -> int:
        # A larger stride would leave tokens out, as the first token of a window is never scored.
        return min(self.stride or length // 2, length - 1)

    def _windows(self, length: int) -> list[Window]:
        found = sliding(self._documents, self._begin, length, self._stride(length))
        most = self.max_windows
        if most is None or len(found) <= most:
            return found
        return [found[round(i * (len(found) - 1) / max(most - 1, 1))] for i in range(most)]

    def _definition(self) -> str:
        bos = (
            "the begin-of-text token is before every window, counts in its length and is not scored"
            if self._begin
            else "no begin-of-text token, so the first token of a text is not scored"
        )
        capped = "" if self.max_tokens is None else f" cut to {self.max_tokens} tokens"
        picked = (
            f"; at most {counted(self.max_windows, 'window')} per length, evenly spaced" if self.max_windows else ""
        )
        return (
            "Sliding-window perplexity: a token is scored once, in the first window that holds it"
            f"{picked}; mean over tokens of {counted(len(self._documents), 'text')}{capped} "
            f"({len(self.texts) - len(self._documents)} shorter than the largest window left out); {bos}. By position "
            "all tokens of every window count."
        )

    @classmethod
    def show(cls, row: Row) -> str:
        # As in the papers: above a thousand only the order of magnitude matters.
        return f"{row.score:.2f}" if row.score < 1000 else f"{row.score:.1e}"


class _Tally:
    """Sums of losses in float64, so that a mean over a million tokens keeps its digits."""

    def __init__(self, length: int, buckets: int) -> None:
        self.length, self.total, self.tokens = length, 0.0, 0
        edges = [(length * k // buckets, length * (k + 1) // buckets) for k in range(buckets)]
        # Position 0 has nothing before it, so a bucket for it alone would be empty.
        self.edges = [(start, end) for start, end in edges if max(start, 1) < end]
        self.sums, self.counts = [0.0] * len(self.edges), [0] * len(self.edges)

    def add(self, unscored: int, losses: np.ndarray) -> float:
        """Add a window and return its mean loss; losses[i] is that of the token at position i + 1."""
        scored = losses[max(unscored, 1) - 1 :]
        self.total += float(scored.sum())
        self.tokens += len(scored)
        for i, (start, end) in enumerate(self.edges):
            part = losses[max(start, 1) - 1 : end - 1]
            self.sums[i] += float(part.sum())
            self.counts[i] += len(part)
        return float(scored.mean())

    def rows(self) -> list[Row]:
        """Return the perplexity of each position range."""
        found = []
        for (start, end), total, count in zip(self.edges, self.sums, self.counts, strict=True):
            details = {"from": start, "to": end, "loss": total / count}
            found.append(Row(self.length, _exp(total / count), count, view="position", details=details))
        return found


def tokenized(
    tokenizer: Any,
    texts: Sequence[Any],
    length: int,
    begin: Sequence[int],
    max_tokens: int | None = None,
    size: tuple[str, str] = Perplexity.size,
) -> list[list[int]]:
    """Return the token ids of each text that fills a window.

    Args:
        texts: texts, or their token ids without special tokens.
        length: of the window in tokens.
        begin: ids before every window.
        max_tokens: tokens taken of each text.
        size: where `length` is from, and what else to give, for the message.

    Raises:
        PoSEError: no text is long enough.
    """
    least = len(begin) + 2
    documents = [ids[:max_tokens] for ids in ids_of_each(tokenizer, texts)]
    used = [ids for ids in documents if len(ids) + len(begin) >= max(length, least)]
    if not used or length < least:
        longest = max(map(len, documents), default=0)
        raise PoSEError(
            f"{size[0]}={length} is more than the longest of {counted(len(documents), 'text')} has ({longest} tokens"
            + (f", max_tokens={max_tokens}" if max_tokens else "")
            + f"), or below the {least} tokens of the smallest window; give longer texts or {size[1]}"
        )
    return used


def sliding(documents: Sequence[list[int]], begin: Sequence[int], length: int, stride: int) -> list[Window]:
    """Return the windows of texts, each with the number of its first tokens that are context only."""
    holds = length - len(begin)
    windows = []
    for ids in documents:
        seen = 0
        last = len(ids) - holds
        for start in [*range(0, last, stride), last]:
            windows.append(([*begin, *ids[start : start + holds]], len(begin) + max(seen - start, 0)))
            seen = start + holds
    return windows


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)
