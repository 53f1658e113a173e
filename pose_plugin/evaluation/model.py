"""Run a model for evaluation: restore modes and random state, and compute only the logits that are needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from pose_plugin.evaluation.sharded import InStep
from pose_plugin.rope.read import far_rope, lookup, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch to evaluation mode without gradients; restore every module's mode and torch's random state at the end.

    Dynamic NTK keeps the frequencies of the longest text so far. They are forgotten before and afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            model.eval()
            _forget_longest(model)
            yield
    finally:
        _forget_longest(model)
        for module, training in modes:
            module.training = training


def _forget_longest(model: Any) -> None:
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "original_inv_freq"):
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len


def end_of_short(config: Any) -> int | None:
    """Return the tokens up to which a text is short for longrope or dynamic NTK; None for other ropes.

    The tokens of a longer text are rotated by other frequencies, the first ones too.
    """
    config = text_config(config)
    rope = far_rope(lookup(config, "rope_parameters"))
    lists = rope.get("rope_type") == "longrope" and rope.get("short_factor") != rope.get("long_factor")
    if not lists and rope.get("rope_type") != "dynamic":
        return None
    return rope.get("original_max_position_embeddings") or lookup(config, "max_position_embeddings") or 0


def progress_bar(name: str, total: int, unit: str, show: bool) -> Any:
    """Return a bar on the terminal that disappears when it is done."""
    return tqdm(total=total, desc=name, unit=unit, disable=not show, leave=False)


def device_of(model: Any) -> torch.device:
    """Return the device of the input embeddings; a model may be spread over several devices."""
    if isinstance(model, InStep):
        return model.device
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def read(model: Any, input_ids: torch.Tensor, cache: Any = None, **forward: Any) -> tuple[torch.Tensor, Any]:
    """Read tokens behind a key-value cache.

    Args:
        input_ids: [B, T], no padding.
        cache: what an earlier call returned; None for an empty one. It may be changed in place.
        forward: more arguments of the forward, e.g. position_ids.

    Returns:
        the logits; the cache with the new tokens.
    """
    # transformers 5.24 calls it cache; earlier versions, and models with their own code, past_key_values.
    renamed = "cache" in CausalLMOutputWithPast.__dataclass_fields__
    name = "cache" if renamed and not takes(model, "past_key_values") else "past_key_values"
    output = model(input_ids=input_ids, use_cache=True, **{name: cache}, **forward)
    return output.logits, getattr(output, name)


def prefill(
    model: Any, input_ids: torch.Tensor, chunk: int | None = None, cache: Any = None
) -> tuple[torch.Tensor, Any]:
    """Read a text into the key-value cache, `chunk` tokens at a time (None: at once).

    [T × vocab] logits are never built. With a chunk, activations are those of a chunk and only the cache grows with T.

    Args:
        input_ids: [B, T], no padding.
        cache: of what is before the text; None for nothing.

    Returns:
        [B, vocab], the logits after the last token; the cache.
    """
    logits = torch.empty(0)
    with keeping(model, slice(-1, None)) as extra:
        for piece in input_ids.split(chunk or input_ids.shape[1], 1):
            logits, cache = read(model, piece, cache, **extra)
    return logits[:, -1], cache


def continues(model: Any, cache: Any = None) -> bool:
    """Return whether the model reads a text in pieces, with its cache, as it reads the whole text.

    Some recurrent layers forget the earlier pieces: those of Bamba, Jamba and MiniMax in transformers 5.16. If a model
    has other layers than attention, it reads sixteen tokens whole and in two pieces, and the logits are compared.

    Args:
        cache: one that the model has made, if there is one.
    """
    vocab = unwrap(model).config.get_text_config().vocab_size
    ids = (torch.arange(16, device=device_of(model)) % vocab)[None]
    if _attends(cache) or (cache is None and _attends(cache := read(model, ids[:, :8])[1])):
        return True
    logits, halves = read(model, ids)[0], read(model, ids[:, 8:], read(model, ids[:, :8])[1])[0]
    whole, halves = logits[:, -1].float(), halves[:, -1].float()
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    return float((whole - halves).abs().max()) <= (1e-3 if exact else 5e-2) * float(whole.abs().max())


def _attends(cache: Any) -> bool:
    """Return whether a cache holds keys and values alone, or is none of transformers'."""
    if cache is None or not isinstance(cache, DynamicCache):
        return cache is not None
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(type(layer) in plain for layer in cache.layers)


@contextmanager
def head_doing(model: Any, work: Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let the model's own forward call `work(head, hidden)` instead of its output embeddings.

    What wraps the model (ZeRO-3, FSDP2, autocast, an adapter) works as in any other forward.

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
def keeping(model: Any, places: slice | torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which a forward returns the logits of some of its tokens only.

    Args:
        places: of these tokens: `slice(-n, None)` for the last n, or their indices.
    """
    if takes(model, "logits_to_keep"):
        yield {"logits_to_keep": -places.start if isinstance(places, slice) else places}
        return
    with head_doing(model, lambda head, hidden: head(hidden[:, places])):
        yield {}


def greedy(
    model: Any, input_ids: torch.Tensor, new_tokens: int, chunk: int | None = None, cache: Any = None
) -> torch.Tensor:
    """Return the `new_tokens` most likely next tokens, one by one, with the key-value cache.

    Unlike `model.generate`, it ignores the model's generation config (sampling, penalties). Where the answer makes a
    short text long for the rope (see `end_of_short`), everything is read again.

    Args:
        input_ids: [B, T], no padding.
        chunk: how many tokens of the prompt are read at a time; None: all.
        cache: of what is before the prompt; it may be changed in place, and nothing is read again.

    Returns:
        [B, new_tokens]
    """
    short = end_of_short(getattr(unwrap(model), "config", None)) if cache is None else None
    logits, cache = prefill(model, input_ids, chunk, cache)
    chosen = [logits.argmax(-1, keepdim=True)]
    while len(chosen) < new_tokens:
        if input_ids.shape[1] + len(chosen) - 1 == short:
            logits, cache = prefill(model, torch.cat([input_ids, *chosen], 1))
        else:
            logits, cache = prefill(model, chosen[-1], cache=cache)
        chosen.append(logits.argmax(-1, keepdim=True))
    return torch.cat(chosen, 1)


def takes(model: Any, name: str) -> bool:
    """Return whether the model's forward has an argument of this name."""
    return name in inspect.signature(unwrap(model).forward).parameters
