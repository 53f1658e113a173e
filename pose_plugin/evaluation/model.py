"""Run a model for evaluation: restore modes and random state, and compute only the logits that are needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.evaluation.sharded import InStep
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch to evaluation mode without gradients; restore every module's mode and torch's random state at the end."""
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


def progress_bar(name: str, total: int, unit: str, show: bool) -> Any:
    """Return a bar on the terminal that disappears when it is done."""
    return tqdm(total=total, desc=name, unit=unit, disable=not show, leave=False)


def device_of(model: Any) -> torch.device:
    """Return the device of the input embeddings; a model may be spread over several devices."""
    if isinstance(model, InStep):
        return model.device
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def last_logits(model: Any, input_ids: torch.Tensor, keep: int, chunk: int | None = None) -> torch.Tensor:
    """Return the logits of the last `keep` positions.

    Args:
        model: a causal language model.
        input_ids: [B, T] on the model's device, no padding; positions are 0 … T-1.
        keep: how many positions; [T × vocab] is never built.
        chunk: None: one forward without cache. Else the text is read that many tokens at a time with the
            key-value cache, so that activations are those of a chunk and only the cache grows with T.

    Returns:
        [B, keep, vocab]
    """
    cache = None
    if chunk is not None and chunk < input_ids.shape[1] - keep:
        cache = prefill(model, input_ids[:, :-keep], chunk)[1]
        input_ids = input_ids[:, -keep:]
    shared = {"input_ids": input_ids, "use_cache": cache is not None}
    if cache is not None:
        shared["past_key_values"] = cache
    with _only_last(model, keep) as extra:
        return model(**shared, **extra).logits


def prefill(model: Any, input_ids: torch.Tensor, chunk: int | None = None) -> tuple[torch.Tensor, Any]:
    """Read a text into the key-value cache, `chunk` tokens at a time (None: at once).

    Args:
        model: a causal language model with a cache.
        input_ids: [B, T], no padding.

    Returns:
        [B, vocab], the logits after the last token; the cache.
    """
    cache, logits = None, None
    with _only_last(model, 1) as extra:
        for piece in input_ids.split(chunk or input_ids.shape[1], 1):
            output = model(input_ids=piece, past_key_values=cache, use_cache=True, **extra)
            cache, logits = output.past_key_values, output.logits[:, -1]
    assert logits is not None
    return logits, cache


@contextmanager
def head_doing(model: Any, work: Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let the model's own forward call `work(head, hidden)` instead of its output embeddings.

    Whatever wraps the model (ZeRO-3, FSDP2, autocast, an adapter) works as in any other forward.

    Raises:
        PoSEError: for a model that has no output embeddings.
    """
    inner = unwrap(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None:
        raise PoSEError(
            f"model={type(inner).__name__} can be evaluated neither through logits_to_keep nor through its output "
            "embeddings; use a causal language model of transformers"
        )
    own, patched = head.forward, "forward" in vars(head)
    head.forward = lambda hidden, *args, **kwargs: work(own, hidden)
    try:
        yield
    finally:
        if patched:
            head.forward = own
        else:
            del head.forward


@contextmanager
def _only_last(model: Any, keep: int) -> Iterator[dict[str, int]]:
    """Yield the arguments with which a forward returns the logits of the last `keep` positions only."""
    if takes(model, "logits_to_keep"):
        yield {"logits_to_keep": keep}
        return
    with head_doing(model, lambda head, hidden: head(hidden[:, -keep:])):
        yield {}


def greedy(model: Any, input_ids: torch.Tensor, new_tokens: int, chunk: int | None = None) -> torch.Tensor:
    """Return the `new_tokens` most likely next tokens, one by one, with the key-value cache.

    Unlike `model.generate`, it ignores the model's generation config (sampling, penalties).

    Args:
        model: a causal language model with a cache.
        input_ids: [B, T], no padding.
        chunk: how many tokens of the prompt are read at a time; None: all.

    Returns:
        [B, new_tokens]
    """
    logits, cache = prefill(model, input_ids, chunk)
    chosen = [logits.argmax(-1, keepdim=True)]
    extra = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    while len(chosen) < new_tokens:
        output = model(input_ids=chosen[-1], past_key_values=cache, use_cache=True, **extra)
        cache = output.past_key_values
        chosen.append(output.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(chosen, 1)


def takes(model: Any, name: str) -> bool:
    """Return whether the model's forward has an argument of this name."""
    return name in inspect.signature(unwrap(model).forward).parameters
