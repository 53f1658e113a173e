"""Write a plan into a config: of a model to be built, of a saved folder, and for Axolotl.

Readers disagree about the keys. transformers 5 reads `rope_parameters`, but a top-level `rope_scaling` wins over it on
load; transformers 4 and llama.cpp read only the top-level keys. So both forms are written, with the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pose_plugin.config import RopeSettings
from pose_plugin.rope.kinds import normalise
from pose_plugin.rope.plan import RopePlan, plan_rope
from pose_plugin.rope.read import FULL, LENGTH_KEYS, RECORD_KEY, as_config, lookup, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import report

_GPT_NEOX = ("gpt_neox", "gpt_neox_japanese")
# Nested models that the transformers 4 form can express: the old key of the sliding layers' base.
_OLD_LOCAL_BASE = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq"}
_TOP_KEYS = ("rope_theta", "rope_scaling")


def extend_context(
    config: Any,
    target_length: int,
    rope: str | Mapping[str, Any] | RopeSettings = "yarn",
    **rope_settings: Any,
) -> Any:
    """Return a copy of a config that reaches `target_length`. Build the model from it: inv_freq is made then, once.

    What the base or the extension does unexpectedly is logged, see `RopePlan.findings`.

    Args:
        config: a transformers config, or the dict of a config.json (then a dict comes back). Not modified.
        target_length: L_t, the target window in tokens.
        rope: a kind's name, the settings as a dict, or RopeSettings.
        rope_settings: more settings, e.g. `rope="base", theta=2e8`.

    Raises:
        PoSEError: see `plan_rope`; or a setting was given twice.

    Examples:
        >>> config = extend_context(AutoConfig.from_pretrained(base), target_length=32768, rope="yarn")
        >>> model = AutoModelForCausalLM.from_pretrained(base, config=config)
    """
    if rope_settings:
        if isinstance(rope, RopeSettings):
            rope = rope.model_dump(exclude_unset=True)
        settings = {"type": rope} if isinstance(rope, str) else dict(rope)
        twice = sorted(settings.keys() & rope_settings.keys())
        if twice:
            raise PoSEError(f"rope.{twice[0]} is given both in rope and as a keyword; keep one of them")
        rope = settings | rope_settings
    plan = plan_rope(config, target_length, rope)
    report(plan.findings, "rope: ")
    return apply_plan(config, plan)


def apply_plan(config: Any, plan: RopePlan) -> Any:
    """Return a copy of `config` with the plan's rope parameters, maximum, record and copies for older readers."""
    result = copy.deepcopy(config)
    text = text_config(result)
    store: Any = text if isinstance(text, Mapping) else text.__dict__
    for key, value in _values(plan).items():
        if store is text:
            store[key] = value
        else:
            setattr(text, key, value)
    for key in (*_TOP_KEYS, *(() if plan.top_original else ("original_max_position_embeddings",))):
        store.pop(key, None)
    # Not by setattr: setting the property `rope_scaling` of a config object replaces rope_parameters.
    store.update(_raised(text, plan) | _extra(plan))
    return result


def rope_overrides(
    config: Any, target_length: int, rope: str | Mapping[str, Any] | RopeSettings = "yarn"
) -> dict[str, Any]:
    """Return the plan as Axolotl's `overrides_of_model_config`, which it sets on every config by setattr.

    `rope_scaling` is left out: as an attribute it is another name of `rope_parameters`, and would replace a nested dict
    by a flat one.

    Raises:
        PoSEError: see `plan_rope`; or the rope is in a multimodal config's text_config, which setattr does not reach.
    """
    whole = as_config(config)
    plan = plan_rope(whole, target_length, rope)
    if text_config(whole) is not whole:
        raise PoSEError(
            f"the rope of this model is in its text_config (model type {plan.model_type!r}), which "
            "overrides_of_model_config does not reach. Save `extend_context(config, …)` into a folder and set "
            "base_model_config to it"
        )
    extra = {key: value for key, value in _extra(plan).items() if key != "rope_scaling"}
    return _values(plan) | _raised(text_config(whole), plan) | extra


def _values(plan: RopePlan) -> dict[str, Any]:
    """Return the rope, and then the maximum: a yarn dict without an original length takes the one that it finds."""
    rope = {} if plan.fixed else {"rope_parameters": copy.deepcopy(plan.rope_parameters)}
    return rope | {"max_position_embeddings": plan.max_position_embeddings}


def _raised(text: Any, plan: RopePlan) -> dict[str, int]:
    """Return the other lengths of a config that would keep engines below the plan's window, raised to it."""
    found = {key: lookup(text, key) for key in LENGTH_KEYS if key != "max_position_embeddings"}
    maximum = plan.max_position_embeddings
    return {key: maximum for key, value in found.items() if isinstance(value, int) and 0 < value < maximum}


def merge_overrides(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any] | None,
    where: str = "overrides_of_model_config",
    decided_by: str = "pose.target_length and pose.rope",
) -> dict[str, Any]:
    """Return the plan's overrides together with the user's own.

    Args:
        ours, theirs: values of the config by key.
        where, decided_by: the key that holds the user's, and the settings that decide ours, for the message.

    Raises:
        PoSEError: they disagree about the rope or the maximum.
    """
    result = copy.deepcopy(dict(ours))
    for key, value in (theirs or {}).items():
        name = "rope_parameters" if key == "rope_scaling" else key
        if name not in ours:
            result[key] = copy.deepcopy(value)
            continue
        _refuse_contradiction(f"{where}.{key}", ours[name], value, decided_by)
    return result


def _refuse_contradiction(path: str, ours: Any, theirs: Any, decided_by: str) -> None:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        flat = not any(isinstance(value, Mapping) for value in theirs.values())
        wanted = normalise(theirs) if flat and "rope_type" in ours and ("type" in theirs) else theirs
        for key, value in wanted.items():
            _refuse_contradiction(f"{path}.{key}", ours.get(key), value, decided_by)
    elif ours != theirs:
        raise PoSEError(
            f"{path}={theirs!r} contradicts {decided_by}, which need {ours!r}; remove it, or set rope accordingly "
            "(none keeps the model's frequencies)"
        )


def legacy_copies(parameters: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the top-level keys from which transformers 4, llama.cpp and older vLLM read the same rope.

    Args:
        parameters: complete rope parameters, flat or nested by layer type.
        model_type: the text model's.

    Returns:
        `rope_theta`, `rope_scaling` (null for plain RoPE) and what single families also need; {} for a nested rope that
        the old form cannot express.
    """
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    if not nested:
        copies = _flat_copies(parameters)
        if model_type in _GPT_NEOX:
            copies["rotary_emb_base"] = copies["rope_theta"]
            copies["rotary_pct"] = copies.pop("partial_rotary_factor", 1.0)
        return copies
    full, sliding = parameters.get(FULL), parameters.get("sliding_attention")
    if not isinstance(full, Mapping) or not isinstance(sliding, Mapping) or sliding["rope_type"] != "default":
        return {}
    local = sliding.get("rope_theta")
    if model_type in _OLD_LOCAL_BASE:
        return _flat_copies(full) | ({} if local is None else {_OLD_LOCAL_BASE[model_type]: local})
    if model_type == "olmo3" and local in (None, full["rope_theta"]):
        return _flat_copies(full)
    return {}


def _flat_copies(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = parameters["rope_type"]
    # A plain rope has keys too in multimodal families (mrope_section).
    plain = kind == "default" and not parameters.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}
    copies: dict[str, Any] = {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if plain else copy.deepcopy(dict(parameters)),
    }
    if "partial_rotary_factor" in parameters:
        copies["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if kind == "longrope":  # transformers 4 looks for it outside the rope dict
        copies["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    return copies


def _extra(plan: RopePlan) -> dict[str, Any]:
    """Return what is written in addition to rope_parameters and the maximum."""
    extra = {} if plan.fixed else legacy_copies(plan.rope_parameters, plan.model_type)
    if plan.top_original:
        # Phi-3 lets this key win over the rope dict's own.
        extra["original_max_position_embeddings"] = plan.original_length
    if plan.head_dim is not None:
        extra["head_dim"] = plan.head_dim
    extra[RECORD_KEY] = dict(plan.record)
    return extra
