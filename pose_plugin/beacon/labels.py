"""The loss over a whole stream."""

from __future__ import annotations

from typing import Any

import torch

IGNORED = -100


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels moved one place to the left over the whole input, before anything is cut.

    The last token of an interval predicts the first of the next; shifting in each interval would lose it.

    Args:
        labels: (batch, tokens).

    Returns:
        (batch, tokens), the last column ignored.
    """
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], dim=1)


def stream_loss(
    model: Any,
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token mean over all intervals (or the sum over `num_items_in_batch`), by the model's own loss function.

    Args:
        model: the base, which may have been given another loss.
        logits: of all raw tokens, (batch, tokens, vocabulary); beacon rows have none.
        labels: (batch, tokens), unshifted; None where `shift_labels` is given.
        num_items_in_batch: tokens of the whole step, over accumulation and ranks.
        shift_labels: (batch, tokens), shifted already.
    """
    shifted = shift_labels if shift_labels is not None else _shift(labels)
    return model.loss_function(
        logits=logits,
        labels=labels,
        vocab_size=logits.shape[-1],
        num_items_in_batch=num_items_in_batch,
        shift_labels=shifted.contiguous(),
    )


_shift: Any = shift_labels
