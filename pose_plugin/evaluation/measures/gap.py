"""The gap probe: what does a model make of near tokens at far positions? Where RoPE fails, at one cost for all lengths.

    positions   0 … 383 | 384 + gap … 639 + gap        the loss of the last 256 tokens, by gap

The text is short, so this says whether the rotations of far positions are understood, not whether far tokens are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.measure import Measure, Windows
from pose_plugin.evaluation.measures.perplexity import tokenized
from pose_plugin.evaluation.prompts import leading_ids
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError

TOKENS, MOVED = 640, 256


def gap_probe(model: Any, tokenizer: Any, texts: str | Sequence[Any], lengths: Sequence[int], **options: Any) -> Result:
    """Measure the loss of near tokens at far positions; `options` are the fields of `Gap`.

    Args:
        texts: texts, or their token ids without special tokens.
        lengths: farthest position + 1 of each probe; no memory for that many tokens is needed. The piece without a
            gap is always measured too.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    return Gap(texts=texts, **options).measure(model, tokenizer, lengths)


class Gap(Measure):
    """Loss of the last two fifths of a short piece, moved to far positions.

    Attributes:
        tokens: of one piece; default: 640, or the smallest length if that is less.
    """

    name: ClassVar[str] = "gap"
    title: ClassVar[str] = "Gap probe: loss by farthest position"
    label: ClassVar[str] = "loss of the moved tokens (nats)"
    x_label: ClassVar[str] = "farthest position"
    needs_texts: ClassVar[bool] = True
    reads_lengths: ClassVar[bool] = False

    max_windows: PositiveInt = Field(
        8, description="pieces of text (the command reads 8)", json_schema_extra={"training": 10}
    )
    tokens: PositiveInt | None = None

    _pieces: list[list[int]] = PrivateAttr([])
    _size: int = 0

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        super().prepare(tokenizer, lengths, windows)
        self._size = size = self.tokens or min(TOKENS, self._lengths[0])
        if size < 10 or self._lengths[0] < size:
            raise PoSEError(f"lengths={self._lengths}: each must be at least the {max(size, 10)} tokens of a piece")
        begin = leading_ids(self._tokenizer)
        named = "tokens", f"a length below {size}, which makes shorter pieces"
        used, own = tokenized(self._tokenizer, self.texts, size, begin, None, named), size - len(begin)
        pieces = [[*begin, *ids[at : at + own]] for ids in used for at in range(0, len(ids) - own + 1, own)]
        if len(pieces) > self.max_windows:
            pieces = [pieces[i * len(pieces) // self.max_windows] for i in range(self.max_windows)]
        self._pieces = pieces

    def pieces(self) -> list[int]:
        return sorted({self._size, *self._lengths})

    def work(self, length: int) -> Work:
        return Work(self._size, len(self._pieces))

    def run(self, model: Any, length: int) -> Result:
        from pose_plugin.attention import restart_boundaries
        from pose_plugin.evaluation.losses import losses_of

        moved = self._size * MOVED // TOKENS
        positions = np.arange(self._size)
        positions[self._size - moved :] += length - self._size
        # By transformers' rule for packed rows the moved tokens would be another document.
        with restart_boundaries():
            losses = losses_of(model, self._pieces, lambda _, row: float(row[-moved:].mean()), self, positions)
        definition = (
            f"Gap probe: {len(self._pieces)} pieces of {self._size} tokens, spread evenly over the texts. The last "
            f"{moved} tokens are at positions moved on so that the farthest is `length` - 1; their mean loss in nats "
            f"is given. {self._size} is the same without a gap."
        )
        row = Row(length, sum(losses) / len(losses), moved * len(losses), samples=tuple(losses))
        return Result(self.name, definition, (row,), logged_as="gap_loss")

    def depends(self) -> dict[str, Any]:
        return {**super().depends(), "size": self._size}
