"""The loss of every token of a window without [tokens × vocab] logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.memory import LOGIT_BYTES, in_batches
from pose_plugin.evaluation.model import device_of, evaluating, head_doing, progress_bar, read, takes, unwrap
from pose_plugin.utils.errors import PoSEError

Found = TypeVar("Found")


def losses_of(
    model: Any,
    windows: Sequence[list[int]],
    read: Callable[[int, np.ndarray], Found],
    measure: Measure,
    positions: np.ndarray | None = None,
) -> list[Found]:
    """Return what `read` makes of the losses of each window; the model's mode and random state are restored afterwards.

    Args:
        windows: token ids, all of the same length T.
        read: of the number of a window and the losses in nats of its tokens 1 … T-1, float64 [T-1].
        measure: its batch size and progress bar.
        positions: position ids [T], read in one piece; default: 0 … T-1.

    Raises:
        PoSEError: too little memory for one window.
    """
    device, length = device_of(model), len(windows[0])
    with evaluating(model), progress_bar(f"{measure.name} {length}", len(windows), "window", measure.progress) as bar:
        token_loss = TokenLoss(model)

        def run(batch: Sequence[tuple[int, list[int]]], chunk: int | None) -> list[Found]:
            ids = torch.tensor([window for _, window in batch], device=device)
            if positions is None:
                losses = token_loss(ids, chunk)
            else:
                # With a mask, since without one transformers takes a jump for the border of two documents.
                places = torch.tensor(positions, device=device).expand(len(batch), -1)
                losses = token_loss(ids, None, position_ids=places, attention_mask=torch.ones_like(ids))
            bar.update(len(batch))
            return [read(i, row) for (i, _), row in zip(batch, losses.double().numpy(), strict=True)]

        return in_batches(model, list(enumerate(windows)), length, run, measure.batch_size)


class TokenLoss:
    """-log p of every token given those before it; call it within `evaluating(model)`.

    The logits are computed and scored a few rows at a time inside one forward. A test on eight tokens shows first
    whether that gives the model's own losses. If not (an unusual head, a PEFT method in the outer forward), the whole
    forward runs once for each piece.

    Raises:
        PoSEError: a model that allows neither.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        vocab = unwrap(model).config.get_text_config().vocab_size
        self.rows = max(1, LOGIT_BYTES // 4 // vocab)
        self.at_head = self._agrees(torch.arange(8, device=device_of(model))[None] % vocab)
        if not self.at_head and not takes(model, "logits_to_keep"):
            raise PoSEError(
                f"model={type(unwrap(model)).__name__} changes its logits in its own way and takes no "
                "logits_to_keep, so perplexity cannot be measured in pieces; use a transformers model class"
            )

    def __call__(self, input_ids: torch.Tensor, chunk: int | None = None, **forward: Any) -> torch.Tensor:
        """Return the loss in nats of tokens 1 … T-1.

        Args:
            input_ids: [B, T] on the model's device, no padding.
            chunk: tokens read at a time with the key-value cache; None: all at once, without one.
            forward: more arguments of a forward that reads all at once, e.g. position_ids.

        Returns:
            float32 [B, T-1] on the CPU
        """
        length = input_ids.shape[1]
        chunk = None if chunk is None or chunk >= length else chunk
        run = self._at_head if self.at_head else self._in_pieces
        return torch.cat(run(input_ids, chunk, forward), 1)

    def _at_head(self, input_ids: torch.Tensor, chunk: int | None, forward: dict[str, Any]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        per_row = max(1, self.rows // input_ids.shape[0])
        start, step, cache = 0, chunk or input_ids.shape[1], None

        def score(head: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
            targets = input_ids[:, start + 1 : start + 1 + hidden.shape[1]]
            for first in range(0, targets.shape[1], per_row):
                piece = targets[:, first : first + per_row]
                logits = self._after_head(head(hidden[:, first : first + piece.shape[1]]))
                losses.append(_loss(logits, piece))
            # The model may change these as it changes logits; nobody reads them.
            return hidden.new_zeros(*hidden.shape[:-1], 1)

        with head_doing(self.model, score):
            for start in range(0, input_ids.shape[1], step):
                piece = input_ids[:, start : start + step]
                if chunk is None:
                    self.model(input_ids=piece, use_cache=False, **forward)
                else:
                    cache = read(self.model, piece, cache)[1]
        return losses

    def _in_pieces(self, input_ids: torch.Tensor, chunk: int | None, forward: dict[str, Any]) -> list[torch.Tensor]:
        losses, cache, length = [], None, input_ids.shape[1]
        per_row = max(1, self.rows // input_ids.shape[0])
        step = per_row if chunk is None else min(chunk, per_row)
        for start in range(0, length - 1, step):
            if chunk is None:
                keep = torch.arange(start, min(start + step, length - 1), device=input_ids.device)
                logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep, **forward).logits
            else:
                logits, cache = read(self.model, input_ids[:, start : start + step], cache)
            targets = input_ids[:, start + 1 : start + step + 1]
            losses.append(_loss(logits[:, : targets.shape[1]], targets))
        return losses

    def _after_head(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale or cap the output of the head as Cohere, Granite and Gemma 2 do."""
        config = unwrap(self.model).config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _agrees(self, probe: torch.Tensor) -> bool:
        if any(config.peft_type != "LORA" for config in getattr(self.model, "peft_config", {}).values()):
            return False
        try:
            mine = torch.cat(self._at_head(probe, None, {}) or [torch.empty(0, 0)], 1)
        except (PoSEError, RuntimeError, AttributeError, TypeError, IndexError):
            return False
        whole = _loss(self.model(input_ids=probe, use_cache=False).logits[:, :-1], probe[:, 1:])
        tolerance = 1e-4 if next(self.model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2
        return mine.shape == whole.shape and torch.allclose(mine, whole, rtol=tolerance, atol=tolerance)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[B, N, vocab] and [B, N] → float32 [B, N] on the CPU."""
    return F.cross_entropy(logits.float().mT, targets, reduction="none").cpu()
