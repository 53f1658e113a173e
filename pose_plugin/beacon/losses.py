"""The loss over a whole stream, and the per-token figures that trainers request with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

IGNORED = -100


@dataclass
class TokenOutput(ModelOutput):
    """Per-token figures instead of logits, for trainers with a fused head (`fused_lm_head=True`).

    Shapes: (batch, tokens), or one token less if labels were shifted here; zero if the label is ignored.
    """

    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    is_top1: Any = None
    label_mask: Any = None
    aux_loss: Any = None


@dataclass
class CountedOutput(CausalLMOutputWithPast):
    """Logits and three sums over the tokens that have a label; see `Reading.report_statistics`."""

    num_correct_tokens: Any = None
    entropy_sum: Any = None
    num_valid_tokens: Any = None
    aux_loss: Any = None


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Move labels one place to the left over the whole input, before anything is cut.

    The last token of an interval predicts the first of the next; shifting within each interval would lose it.

    Returns:
        (batch, tokens) as `labels`, the last column ignored.
    """
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], dim=1)


def stream_loss(
    model: Any, logits: torch.Tensor, labels: torch.Tensor | None, shifted: torch.Tensor, items: Any = None
) -> torch.Tensor:
    """Return the mean loss over all tokens (or the sum divided by `items`), by the model's own loss function.

    Args:
        model: the base; trainers may have given it another loss.
        logits: of all raw tokens, (batch, tokens, vocabulary); beacon rows have none.
        labels: (batch, tokens) as given, for loss functions that read them; None if only shifted ones were given.
        shifted: (batch, tokens), see `shift_labels`.
        items: tokens of the whole step, over accumulation and ranks (`num_items_in_batch`).
    """
    return model.loss_function(
        logits=logits,
        labels=labels,
        vocab_size=logits.shape[-1],
        num_items_in_batch=items,
        shift_labels=shifted.contiguous(),
    )


def token_figures(logits: torch.Tensor, shifted: torch.Tensor, items: Any = None) -> TokenOutput:
    """Return each label's log-probability (with gradient), the entropy, and whether the label was the likeliest token.

    Args:
        shifted: the label that each row of logits predicts, (batch, tokens), −100 for none.
        items: divides the summed loss; None: the tokens with a label.
    """
    mask = shifted != IGNORED
    log_p = logits.float().log_softmax(-1)
    picked = log_p.gather(-1, shifted.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(~mask, 0)
        top = (log_p.argmax(-1) == shifted) & mask
    loss = -picked.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return TokenOutput(loss=loss, log_probs=picked, entropy=entropy, is_top1=top.to(log_p.dtype), label_mask=mask)
