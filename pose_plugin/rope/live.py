"""Read what a model's own class makes of its config: the frequencies and the attention factor that it really uses.

A published config is evidence of how the model was trained, and the class alone decides what each key means. So the
class is built on torch's meta device, which takes milliseconds and no memory at any size, and its rotary modules are
then built once more with real numbers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.rope.kinds import Frequencies
from pose_plugin.rope.read import lookup, text_config


@dataclass(frozen=True)
class RotaryBuffer:
    """One buffer of inverse frequencies in a built model.

    Attributes:
        name: its full name, e.g. "model.rotary_emb.inv_freq".
        layer_type: of the layers that use it; None if all layers do.
        tensor: the frequencies, shape [d / 2], or GPT-J's table of sin and cos.
        original: the frequencies for short batches, if the class keeps a copy.
        attention_factor: the scale of cos and sin, if the class has one.
    """

    name: str
    layer_type: str | None
    tensor: Any
    original: Any | None
    attention_factor: float | None


@dataclass(frozen=True)
class LiveRope:
    """What one layer type of a model uses.

    Attributes:
        frequencies: radians per token, shape [d / 2].
        attention: the scale of cos and sin.
    """

    frequencies: Frequencies
    attention: float


def skeleton(config: Any) -> Any:
    """Build the model of a config on the meta device, where tensors have a shape and no memory.

    Args:
        config: a transformers config. Of a multimodal one only the text model is built, if it can be built alone.

    Raises:
        ValueError: transformers has no class for it.
    """
    import torch
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    text = text_config(config)
    # Some text configs cannot be built alone, e.g. qwen2_5_vl_text; the whole model can.
    for classes, part in ((MODEL_FOR_CAUSAL_LM_MAPPING, text), (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)):
        if type(part) in classes:
            build: Any = classes[type(part)]
            # Not by from_config, which divides the weights over all ranks while DeepSpeed ZeRO-3 is set up.
            with torch.device("meta"):
                return build(copy.deepcopy(part))
    raise ValueError(f"transformers has no causal language model for {type(text).__name__}")


def builds_text_alone(config: Any) -> bool:
    """Return whether AutoModelForCausalLM builds one class from a multimodal config and from its text part.

    Then a checkpoint with images loads into the text model (Qwen3.5). Other families (Gemma 3) build the whole model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = [str(lookup(each, "model_type")) for each in (config, text_config(config))]
    one, other = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) for name in names)
    return one is not None and one == other


def is_causal_model(text: Any) -> bool:
    """Return whether transformers, or a class that was registered with it, builds a causal model from a config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return lookup(text, "model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING


def rotary_buffers(model: Any, text: Any, tables: bool = False, nested: bool = False) -> Iterator[RotaryBuffer]:
    """Yield each buffer of inverse frequencies of a model's decoder.

    Args:
        model: a transformers model without wrappers.
        text: the decoder's config; modules of other parts (a vision tower) are left out.
        tables: also yield GPT-J's tables of sin and cos.
        nested: the rope dict has one entry per layer type.
    """
    composite = text_config(model.config) is not model.config
    for name, module in model.named_modules():
        own = getattr(module, "config", None)
        if composite and (own is None or lookup(own, "model_type") != lookup(text, "model_type")):
            continue  # a vision or audio tower has its own rope
        buffers = dict(module.named_buffers(recurse=False))
        if "inv_freq" not in buffers and hasattr(module, "inv_freq"):
            buffers["inv_freq"] = module.inv_freq
        for key, tensor in buffers.items():
            if key == "embed_positions" and tables:
                yield RotaryBuffer(f"{name}.{key}", None, tensor, None, None)
            if key.endswith("original_inv_freq") or not key.endswith("inv_freq"):
                continue
            prefix = key.removesuffix("inv_freq")
            layer_type = prefix.rstrip("_") or None
            if nested and layer_type is None:
                layer_type = getattr(module, "layer_type", None)
            original = buffers.get(f"{prefix}original_inv_freq")
            factor = getattr(module, f"{prefix}attention_scaling", None)
            yield RotaryBuffer(f"{name}.{key}", layer_type, tensor, original, factor)


def rebuilt(module: Any) -> Any | None:
    """Return a new module of the same class on the CPU, or None if it cannot be built from its config alone."""
    try:
        return type(module)(module.config)
    except Exception:  # a class with other arguments raises any type
        return None


def keys_read(config: Any) -> frozenset[str]:
    """Return the keys of the rope dict that the code of a config's class names.

    Ministral 3's attention reads `llama_4_scaling_beta`, DeepSeek's `mscale_all_dim`: without them a forward fails, or
    silently computes something else.

    Args:
        config: a transformers config; empty for a class that cannot be built here.
    """
    if isinstance(config, Mapping):
        return frozenset()
    model = _built(_Key(config))
    if model is None:
        return frozenset()
    code = inspect.getsource(sys.modules[type(model).__module__])
    return frozenset(re.findall(r'rope_(?:parameters|scaling)(?:\[\w+\])?(?:\[|\.get\()\s*"(\w+)"', code))


class _Key:
    """Makes a config hashable by its values."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.text = json.dumps(config.to_dict(), sort_keys=True, default=str)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (type(self.config), self.text) == (type(other.config), other.text)


# Planning reads a base several times, and building a class takes 30 to 100 ms.
@functools.lru_cache(maxsize=8)
def _built(key: _Key) -> Any | None:
    """Return the skeleton of a config with rotary modules on the CPU, or None if its class cannot be built."""
    try:
        model = skeleton(key.config)
    except Exception:  # each class raises its own type for values that it cannot use
        return None
    for name, module in [*model.named_modules()]:
        if any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False)):
            fresh = rebuilt(module)
            if fresh is not None:
                model.set_submodule(name, fresh)
    return model


def live_rope(config: Any) -> dict[str | None, LiveRope] | None:
    """Return what each layer type of the config's class uses: {None: …} if all layers share one rope.

    Args:
        config: a transformers config; not modified.

    Returns:
        {} for a class without a rotary module; None if the class cannot be built here (unknown to transformers, or
        torch is missing).
    """
    model = None if isinstance(config, Mapping) else _built(_Key(config))
    if model is None:
        return None
    text = text_config(model.config)
    parameters = lookup(text, "rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    found: dict[str | None, LiveRope] = {}
    for buffer in rotary_buffers(model, text, nested=nested):
        if buffer.layer_type not in found and not buffer.tensor.is_meta:
            values = buffer.tensor.detach().double().numpy().reshape(-1)
            found[buffer.layer_type] = LiveRope(values, float(buffer.attention_factor or 1.0))
    return found
