"""What a call to a Beacon model refuses, and why. All of it before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import Cache

from pose_plugin.beacon.cache import BeaconCache, check_cache
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.rope import changing_limit
from pose_plugin.utils.errors import PoSEError

MASKED_ATTENTION = ("eager", "sdpa")


def check_input(ids: Any, embedded: Any, embedding: Any, model: nn.Module) -> torch.Tensor:
    """The one of them that is given.

    Args:
        ids: (batch, tokens), or None.
        embedded: (batch, tokens, hidden), or None.
        embedding: the BeaconEmbedding.
        model: the base.

    Raises:
        PoSEError: both or none, or what the model cannot read.
    """
    if (ids is None) == (embedded is None):
        raise PoSEError("input_ids: give either input_ids or inputs_embeds")
    if ids is None:
        _check_embedded(embedded, embedding.row().shape[-1])
    else:
        check_ids(ids)
    given: torch.Tensor = embedded if ids is None else ids
    weight = embedding.base_layer.weight
    # accelerate's hooks bring the input to the device; DeepSpeed keeps parts of weights elsewhere.
    moved = hasattr(model, "_hf_hook") or hasattr(weight, "ds_id") or weight.device.type == "meta"
    if given.device != weight.device and not moved:
        raise PoSEError(f"input: on {given.device}, the model on {weight.device}; give it .to(model.device)")
    if ids is not None:
        _check_vocabulary(ids, embedding.sentinel)
    return given


def check_ids(ids: Any) -> None:
    """
    Raises:
        PoSEError: no tensor, no whole numbers, or no batch of texts.
    """
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor):
        if isinstance(ids, str):
            hint = 'tokenize the text: tokenizer(text, return_tensors="pt").input_ids'
        elif hasattr(ids, "keys"):
            hint = "give its token ids, encoding['input_ids'], or **encoding"
        else:
            hint = "give torch.tensor(ids), of one text torch.tensor(ids)[None]"
        raise PoSEError(f"input_ids: {type(ids).__name__} is no tensor of shape (batch, tokens); {hint}")
    if ids.dtype not in (torch.long, torch.int):
        raise PoSEError(f"input_ids: {ids.dtype} holds no token ids; give ids.long(), or inputs_embeds for embeddings")
    if ids.dim() != 2:
        raise PoSEError(f"input_ids: shape {tuple(ids.shape)} must be (batch, tokens); of one text, give ids[None]")
    if not ids.numel():
        raise PoSEError(f"input_ids: shape {tuple(ids.shape)} holds no token; give at least one")


def _check_vocabulary(ids: torch.Tensor, size: int) -> None:
    # An id beyond the embedding would be taken for a beacon, or end the process on a GPU.
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    if low < 0 or high >= size:
        row, place = ((ids < 0) | (ids >= size)).nonzero()[0].tolist()
        raise PoSEError(
            f"input_ids: {int(ids[row, place])} (row {row}, token {place}) is not in the model's vocabulary of {size}, "
            f"0…{size - 1}. Use the model's own tokenizer; if that was extended, "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def _check_embedded(embedded: Any, hidden: int) -> None:
    shape = tuple(embedded.shape) if isinstance(embedded, torch.Tensor) else type(embedded).__name__
    if not isinstance(shape, tuple) or len(shape) != 3 or shape[2] != hidden or not embedded.is_floating_point():
        raise PoSEError(f"inputs_embeds: {shape} must be floats of shape (batch, tokens, {hidden})")
    if not embedded.numel():
        raise PoSEError(f"inputs_embeds: shape {shape} holds no token; give at least one")


def policy(ratio: Any, ratios: Any) -> Any:
    """The ratio of a call: a policy, a list with one for each interval, or None for the configured one.

    Raises:
        PoSEError: both are given, or `ratios` is no list.
    """
    if ratios is None:
        return ratio
    if ratio is not None:
        raise PoSEError("ratio: give either ratio or ratios (one for each interval that is condensed)")
    if isinstance(ratios, str) or not isinstance(ratios, Iterable):
        raise PoSEError(f"ratios: {ratios!r} must be a list, one ratio for each interval; for all alike give ratio")
    return list(ratios)


def check_headroom(headroom: Any) -> None:
    """
    Raises:
        PoSEError: no number of tokens.
    """
    if headroom is not None and (isinstance(headroom, bool) or not isinstance(headroom, int) or headroom < 0):
        raise PoSEError(f"headroom: {headroom!r} must be a whole number of tokens ≥ 0")


def check_labels(key: str, labels: Any, shape: tuple[int, ...]) -> None:
    """
    Raises:
        PoSEError: not one label for each token.
    """
    if labels is not None and not (isinstance(labels, torch.Tensor) and labels.shape == shape):
        found = tuple(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise PoSEError(
            f"{key}: {found} must be a tensor of the input's shape {tuple(shape)}, −100 where no loss is wanted"
        )


def stream_of(cache: Any) -> BeaconCache:
    """The stream that a call goes on with: the given one, or a new one where nothing or an empty cache is given.

    Raises:
        PoSEError: another kind of cache that holds something, or no cache.
    """
    # `is None`, not truth: an empty DynamicCache counts as true, and one with a prompt in it must not be dropped.
    if cache is None:
        return BeaconCache()
    if not isinstance(cache, Cache):
        check_cache(cache, "past_key_values")
    if isinstance(cache, BeaconCache):
        return cache
    if cache.get_seq_length():
        raise PoSEError(
            f"past_key_values: a {type(cache).__name__} with {cache.get_seq_length()} tokens cannot be continued; "
            "pass a BeaconCache (model.condense(ids), or BeaconCache())"
        )
    return BeaconCache()


def check_mask(attention_mask: Any, tokens: int, seen: int, carries: bool) -> bool:
    """Whether the input is padded on the right.

    Args:
        attention_mask: None, or (batch, tokens) or (batch, seen + tokens), 1 for a token and 0 for padding.
        tokens: new tokens.
        seen: tokens in the cache.
        carries: whether a cache continues after this call; padding would then be read as text.

    Raises:
        PoSEError: a mask of more dimensions, padding on the left, or padding where a cache goes on.
    """
    if attention_mask is None:
        return False
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise PoSEError(
            f"attention_mask: Beacon makes its own mask and takes (batch, tokens) with ones for tokens, not {shape}. "
            "Packed documents cannot be condensed in one row: set packing / sample_packing to false."
        )
    if attention_mask.shape[1] not in (tokens, seen + tokens):
        raise PoSEError(
            f"attention_mask: width {attention_mask.shape[1]} fits neither the {tokens} new tokens nor these and the "
            f"{seen} seen before"
        )
    mask = attention_mask.bool()
    if bool(mask.all()):
        return False
    if mask.shape[1] == tokens and bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool(mask[:, 0].all()):
        if not carries:
            return True
        where = "on the right, and the cache that goes on from here would hold it as text"
    else:
        where = "before or between the tokens"
    raise PoSEError(
        f"attention_mask: padding {where}; beacons would condense it. Read rows of equal length together (batch by "
        "length), or one row at a time. Training pads on the right: tokenizer.padding_side = 'right'."
    )


def check_positions(position_ids: Any, attention_mask: Any, tokens: int, seen: int) -> None:
    """Beacon counts positions inside the window itself; ids that merely count the tokens are let pass.

    Raises:
        PoSEError: others: packed documents, PoSE's skips, or a slice that does not continue the cache.
    """
    if position_ids is None:
        return
    wanted = torch.arange(seen, seen + tokens, device=position_ids.device)
    given = position_ids[..., -tokens:] if position_ids.dim() <= 2 else position_ids
    same = given.shape[-1] == tokens and position_ids.dim() <= 2 and (given == wanted)
    if isinstance(same, torch.Tensor):
        if attention_mask is not None and attention_mask.dim() == 2 and same.dim() == 2:
            same = same | ~attention_mask[:, -tokens:].bool().to(same.device)
        same = bool(same.all())
    if not same:
        raise PoSEError(
            f"position_ids: they do not count {seen}…{seen + tokens - 1}. Beacon sets positions inside its window, so "
            "neither packed rows (set packing / sample_packing to false) nor PoSE's skipped positions go with it; "
            "leave position_ids out"
        )


def check_extra(kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Arguments that go on to the model: settings do, tensors along the tokens do not.

    Raises:
        PoSEError: a tensor or mask that would have to be cut into intervals.
    """
    passed = {}
    for key, value in kwargs.items():
        if value is None or key == "cache_position":
            continue
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] >= tokens:
            raise PoSEError(
                f"{key}: Beacon cannot cut this input of shape {tuple(value.shape)} into intervals; leave it out "
                "(packing and multimodal inputs are not supported)"
            )
        passed[key] = value
    return passed


def check_origin(cache: BeaconCache, signature: dict[str, Any], row: torch.Tensor, mark: tuple[Any, ...]) -> None:
    """A stream goes on with what it began with; a fresh one is told what that is.

    Args:
        cache: the stream.
        signature: see `Reading.signature`.
        row: the active adapter's beacon embedding, (hidden,).
        mark: tuner, adapter and version of its weights; compared once for each, since comparing waits for the device.

    Raises:
        PoSEError: another model or another adapter made it.
    """
    if not cache.tokens:
        cache.signature, cache.adapter, cache.mark = signature, row, mark
        return
    if cache.signature != signature:
        keys = [key for key in signature if cache.signature.get(key) != signature[key]]
        made = ", ".join(f"{key}={cache.signature.get(key)}" for key in keys)
        reads = ", ".join(f"{key}={signature[key]}" for key in keys)
        raise PoSEError(f"cache: made with {made}, but this model reads with {reads}; condense the text again")
    if cache.mark == mark or cache.adapter is None:
        return
    # Loose enough for an adapter that was loaded in another dtype, or trained a few steps further.
    error = float((cache.adapter.to(row.device) - row).norm() / row.norm().clamp(min=1e-12))
    if error > 0.02:
        raise PoSEError(
            f"cache: another adapter condensed it (its beacon embedding is {error:.0%} off that of {mark[1]!r}), so "
            "its memory means nothing here; set_adapter to that one, or condense the text again"
        )
    cache.mark = mark


def resolve_window(config: BeaconConfig, model_config: Any, rotary: Any) -> int:
    """L: the configured window, checked against the model's limits, or the least of these.

    Args:
        config: the adapter's.
        model_config: the base's.
        rotary: the base's rotary embedding.

    Raises:
        PoSEError: the window passes a limit, or the interval leaves no room for memory.
    """
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    limits = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    kinds = getattr(text, "layer_types", None)
    if kinds is None or any("sliding" in kind or "chunked" in kind for kind in kinds):
        limits["sliding_window"] = getattr(text, "sliding_window", None)
        limits["attention_chunk_size"] = getattr(text, "attention_chunk_size", None)
    kind = getattr(rotary, "rope_type", "default")
    limits[f"the length up to which rope {kind!r} keeps its frequencies"] = changing_limit(rotary)
    known = {key: int(value) for key, value in limits.items() if value}
    if config.window is None:
        if not known:
            raise PoSEError("window: the model's config names no length; give window")
        window = min(known.values())
    else:
        window = config.window
        for key, limit in known.items():
            if window > limit:
                raise PoSEError(
                    f"window: {window} is more than {key}, {limit}; give window: {limit} or less"
                    + (", or extend the model's context first" if key == "max_position_embeddings" else "")
                )
    if config.interval + 1 > window:
        raise PoSEError(
            f"interval: {config.interval} leaves no room for memory in window {window}; give an interval of at most "
            f"{max(1, window // 2)}"
        )
    return window


def check_layers(model_config: Any) -> None:
    """All layers must attend to keys and values that can be condensed.

    Raises:
        PoSEError: some layers keep another state (linear attention, convolutions), or all make their keys from a
            latent (DeepSeek's multi-head latent attention).
    """
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    if getattr(text, "kv_lora_rank", None):
        raise PoSEError(
            f"model: {text.model_type} has multi-head latent attention (kv_lora_rank={text.kv_lora_rank}): its keys "
            "and values are made from a compressed row, and it has no k_proj and v_proj to copy, whatever "
            "target_modules says. Beacon needs a decoder such as Llama, Mistral, Qwen2, Qwen3"
        )
    known = ("full_attention", "sliding_attention", "chunked_attention")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(known))
    if others:
        raise PoSEError(
            f"model: {text.model_type} has layers of kind {', '.join(others)}, whose state is no list of keys and "
            "values; Beacon needs attention in every layer"
        )


def check_attention(implementation: str | None, config: BeaconConfig) -> None:
    """Layout v1 needs its own mask, which only eager and sdpa take as it is.

    Raises:
        PoSEError: another implementation.
    """
    if not config.interleaved and implementation not in MASKED_ATTENTION:
        raise PoSEError(
            f"attn_implementation: {implementation!r} cannot use the mask of layout v1 ({config.mask}); load the model "
            "with attn_implementation='sdpa' (or 'eager'), or train with layout: v2, whose mask is plain causal"
        )


def check_checkpointing(layers: list[nn.Module]) -> None:
    """Reentrant checkpointing gives beacons a gradient of exactly zero, with an unchanged loss and no error.

    Args:
        layers: the decoder layers.

    Raises:
        PoSEError: they are checkpointed with use_reentrant=True, or without saying which.
    """
    for layer in layers:
        if not getattr(layer, "gradient_checkpointing", False):
            continue
        function: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if not hasattr(function, "keywords"):
            return  # a framework's own function; check_beacon_gradients is what finds a loss of gradient there
        if function.keywords.get("use_reentrant", True):
            raise PoSEError(
                "gradient_checkpointing: use_reentrant=True gives every beacon parameter a zero gradient. Set "
                "gradient_checkpointing_kwargs: {use_reentrant: false}. TRL sets it to true by itself for PEFT with "
                "DeepSpeed ZeRO-3 and checkpointing: use ZeRO-2 there, or no checkpointing."
            )
        return


def check_unpacked(base: Any, what: str) -> None:
    """bitsandbytes packs 4-bit weights on some CPUs when they first infer: then they neither dequantise nor train.

    Args:
        base: a projection of the base.
        what: would be done with it.

    Raises:
        PoSEError: it is packed.
    """
    if getattr(getattr(base.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise PoSEError(
            f"load_in_4bit: bitsandbytes has packed this base for inference on this CPU, so {what} would go wrong "
            "silently. Load the base again and make the adapter, or train, before the first forward in eval mode; on a "
            "GPU nothing is packed."
        )
