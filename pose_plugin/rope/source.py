"""Read a base's rotary embedding as its own class reads it, in one form for all models.

The config may be a transformers config or the dict of a config.json, flat or nested by layer type, with a text model
inside a multimodal one or not. It is not modified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pose_plugin.rope.kinds import CLOSED_FORMS, SHAPES, Frequencies, inverse_frequencies, normalise, plain_frequencies
from pose_plugin.rope.live import LiveRope, is_causal_model, keys_read, live_rope
from pose_plugin.rope.reach import LayerKind, reach
from pose_plugin.rope.read import FULL, RECORD_KEY, as_config, lookup, text_config
from pose_plugin.utils.errors import PoSEError, shown

_WITH_ORIGINAL = ("yarn", "longrope", "llama3")
# Rotary, but their modelling code computes one table with base 10000 and reads no rope parameters.
_FIXED = ("gptj", "codegen")
# Two float32 results of the same formula differ less than this.
_SAME = 1e-4


@dataclass(frozen=True)
class RopeSource:
    """The rope of one model: what it is now, and what it was before any stretching. Lengths in tokens."""

    model_type: str
    parameters: dict[str, Any]  # complete; flat, or one dict per layer type
    layer_type: str | None  # the key of `parameters` that may change; None if it is flat
    rotary_dim: int  # d, the rotated dimensions of a head
    unset_head_dim: int | None  # the head dimension if the config has the key but leaves it null
    max_position_embeddings: int
    window: int  # what the base's frequencies were made for; above the maximum in some transformers 4 configs
    original_length: int
    original_theta: float
    frequencies: Frequencies  # of the layers that may change, for long batches, shape [d / 2]
    attention: float  # the scale of cos and sin
    record: dict[str, Any]  # of an earlier extension, {} if there was none
    reach: tuple[LayerKind, ...]
    keys_read: frozenset[str]  # keys of the rope dict that the model's own code reads
    top_original: bool  # the config also has original_max_position_embeddings outside the rope dict
    latent_attention: bool  # DeepSeek's MLA: part of a head is not rotated
    fixed: bool  # the modelling code ignores rope parameters
    restated: bool  # the class's frequencies are not those of its rope_type; original_theta is read from them

    @property
    def current(self) -> dict[str, Any]:
        """Return a copy of the flat dict that a plan replaces."""
        return dict(self.parameters[self.layer_type]) if self.layer_type else dict(self.parameters)

    @property
    def carried(self) -> dict[str, Any]:
        """Return the keys of the rope dict that stay under any kind: those that do not describe a stretch."""
        kept = self.keys_read - {"rope_type", "rope_theta", "factor", "alpha"}
        return {key: value for key, value in self.current.items() if key not in SHAPES or key in kept}

    def stretch(self, frequencies: Frequencies) -> float:
        """Return by how much the slowest rotating pair is slower than with plain RoPE at the original base."""
        last = int(np.flatnonzero(frequencies)[-1])
        plain = plain_frequencies(self.original_theta, 2 * frequencies.size)
        return float(plain[last] / frequencies[last])

    @property
    def published(self) -> tuple[float, int]:
        """Return (stretch, window) of the base before any extension of ours."""
        if self.record:
            stretch, window = self.record.get("published") or (1.0, self.original_length)
            return float(stretch), int(window)
        return self.stretch(self.frequencies), self.window

    def factor(self, target: int) -> float:
        """Return s for a target: target / original, or more if the base itself is stretched by more.

        Llama 3.2 is stretched by 32 for a window of 131072 = 16 · 8192, so 1.5 times that window needs 48, not 24.
        """
        stretch, window = self.published
        factors = [target / self.original_length, stretch * target / window, stretch]
        largest = max(factors)
        # Live frequencies are rounded; a ratio of lengths is exact.
        return factors[0] if largest <= factors[0] * (1 + _SAME) else largest


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
    # After the parameters: a class built from damaged ones fails with an error about its own code.
    live = None if fixed else live_rope(whole)
    _refuse_unrotated(whole, text, model_type, parameters, live)
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    if nested and not isinstance(parameters.get(FULL), Mapping):
        raise PoSEError(
            f"model type {model_type!r} keeps its rope under {sorted(parameters)} instead of {FULL!r}, so it is "
            "unknown which layers see far, and such models are not supported; choose another base"
        )
    layer_type = FULL if nested else None
    current: dict[str, Any] = parameters[FULL] if nested else parameters
    maximum = lookup(text, "max_position_embeddings")
    if not isinstance(maximum, (int, float)) or maximum != int(maximum) or maximum < 1:
        raise PoSEError(f"model type {model_type!r}: max_position_embeddings={maximum!r} must be a whole number")
    maximum = int(maximum)
    record = dict(lookup(text, RECORD_KEY) or {})
    stated = _stated_window(text, maximum)
    length = _original_length(text, current, stated, record, original_length)
    dim = _rotary_dim(text, current, nested, fixed)
    built = live.get(layer_type) if live else None
    frequencies, attention, restated = _as_built(current, dim, maximum, built, model_type)
    theta = _geometric_base(frequencies) if restated or current["rope_type"] == "dynamic" else current["rope_theta"]
    return RopeSource(
        model_type=model_type,
        parameters=parameters,
        layer_type=layer_type,
        rotary_dim=dim,
        unset_head_dim=_unset_head_dim(text),
        max_position_embeddings=maximum,
        window=_window(current, stated, length),
        original_length=length,
        original_theta=float(record.get("original_theta") or theta),
        frequencies=frequencies,
        attention=attention,
        record=record,
        reach=reach(text, parameters, rotary=live is None or bool(live)),
        keys_read=keys_read(whole),
        top_original=lookup(text, "original_max_position_embeddings") is not None,
        latent_attention=bool(lookup(text, "qk_rope_head_dim") and lookup(text, "qk_nope_head_dim")),
        fixed=fixed,
        restated=restated,
    )


def _parameters(text: Any, model_type: str) -> dict[str, Any]:
    """Return a complete, normalised copy of the rope dict; {} if the config has none."""
    found = lookup(text, "rope_parameters") or lookup(text, "rope_scaling")
    theta = lookup(text, "rope_theta") or lookup(text, "rotary_emb_base")
    if not found and not theta:
        return {}
    shared = {"rope_theta": theta, "partial_rotary_factor": lookup(text, "partial_rotary_factor")}
    shared = {key: value for key, value in shared.items() if value is not None}
    found = found or {}
    if not isinstance(found, Mapping):
        raise PoSEError(f"model type {model_type!r}: its rope is {shown(found)}, no object; correct config.json")
    if any(isinstance(value, Mapping) for value in found.values()):
        layers = {key: value for key, value in found.items() if value is None or isinstance(value, Mapping)}
        return {k: None if v is None else _complete(v, shared, model_type) for k, v in layers.items()}
    return _complete(found, shared, model_type)


def _complete(parameters: Mapping[str, Any], shared: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    given = {key: value for key, value in normalise(parameters).items() if value is not None}
    result = {**shared, **given}
    if "rope_theta" not in result:
        raise PoSEError(
            f"model type {model_type!r}: neither its rope dict {dict(parameters)} nor its config has a rope_theta; add "
            "the base that the model was trained with"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in result:
            result[key] = _number(result[key], key, model_type)
    for key, value in result.items():
        if key in SHAPES and not _possible(key, value):
            raise PoSEError(
                f"model type {model_type!r}: rope {key}={shown(value)} is not {_wanted(key)}; correct config.json"
            )
    return result


def _wanted(key: str) -> str:
    if key == "rope_type":
        return "a name"
    if key == "truncate":
        return "true or false"
    return "a list of numbers above 0" if key in ("short_factor", "long_factor") else "a number above 0"


def _possible(key: str, value: Any) -> bool:
    """Return whether a published value of the rope dict can be computed with."""
    if key == "rope_type":
        return isinstance(value, str)
    if key == "truncate":
        return isinstance(value, bool)
    if key in ("short_factor", "long_factor"):
        return isinstance(value, (list, tuple)) and bool(value) and all(_possible("", each) for each in value)
    # Hunyuan publishes alpha: false, DeepSeek mscale: 0.
    optional = key in ("alpha", "mscale", "mscale_all_dim") and not value
    return optional or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf)


def _number(value: Any, key: str, model_type: str) -> float:
    """Return a published number, which may be a string, or a list with one value for all layers."""
    values = value if isinstance(value, (list, tuple)) and value else [value]
    try:
        numbers = {float(each) for each in values}
    except (TypeError, ValueError):
        raise PoSEError(f"model type {model_type!r}: {key}={value!r} is not a number; write it as one") from None
    if len(numbers) > 1:
        raise PoSEError(
            f"model type {model_type!r}: {key}={shown(value)} has one value per layer. One factor cannot stretch them "
            "all, so such models are not supported; choose another base"
        )
    return numbers.pop()


def _refuse_unrotated(
    whole: Any, text: Any, model_type: str, parameters: dict[str, Any], live: Mapping[Any, Any] | None
) -> None:
    axes = any(str(key).startswith("mrope") for key in (*parameters, parameters.get("rope_type")))
    if (axes or text is not whole or model_type.endswith("_text")) and not is_causal_model(text):
        raise PoSEError(
            f"model type {model_type!r} has no text model that can be trained alone: its tokens get three positions "
            "(mrope: time, height, width) from the class with images, and PoSE sets one. Use the text-only model of "
            "the family"
        )
    if lookup(text, "alibi") or not parameters or live == {}:
        reason = "alibi set" if lookup(text, "alibi") else "no rope_parameters"
        if live == {} and parameters:
            kind = lookup(text, "position_embedding_type")
            reason = f"position_embedding_type={kind!r}" if kind else "no rotary module in its class"
        raise PoSEError(
            f"model type {model_type!r} has no RoPE ({reason}), so there are no frequencies to stretch. Choose a RoPE "
            "model such as Llama, Qwen, Mistral or Gemma"
        )


def _as_built(
    current: Mapping[str, Any], dim: int, maximum: int, live: LiveRope | None, model_type: str
) -> tuple[Frequencies, float, bool]:
    """Return the frequencies for long batches, the attention factor, and whether the class has its own formula.

    Args:
        current: the flat rope dict.
        dim: d, rotated dimensions of a head.
        maximum: max_position_embeddings.
        live: what the class computes; None if it cannot be built here.

    Raises:
        PoSEError: the class computes frequencies that no base and no closed form gives.
    """
    if current["rope_type"] not in CLOSED_FORMS and live is None:
        inverse_frequencies(current, dim)  # raises, naming the type
    candidates = [
        inverse_frequencies(current, dim, max_position_embeddings=maximum, length=length)
        # A class with two lists is built with the one for short batches.
        for length in ((maximum, 1) if current["rope_type"] == "longrope" else (maximum,))
        if current["rope_type"] in CLOSED_FORMS
    ]
    if live is None:
        return *candidates[0], False
    if any(_equal(frequencies, live.frequencies) for frequencies, _ in candidates):
        return candidates[0][0], live.attention, False
    base = _geometric_base(live.frequencies)
    if not _equal(plain_frequencies(base, 2 * live.frequencies.size), live.frequencies):
        raise PoSEError(
            f"model type {model_type!r} computes its frequencies by its own formula (rope {dict(current)}). No "
            "rope_theta gives the same frequencies, so such models are not supported; choose another base"
        )
    return live.frequencies, live.attention, True


def _equal(one: Frequencies, other: Frequencies) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=_SAME, atol=0)


def _geometric_base(frequencies: Frequencies) -> float:
    """Return the base of θ_i = base^(−2i/d), read from the slowest pair."""
    dim = 2 * frequencies.size
    return float(frequencies[-1] ** (-dim / (dim - 2)))


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


def _stated_window(text: Any, maximum: int) -> int:
    """Return the window that a config states. Command-R has 8192 as its maximum to save memory, and another key."""
    other = lookup(text, "model_max_length") if lookup(text, "model_type") == "cohere" else None
    return max(maximum, other) if isinstance(other, int) else maximum


def _original_length(
    text: Any, current: Mapping[str, Any], maximum: int, record: Mapping[str, Any], asked: int | None
) -> int:
    """Return L_0 from the most certain source."""
    if asked is not None:
        return asked
    if record.get("original_length"):
        return int(record["original_length"])
    kind = current["rope_type"]
    if kind in _WITH_ORIGINAL and current.get("original_max_position_embeddings"):
        return int(current["original_max_position_embeddings"])
    factor = float(current.get("factor") or 1.0)
    if kind == "linear" and factor > 1 and (lookup(text, "max_sequence_length") or 0) < factor * maximum:
        return round(maximum / factor)
    return maximum


def _window(current: Mapping[str, Any], maximum: int, original: int) -> int:
    """Return the window that the base's frequencies were made for.

    Configs of transformers 4 may keep the unscaled maximum. Llama 3's factor is not a ratio of windows.
    """
    if current["rope_type"] not in ("linear", "yarn", "longrope"):
        return maximum
    return max(maximum, round(float(current.get("factor") or 1.0) * original))
