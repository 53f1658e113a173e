"""Which models a Beacon adapter refuses, and why: their layers, attention, checkpointing, other adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.rope import changing_limit
from pose_plugin.utils.errors import PoSEError

MASKED_ATTENTION = ("eager", "sdpa")


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
