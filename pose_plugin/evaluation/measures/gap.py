"""The gap probe: what does a model make of near tokens at far positions? Where RoPE fails, at one cost for all.

    positions   0 … 383 | 384 + gap … 639 + gap        the loss of the last 256 tokens, by gap

The text is short, so this says whether the rotations of far positions are understood, not whether far tokens are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.attention import restart_boundaries
from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.losses import TokenLoss
from pose_plugin.evaluation.measures.perplexity import tokenised
from pose_plugin.evaluation.memory import fitting, in_batches
from pose_plugin.evaluation.model import device_of, evaluating
from pose_plugin.utils.errors import PoSEError

TOKENS, MOVED = 640, 256


@dataclass(frozen=True)
class Gap:
    """One gap: mean loss in nats over `count` tokens; the farthest position is length - 1. `losses` are by piece."""

    length: int
    gap: int
    loss: float
    count: int
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class GapResult:
    """By the farthest position + 1. `tokens` is the text of one probe, its last `moved` are moved on."""

    by_length: dict[int, Gap]
    tokens: int
    moved: int
    windows: int

    @property
    def definition(self) -> str:
        return (
            f"Gap probe: {self.windows} pieces of {self.tokens} tokens, spread evenly over the texts; the last "
            f"{self.moved} stand at positions moved on so that the farthest is `length` - 1, and their mean loss in "
            f"nats is given. {self.tokens} is the same without a gap."
        )

    def metrics(self) -> dict[str, float]:
        return {f"gap_loss/{n}": probe.loss for n, probe in self.by_length.items()}

    def to_dict(self) -> dict[str, Any]:
        rows = {str(n): asdict(probe) for n, probe in self.by_length.items()}
        shape = {"tokens": self.tokens, "moved": self.moved, "windows": self.windows}
        return {"definition": self.definition, **shape, "by_length": rows}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GapResult:
        """The opposite of `to_dict`."""
        rows = {int(n): Gap(**row | {"losses": tuple(row.get("losses", ()))}) for n, row in data["by_length"].items()}
        return cls(rows, data["tokens"], data["moved"], data["windows"])


def gap_probe(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str | Sequence[int]],
    lengths: Sequence[int],
    tokens: int | None = None,
    max_windows: int = 8,
    batch_size: int | None = None,
    progress: bool = True,
) -> GapResult:
    """Measures the loss of near tokens at far positions. The piece without a gap is always measured too.

    Args:
        model: a causal language model with rotary positions.
        tokenizer: its tokenizer.
        texts: texts, or their token ids without special tokens.
        lengths: farthest position + 1 of each probe; no memory of that many tokens is needed.
        tokens: of one piece; default: 640, or the smallest length if that is less. Two fifths of it are moved.
        max_windows: pieces measured.

    Raises:
        PoSEError: a length below `tokens`, no text of that many tokens, counts that cannot work.
    """
    if not whole(lengths):
        raise PoSEError("lengths is empty; give the farthest positions in tokens, e.g. lengths=[8192, 32768]")
    tokens = tokens or min(TOKENS, min(lengths))
    if tokens < 10 or min(lengths) < tokens:
        raise PoSEError(f"lengths={list(lengths)}: each must be at least the {max(tokens, 10)} tokens of a piece")
    if max_windows < 1:
        raise PoSEError(f"max_windows={max_windows} measures nothing; use at least 1")
    moved = tokens * MOVED // TOKENS
    used, begin, _ = tokenised(tokenizer, texts, [tokens])
    own = tokens - len(begin)
    pieces = [[*begin, *ids[at : at + own]] for ids in used for at in range(0, len(ids) - own + 1, own)]
    if len(pieces) > max_windows:
        pieces = [pieces[i * len(pieces) // max_windows] for i in range(max_windows)]
    device = device_of(model)
    batch = fitting(model, device, tokens, batch_size or max(1, 16384 // tokens)).batch
    ends = sorted({tokens, *lengths})
    results = {}
    # Our rule, and a mask besides: by transformers' own rule the moved tokens would be another document.
    with (
        evaluating(model),
        restart_boundaries(),
        tqdm(total=len(ends) * len(pieces), desc="gap", unit="piece", disable=not progress) as bar,
    ):
        token_loss = TokenLoss(model)
        for length in ends:
            bar.set_postfix_str(f"to {length}")
            positions = torch.arange(tokens, device=device)
            positions[tokens - moved :] += length - tokens

            def run(rows: Sequence[list[int]], places: torch.Tensor = positions) -> torch.Tensor:
                ids = torch.tensor(rows, device=device)
                given = {"position_ids": places.expand(len(rows), -1), "attention_mask": torch.ones_like(ids)}
                return token_loss(ids, None, **given)[:, -moved:].double()

            means: list[float] = []
            for losses in in_batches(pieces, batch, run):
                means += losses.mean(1).tolist()
                bar.update(len(losses))
            loss = sum(means) / len(means)
            results[length] = Gap(length, length - tokens, loss, moved * len(means), tuple(means))
    return GapResult(results, tokens, moved, len(pieces))
