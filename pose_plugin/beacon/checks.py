"""Checks of a model and of a call: everything that beacons would otherwise get wrong silently.

What torch or transformers would raise anyway (a wrong type, shape or device) is left to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.rope import changing_limit
from pose_plugin.utils.errors import PoSEError

MASKED_ATTENTION = ("eager", "sdpa")
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")

# The model.


def resolve_window(config: BeaconConfig, model_config: Any, rotary: Any) -> int:
    """Return L: the configured window, checked against the model's limits, or the smallest of these limits.

    Raises:
        PoSEError: the window exceeds a limit, or the interval leaves no room for memory.
    """
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    limits = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    kinds = getattr(text, "layer_types", None)
    # Some configs carry a sliding_window that no layer uses.
    if kinds is None or any("sliding" in kind or "chunked" in kind for kind in kinds):
        limits["sliding_window"] = getattr(text, "sliding_window", None)
        limits["attention_chunk_size"] = getattr(text, "attention_chunk_size", None)
    kind = getattr(rotary, "rope_type", "default")
    limits[f"the length up to which rope {kind!r} keeps its frequencies"] = changing_limit(rotary)
    known = {key: int(value) for key, value in limits.items() if value}
    if config.window is None:
        if not known:
            raise PoSEError("window: None, and the model's config names no length; give window")
        window = min(known.values())
    else:
        window = config.window
        for key, limit in known.items():
            if window > limit:
                raise PoSEError(
                    f"window: {window} is more than {key}, {limit}; give window: {limit} or less"
                    + (", or extend the model's context first" if key == "max_position_embeddings" else "")
                )
    if config.interval + config.overlap + config.sinks + 1 > window:
        kept = [f"{key} {getattr(config, key)}" for key in ("overlap", "sinks") if getattr(config, key)]
        others = f" with {' and '.join(kept)}" if kept else ""
        raise PoSEError(
            f"interval: {config.interval}{others} leaves no room for memory in window {window}; give an interval of "
            f"at most {max(1, window // 2)}"
        )
    return window


def check_layers(model_config: Any) -> None:
    """Require that all layers attend to keys and values that can be condensed.

    Raises:
        PoSEError: some layers keep another state (linear attention, convolutions), or all make their keys from a
            latent (DeepSeek's multi-head latent attention).
    """
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    if getattr(text, "kv_lora_rank", None):
        raise PoSEError(
            f"model: {text.model_type} has multi-head latent attention (kv_lora_rank={text.kv_lora_rank}), so it has "
            "no k_proj and v_proj to copy. Use a decoder such as Llama, Mistral, Qwen2 or Qwen3"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION_LAYERS))
    if others:
        raise PoSEError(
            f"model: {text.model_type} has layers of kind {', '.join(others)}, which keep no keys and values; Beacon "
            "needs attention in every layer"
        )


def check_attention(implementation: str | None, config: BeaconConfig) -> None:
    """Require an attention that applies the mask of layout v1: eager or sdpa. Others ignore it silently.

    Raises:
        PoSEError: another implementation.
    """
    if not config.interleaved and implementation not in MASKED_ATTENTION:
        raise PoSEError(
            f"attn_implementation: {implementation!r} cannot use the mask of layout v1 ({config.mask}). Load the model "
            "with attn_implementation='sdpa' or 'eager', or train with layout: v2, whose mask is plain causal"
        )


def check_checkpointing(layers: list[nn.Module]) -> None:
    """Refuse reentrant checkpointing: it sets every beacon gradient to zero, with an unchanged loss and no error.

    Raises:
        PoSEError: they are checkpointed with use_reentrant=True, or without a value, which means True.
    """
    for layer in layers:
        if not getattr(layer, "gradient_checkpointing", False):
            continue
        function: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if not hasattr(function, "keywords"):
            return  # a framework's own function; check_beacon_gradients finds a lost gradient there
        if function.keywords.get("use_reentrant", True):
            raise PoSEError(
                "gradient_checkpointing: use_reentrant=True gives every beacon parameter a zero gradient. Set "
                "gradient_checkpointing_kwargs: {use_reentrant: false}. TRL sets it to true for PEFT with DeepSpeed "
                "ZeRO-3 and checkpointing: use ZeRO-2 there, or no checkpointing"
            )
        return


def check_unpacked(base: Any, what: str) -> None:
    """Refuse 4-bit weights that bitsandbytes has packed, as it does on some CPUs at the first forward in eval mode.

    Packed weights neither dequantise nor train, and raise no error.

    Args:
        what: would be done with the base's projection, for the message.

    Raises:
        PoSEError: it is packed.
    """
    if getattr(getattr(base.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise PoSEError(
            f"load_in_4bit: bitsandbytes has packed this base for inference on this CPU, so {what} would silently go "
            "wrong. Load the base again and make the adapter, or train, before the first forward in eval mode. On a "
            "GPU nothing is packed"
        )


# The call.


def check_input(ids: torch.Tensor | None, embedded: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    """Return the one of the two inputs that is given.

    Args:
        vocabulary: number of tokens; an id of this value is a beacon inside the model.

    Raises:
        PoSEError: both or none are given, the input is empty, or an id is not in the vocabulary.
    """
    if (ids is None) == (embedded is None):
        raise PoSEError("input_ids: give either input_ids or inputs_embeds")
    given: Any = embedded if ids is None else ids
    if not given.numel():
        raise PoSEError(f"input: shape {tuple(given.shape)} has no tokens; give at least one")
    if ids is not None:
        # An id beyond the embedding would be read as a beacon; on a GPU it would end the process.
        low, high = torch.stack(torch.aminmax(ids)).tolist()
        if low < 0 or high >= vocabulary:
            raise PoSEError(
                f"input_ids: {low if low < 0 else high} is not in the model's vocabulary, 0…{vocabulary - 1}. Use the "
                "model's own tokenizer; if it was extended, call model.resize_token_embeddings(len(tokenizer))"
            )
    return given


def one_policy(ratio: Any, ratios: Any) -> Any:
    """Return the ratio of a call: a policy, a list with one per interval, or None for the configured one.

    Raises:
        PoSEError: both are given, so one would be ignored.
    """
    if ratio is not None and ratios is not None:
        raise PoSEError("ratio: give either ratio or ratios (one per interval that is condensed)")
    return ratio if ratios is None else list(ratios)


def renamed() -> PoSEError:
    """Return the error for `cache=`, which says the opposite in transformers 5.24: there it is continued in place."""
    return PoSEError(
        "cache: give a condensed text as context=…, which is not changed. To continue a stream in place, as in a chat, "
        "give it as past_key_values=…"
    )


def two_caches() -> PoSEError:
    """Return the error for a context and a cache at the same time."""
    return PoSEError("context: give either context (not changed) or past_key_values (continued in place)")


def check_labels(labels: torch.Tensor | None, shape: torch.Size) -> None:
    """Require one label per token: the loss of a fused head would silently leave tokens out.

    Raises:
        PoSEError: another shape.
    """
    if labels is not None and labels.shape != shape:
        raise PoSEError(f"labels: shape {tuple(labels.shape)} is not the input's {tuple(shape)}; use −100 for no loss")


def check_mask(attention_mask: torch.Tensor | None, tokens: int, carries: bool) -> bool:
    """Return whether the input is padded on the right.

    Args:
        attention_mask: None, or (batch, tokens) or (batch, seen + tokens), 1 for a token and 0 for padding.
        carries: whether a cache continues after this call; later tokens would read the padding as text.

    Raises:
        PoSEError: a mask of other dimensions, padding on the left, or padding if a cache continues.
    """
    if attention_mask is None:
        return False
    if attention_mask.dim() != 2:
        packed = "Packed documents would be condensed into each other: set packing / sample_packing to false"
        raise PoSEError(
            f"attention_mask: Beacon makes its own mask and takes (batch, tokens), not {tuple(attention_mask.shape)}. "
            + (packed if attention_mask.dim() > 2 else "Give one row per text, e.g. attention_mask[None]")
        )
    mask = attention_mask.bool()
    if bool(mask.all()):
        return False
    where = "before or between the tokens"
    if mask.shape[1] == tokens and bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool(mask[:, 0].all()):
        if not carries:
            return True
        where = "on the right, which the returned cache would hold as text"
    raise PoSEError(
        f"attention_mask: padding {where}; beacons would condense it. Read rows of equal length together, or one row "
        "at a time. For training, pad on the right: tokenizer.padding_side = 'right'"
    )


def check_positions(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, tokens: int, seen: int
) -> None:
    """Accept position ids that only number the tokens; Beacon sets its own positions inside the window.

    Args:
        position_ids: None, or (batch, tokens) or (tokens,).
        attention_mask: ids of padding are not compared.
        tokens: new tokens.
        seen: tokens in the cache.

    Raises:
        PoSEError: other ids: packed documents, PoSE's skipped positions, or a slice that does not continue the cache.
    """
    if position_ids is None:
        return
    wanted = torch.arange(seen, seen + tokens, device=position_ids.device)
    same = None
    if position_ids.dim() <= 2 and position_ids.shape[-1] >= tokens:
        same = position_ids[..., -tokens:] == wanted
        if attention_mask is not None and same.dim() == 2:
            same = same | ~attention_mask[:, -tokens:].bool().to(same.device)
    if same is None or not bool(same.all()):
        raise PoSEError(
            f"position_ids: they are not {seen}…{seen + tokens - 1}. Beacon sets its own positions, so neither packed "
            "rows (set packing / sample_packing to false) nor PoSE's skipped positions work with it; leave them out"
        )


def check_extra(kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the arguments that every pass gives to the model: settings, but no tensor with one entry per token.

    Raises:
        PoSEError: a tensor that would have to be cut into intervals, or an output that intervals cannot give.
    """
    # Trainers may pass False.
    if kwargs.get("output_attentions"):
        raise PoSEError("output_attentions: attentions of different intervals have different sizes; leave it out")
    passed = {}
    for key, value in kwargs.items():
        if value is None or key in ("cache_position", "output_attentions"):
            continue
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] >= tokens:
            raise PoSEError(
                f"{key}: Beacon cannot cut this input of shape {tuple(value.shape)} into intervals; leave it out "
                "(packing and multimodal inputs are not supported)"
            )
        passed[key] = value
    return passed


def check_origin(
    cache: BeaconCache, signature: dict[str, Any], row: torch.Tensor, rope: torch.Tensor, mark: tuple[Any, ...]
) -> None:
    """Require that this model and adapter made the cache; record them in an empty cache.

    Args:
        signature: see `Reading.signature`.
        row: the active adapter's beacon embedding, (hidden,).
        rope: the base's frequencies in radians per position, (rotary size / 2,).
        mark: the tuner's router, adapter and version of its weights. Compared once for each, since comparing waits for
            the device. Not the tuner's number, which Python gives to a later one as well.

    Raises:
        PoSEError: another model, RoPE or adapter made it, so its memory means nothing here.
    """
    if not cache.tokens:
        cache.signature, cache.adapter, cache.rope, cache.mark = signature, row, rope, mark
        return
    if cache.signature != signature:
        keys = [key for key in signature if cache.signature.get(key) != signature[key]]
        made = ", ".join(f"{key}={cache.signature.get(key)}" for key in keys)
        reads = ", ".join(f"{key}={signature[key]}" for key in keys)
        raise PoSEError(f"cache: made with {made}, but this model reads with {reads}; condense the text again")
    if cache.mark == mark or cache.adapter is None:
        return
    own = rope if cache.rope is None else cache.rope.to(rope.device)  # older files hold no frequencies
    if own.shape != rope.shape or not torch.allclose(own, rope, rtol=1e-3, atol=0):
        raise PoSEError(
            f"cache: made with another RoPE, whose lowest frequency is {float(own.min()):.4g} instead of "
            f"{float(rope.min()):.4g}. Load the base with the config that the text was condensed with, or condense it "
            "again"
        )
    # Tolerant enough for the same adapter in another dtype, or after a few more training steps.
    error = float((cache.adapter.to(row.device) - row).norm() / row.norm().clamp(min=1e-12))
    if error > 0.02:
        raise PoSEError(
            f"cache: another adapter condensed it (its beacon embedding differs from that of {mark[1]!r} by "
            f"{error:.0%}); activate that one with set_adapter, or condense the text again"
        )
    cache.mark = mark
