"""An Axolotl plugin: each row is also read with plain positions, and training pulls the two readings together.

The reading with plain positions is the teacher and gets no gradient. The reading with skipped positions is the student.
The loss is cross entropy plus WEIGHT times the Kullback-Leibler divergence of the student from the teacher, over the
labelled tokens. The idea is that of RoPE-Perturbed Self-Distillation (arXiv 2604.14339), here on short rows.

Rows must not be packed, and a step must be one micro-batch (`gradient_accumulation_steps: 1`), because the divergence
is a mean over the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from torch.nn.functional import kl_div, log_softmax

WEIGHT = 1.0


class TwoViewsTrainer(AxolotlTrainer):
    """Adds the divergence to the loss of training; evaluation is unchanged."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        """Return the loss, and with `return_outputs` the student's outputs too."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss + WEIGHT * pull(model, inputs, outputs.logits)
        return (loss, outputs) if return_outputs else loss


def pull(model: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return the divergence of logits, (rows, tokens, vocabulary), from those that plain positions give."""
    ids, labelled = inputs["input_ids"], inputs["labels"][:, 1:] != -100
    plain = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with torch.no_grad():
        teacher = model(input_ids=ids, attention_mask=inputs["attention_mask"], position_ids=plain).logits
    return divergence(logits[:, :-1][labelled], teacher[:, :-1][labelled])


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the mean divergence of the student's next-token distributions from the teacher's, in nats.

    Args:
        student: logits of shape (tokens, vocabulary).
        teacher: logits of the same shape, without gradient.
    """
    student, teacher = log_softmax(student.float(), -1), log_softmax(teacher.float(), -1)
    return kl_div(student, teacher, log_target=True, reduction="batchmean")


class TwoViews(BasePlugin):
    """Trains with TwoViewsTrainer."""

    def get_trainer_cls(self, cfg: Any) -> type[AxolotlTrainer]:
        """Return the trainer that Axolotl builds."""
        return TwoViewsTrainer
