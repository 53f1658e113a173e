"""The loss of every token of a window without [tokens × vocab] logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from pose_plugin.errors import PoSEError
from pose_plugin.evaluation._model import decoder_and_head, device_of, innermost, takes
from pose_plugin.evaluation.memory import LOGIT_BYTES


class TokenLoss:
    """-log p of every token given those before it; call it within `evaluating(model)`.

    One forward gives the hidden states and the output embeddings make logits of a few rows at a time.
    Whether that is all the model does is tested on eight tokens first. Where it is not (a head of its own
    kind, weights sharded by FSDP, a PEFT method at work in the outer forward) the whole forward is run for
    each piece.

    Args:
        model: a causal language model.

    Raises:
        PoSEError: a model that allows neither.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        vocab = innermost(model).config.get_text_config().vocab_size
        self.rows = max(1, LOGIT_BYTES // 4 // vocab)
        self.parts: tuple[Any, Any] | None = None
        self.parts = self._parts_that_agree(torch.arange(8, device=device_of(model))[None] % vocab)
        if self.parts is None and not takes(model, "logits_to_keep"):
            decoder_and_head(model)
            raise PoSEError(
                f"model={type(innermost(model)).__name__} changes its logits in its own way and takes no "
                "logits_to_keep, so perplexity cannot be measured in pieces; use a transformers model class"
            )

    def __call__(self, input_ids: torch.Tensor, chunk: int | None = None, **forward: Any) -> torch.Tensor:
        """The loss in nats of tokens 1 … T-1.

        Args:
            input_ids: [B, T] on the model's device, no padding.
            chunk: tokens read at a time with the key-value cache; None: all at once, without one.
            forward: more arguments of a forward that reads all at once, e.g. position_ids.

        Returns:
            float32 [B, T-1] on the CPU
        """
        batch, length = input_ids.shape
        per_row = max(1, self.rows // batch)
        losses = []
        for start, hidden in self._pieces(input_ids, chunk, per_row, forward):
            for first in range(0, hidden.shape[1], per_row):
                begin, end = start + first, min(start + first + per_row, start + hidden.shape[1], length - 1)
                if begin >= end:
                    continue
                logits = hidden[:, first : first + end - begin]
                logits = self._logits(logits) if self.parts else logits
                targets = input_ids[:, begin + 1 : end + 1]
                losses.append(F.cross_entropy(logits.float().mT, targets, reduction="none").cpu())
        return torch.cat(losses, 1)

    def _pieces(
        self, input_ids: torch.Tensor, chunk: int | None, per_row: int, forward: dict[str, Any]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, hidden states or, where the model has no parts, logits) piece by piece."""
        length = input_ids.shape[1]
        if chunk is not None and chunk < length:
            chunk = chunk if self.parts else min(chunk, per_row)
            run, cache = self.parts[0] if self.parts else self.model, None
            for start in range(0, length, chunk):
                output = run(input_ids=input_ids[:, start : start + chunk], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                yield start, output.last_hidden_state if self.parts else output.logits
        elif self.parts:
            yield 0, self._hidden(input_ids, **forward)
        else:
            for start in range(0, length - 1, per_row):
                keep = torch.arange(start, min(start + per_row, length - 1), device=input_ids.device)
                output = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep, **forward)
                yield start, output.logits

    def _hidden(self, input_ids: torch.Tensor, **forward: Any) -> torch.Tensor:
        decoder, _ = self.parts  # type: ignore[misc]
        return decoder(input_ids=input_ids, use_cache=False, **forward).last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head, and what Cohere, Granite and Gemma 2 do to its output."""
        _, head = self.parts  # type: ignore[misc]
        logits = head(hidden)
        config = innermost(self.model).config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _parts_that_agree(self, probe: torch.Tensor) -> tuple[Any, Any] | None:
        if any(config.peft_type != "LORA" for config in getattr(self.model, "peft_config", {}).values()):
            return None
        try:
            self.parts = decoder_and_head(self.model)
            mine = self._logits(self._hidden(probe)).float()
        except (PoSEError, RuntimeError, AttributeError, TypeError):
            return None
        whole = self.model(input_ids=probe, use_cache=False).logits.float()
        tolerance = 1e-4 if next(self.model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2
        same = torch.allclose(mine, whole, rtol=tolerance, atol=tolerance * float(whole.abs().max()))
        return self.parts if same else None
