"""Look up values in a config: a transformers config or the dict of a config.json, multimodal or not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pose_plugin.utils.errors import PoSEError, shown

# The config key that holds the rope before any stretching; no reader knows it, all keep it.
RECORD_KEY = "pose_plugin"
FULL = "full_attention"
_MAXIMUM = "max_position_embeddings"
# Keys of config.json that engines take as the window: vLLM takes the smallest of these, SGLang the first that it finds.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


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


def far_rope(values: Any) -> dict[str, Any]:
    """Return the flat rope dict of the layers that see far, from `rope_parameters` or `rope_scaling`; {} for none."""
    if not isinstance(values, Mapping):
        return {}
    inner = values.get(FULL)
    return dict(inner if isinstance(inner, Mapping) else values)


def original_length(config: Any) -> int | None:
    """Return L_0, the window before this package stretched the model, in tokens; None if it did not."""
    return (lookup(text_config(config), RECORD_KEY) or {}).get("original_length")


def as_config(config: Any) -> Any:
    """Return a config object for the dict of a config.json, so that the model's defaults apply.

    A dict whose model_type transformers does not know stays a dict and has to be complete.

    Raises:
        PoSEError: transformers cannot read the dict; the message has its reason.
    """
    if not isinstance(config, Mapping):
        return config
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return copy.deepcopy(dict(config))
    values = copy.deepcopy(dict(config))
    # Some trainers write 32768.0, which transformers 5 refuses.
    for part in (values, values.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get(_MAXIMUM), float) and part[_MAXIMUM].is_integer():
            part[_MAXIMUM] = int(part[_MAXIMUM])
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # each family validates its fields with its own errors
        raise PoSEError(
            f"model type {model_type!r}: transformers cannot read this config: {shown(error, 300)}. Correct config.json"
        ) from error
