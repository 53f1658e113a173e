"""Read a model's rotary embedding from its config, in one form for all models.

The config may be a transformers config or the dict of a config.json, flat or nested by layer type, with a text model
inside a multimodal one or not. It is not modified.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.rope.kinds import normalise
from pose_plugin.utils.errors import PoSEError

# The config key that holds the rope before any stretching; no reader knows it, all keep it.
RECORD_KEY = "pose_plugin"
FULL = "full_attention"
_WITH_ORIGINAL = ("yarn", "longrope", "llama3")

# A text position of these is three numbers (time, height, width), which cannot be stretched as one axis.
_MROPE = (
    "cohere_compass",
    "cosmos3_edge",
    "ernie4_5_vl",
    "glm4v",
    "glm_image",
    "glm_ocr",
    "hunyuan_vl",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_omni",
    "qwen3_vl",
    "qwen4_exp",
)
# Rotary, but their modelling code computes one table with base 10000 and reads no rope parameters.
_FIXED = ("gptj", "codegen")


@dataclass(frozen=True)
class RopeSource:
    """The rope of one model: what it is now, and what it was before any stretching."""

    model_type: str
    parameters: dict[str, Any]  # complete; flat, or one dict per layer type
    layer_type: str | None  # the key of `parameters` that may change; None if it is flat
    rotary_dim: int  # d, the rotated dimensions of a head
    unset_head_dim: int | None  # the head dimension if the config has the key but leaves it null
    max_position_embeddings: int
    original_length: int
    original_theta: float
    record: dict[str, Any]  # of an earlier extension, {} if there was none
    sliding_window: int | None
    sliding_layers: tuple[int, int]  # layers with that window, all layers
    top_original: bool  # the config also has original_max_position_embeddings outside the rope dict
    latent_attention: bool  # DeepSeek's MLA: part of a head is not rotated
    fixed: bool  # the modelling code ignores rope parameters
    notes: tuple[str, ...]

    @property
    def current(self) -> dict[str, Any]:
        """Return a copy of the flat dict that a plan replaces."""
        return dict(self.parameters[self.layer_type]) if self.layer_type else dict(self.parameters)


def lookup(config: Any, name: str, default: Any = None) -> Any:
    """Return a value of a config object or of a config dict."""
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def text_config(config: Any) -> Any:
    """Return the part of a config that describes the decoder: itself, or a multimodal config's text_config."""
    if isinstance(config, Mapping):
        inner = config.get("text_config")
        return inner if isinstance(inner, Mapping) else config
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError as error:
        raise PoSEError(
            f"model type {lookup(config, 'model_type')!r} has several text models ({error}); pass the decoder's config"
        ) from None


def as_config(config: Any) -> Any:
    """Return a config object for the dict of a config.json, so that the model's defaults apply.

    A dict whose model_type transformers does not know stays a dict and has to be complete.
    """
    if not isinstance(config, Mapping):
        return config
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return copy.deepcopy(dict(config))
    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config)))


def read_rope(config: Any, original_length: int | None = None) -> RopeSource:
    """Read the rope of a model.

    Args:
        config: a transformers config or the dict of a config.json.
        original_length: overrides what the config says about L_0, tokens.

    Raises:
        PoSEError: the model has no rotary positions, or one factor cannot stretch them.
    """
    whole = as_config(config)
    text = text_config(whole)
    model_type = str(lookup(text, "model_type") or lookup(whole, "model_type") or "unknown")
    fixed = model_type in _FIXED
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if not fixed:
        parameters = _parameters(text, model_type)
    _refuse_unrotated(whole, text, model_type, parameters)
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    if nested and not isinstance(parameters.get(FULL), Mapping):
        raise PoSEError(
            f"model type {model_type!r} keeps its rope under {sorted(parameters)} instead of {FULL!r}, which does not "
            "say which layers see far. Set rope_parameters by hand and use rope: none"
        )
    layer_type = FULL if nested else None
    current: dict[str, Any] = parameters[FULL] if nested else parameters
    maximum = lookup(text, "max_position_embeddings")
    if not isinstance(maximum, (int, float)) or maximum != int(maximum) or maximum < 1:
        raise PoSEError(f"model type {model_type!r}: max_position_embeddings={maximum!r} must be a whole number")
    record = dict(lookup(text, RECORD_KEY) or {})
    length, notes = _original_length(current, int(maximum), record, original_length)
    return RopeSource(
        model_type=model_type,
        parameters=parameters,
        layer_type=layer_type,
        rotary_dim=_rotary_dim(text, current, nested, fixed),
        unset_head_dim=_unset_head_dim(text),
        max_position_embeddings=int(maximum),
        original_length=length,
        original_theta=float(record.get("original_theta") or current["rope_theta"]),
        record=record,
        sliding_window=lookup(text, "sliding_window") or None,
        sliding_layers=_sliding_layers(text),
        top_original=lookup(text, "original_max_position_embeddings") is not None,
        latent_attention=bool(lookup(text, "qk_rope_head_dim") and lookup(text, "qk_nope_head_dim")),
        fixed=fixed,
        notes=notes,
    )


def _parameters(text: Any, model_type: str) -> dict[str, Any]:
    """Return a complete, normalised copy of the rope dict; {} if the config has none."""
    found = lookup(text, "rope_parameters") or lookup(text, "rope_scaling")
    theta = lookup(text, "rope_theta") or lookup(text, "rotary_emb_base")
    if not found and not theta:
        return {}
    shared = {"rope_theta": theta, "partial_rotary_factor": lookup(text, "partial_rotary_factor")}
    shared = {key: float(value) for key, value in shared.items() if value is not None}
    found = found or {}
    if any(isinstance(value, Mapping) for value in found.values()):
        layers = {key: value for key, value in found.items() if value is None or isinstance(value, Mapping)}
        return {k: None if v is None else _complete(v, shared, model_type) for k, v in layers.items()}
    return _complete(found, shared, model_type)


def _complete(parameters: Mapping[str, Any], shared: Mapping[str, float], model_type: str) -> dict[str, Any]:
    given = {key: value for key, value in normalise(parameters).items() if value is not None}
    result = {**shared, **given}
    if "rope_theta" not in result:
        raise PoSEError(
            f"model type {model_type!r}: neither its rope dict {dict(parameters)} nor its config has a rope_theta; add "
            "the base that the model was trained with"
        )
    return result


def _refuse_unrotated(whole: Any, text: Any, model_type: str, parameters: dict[str, Any]) -> None:
    names = {model_type, str(lookup(whole, "model_type"))}
    axes = [key for key in parameters if str(key).startswith("mrope")]
    if axes or parameters.get("rope_type") == "mrope" or any(name.startswith(_MROPE) for name in names):
        raise PoSEError(
            f"model type {model_type!r} gives each token three positions (mrope: time, height, width), and PoSE "
            "stretches one. Use the text-only model of the family"
        )
    if lookup(text, "alibi") or not parameters:
        raise PoSEError(
            f"model type {model_type!r} has no RoPE (its config has no rope_parameters, or alibi set), so there are no "
            "frequencies to stretch. Choose a RoPE model such as Llama, Qwen, Mistral or Gemma"
        )


def _rotary_dim(text: Any, current: Mapping[str, Any], nested: bool, fixed: bool) -> int:
    if nested and lookup(text, "is_heterogeneous"):
        text = text.per_layer_config[FULL]  # Gemma 4: its full layers have wider heads
    if fixed and lookup(text, "rotary_dim"):
        return int(text.rotary_dim)
    head = lookup(text, "qk_rope_head_dim") or lookup(text, "head_dim") or _default_head_dim(text)
    if current["rope_type"] == "proportional" or lookup(text, "qk_rope_head_dim"):
        return int(head)
    return int(head * float(current.get("partial_rotary_factor") or 1.0))


def _default_head_dim(text: Any) -> int:
    hidden, heads = lookup(text, "hidden_size"), lookup(text, "num_attention_heads")
    if not hidden or not heads:
        raise PoSEError(
            "the config has neither head_dim nor hidden_size and num_attention_heads, so the rotary dimension is "
            "unknown; add head_dim"
        )
    return int(hidden // heads)


def _unset_head_dim(text: Any) -> int | None:
    """Return the head dimension if the config leaves it null (Mixtral), which transformers' yarn cannot multiply."""
    if isinstance(text, Mapping) or lookup(text, "is_heterogeneous"):
        return None
    if lookup(text, "head_dim", 0) is not None:
        return None
    return _default_head_dim(text)


def _original_length(
    current: Mapping[str, Any], maximum: int, record: Mapping[str, Any], asked: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return L_0 from the most certain source, and notes about it."""
    if asked is not None:
        return asked, ()
    if record.get("original_length"):
        return int(record["original_length"]), ()
    kind = current["rope_type"]
    if kind in _WITH_ORIGINAL and current.get("original_max_position_embeddings"):
        return int(current["original_max_position_embeddings"]), ()
    factor = float(current.get("factor") or 1.0)
    if kind == "linear" and factor > 1:
        length = round(maximum / factor)
        return length, (
            f"the model has linear scaling by {factor:g} and max_position_embeddings={maximum}, so its original window "
            f"should be {maximum} / {factor:g} = {length}. Some checkpoints keep the unscaled maximum; if this is one, "
            f"set rope.original_length: {maximum}",
        )
    return maximum, ()


def _sliding_layers(text: Any) -> tuple[int, int]:
    count = int(lookup(text, "num_hidden_layers") or 0)
    types = lookup(text, "layer_types")
    if types:
        return sum("sliding" in str(kind) or "chunked" in str(kind) for kind in types), len(types)
    if not lookup(text, "sliding_window") or lookup(text, "use_sliding_window") is False:
        return 0, count
    return count, count
