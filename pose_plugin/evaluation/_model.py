"""Running a model for evaluation: modes and random state as found, logits only where they are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.errors import PoSEError


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode and torch's random state are put back."""
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


def device_of(model: torch.nn.Module) -> torch.device:
    """Where inputs go: the device of the input embeddings (a model may be spread over several devices)."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def innermost(model: Any) -> Any:
    """The transformers model under a PEFT, DDP or compile wrapper."""
    while True:
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        else:
            inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None or inner is model:
            return model
        model = inner


def last_logits(model: Any, input_ids: torch.Tensor, keep: int) -> torch.Tensor:
    """Logits of the last `keep` positions, from one forward without cache.

    Args:
        model: a causal language model.
        input_ids: [B, T] on the model's device, no padding; positions are 0 … T-1.
        keep: how many positions; [T × vocab] is never built.

    Returns:
        [B, keep, vocab]
    """
    if takes(model, "logits_to_keep"):
        return model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
    decoder, head = decoder_and_head(model)
    hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    return head(hidden[:, -keep:])


def decoder_and_head(model: Any) -> tuple[Any, Any]:
    """The part that gives hidden states [B, T, H] and the part that makes logits of them.

    Raises:
        PoSEError: for a model that has no such parts.
    """
    inner = innermost(model)
    decoder = getattr(inner, getattr(inner, "base_model_prefix", "") or "model", None)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if decoder is None or decoder is inner or head is None:
        raise PoSEError(
            f"model={type(inner).__name__} can be evaluated neither through logits_to_keep nor through its "
            "hidden states and output embeddings; use a causal language model of transformers"
        )
    return decoder, head


def greedy(model: Any, input_ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The `new_tokens` most likely next tokens, one by one, with the key-value cache.

    Unlike in `model.generate`, the model's generation config (sampling, penalties) has no part in it.

    Args:
        model: a causal language model with a cache.
        input_ids: [B, T], no padding.

    Returns:
        [B, new_tokens]
    """
    extra = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    step, cache, chosen = input_ids, None, []
    for _ in range(new_tokens):
        output = model(input_ids=step, past_key_values=cache, use_cache=True, **extra)
        cache = output.past_key_values
        step = output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(step)
    return torch.cat(chosen, 1)


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(innermost(model).forward).parameters
