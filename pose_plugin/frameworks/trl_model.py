"""A model that TRL builds from its name: `SFTTrainer("Qwen/Qwen3-8B", args=SFTConfig(model_init_kwargs={…}))`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig

from pose_plugin.config import PoSESettings
from pose_plugin.rope import merge_overrides
from pose_plugin.rope.apply import apply_plan
from pose_plugin.rope.kinds import normalise
from pose_plugin.rope.plan import plan_rope
from pose_plugin.rope.read import text_config
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.findings import report
from pose_plugin.utils.log import log, show_log

# Arguments of `from_pretrained` that say where the config is.
_PLACE = ("revision", "token", "cache_dir", "subfolder", "trust_remote_code")
# Attributes of a config that `from_pretrained` handles itself.
_NOT_SET = ("dtype", "torch_dtype", "attn_implementation", "quantization_config")


@contextmanager
def extended_by_name(model: Any, args: Any, settings: PoSESettings, target_from_model: bool) -> Iterator[None]:
    """Let TRL build a model that is given by name from an extended config.

    transformers neither completes `rope_parameters` (without `rope_theta` it raises) nor raises the maximum that is
    saved, so both are done here. A base that reaches the target already is left alone.

    Args:
        model: of the trainer; only a name or a folder is handled.
        args: TRL's SFTConfig, whose `model_init_kwargs` hold the config inside of the block.
        settings: of the collator.
        target_from_model: whether the collator's target is to be the model's; then `rope_parameters` decide it.

    Raises:
        PoSEError: `rope_parameters` contradict the target or the collator's rope.
    """
    given = dict(getattr(args, "model_init_kwargs", None) or {})
    if not isinstance(model, str) or args is None or "config" in given:
        yield
        return
    wished = given.pop("rope_parameters", None)
    given.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
    config = AutoConfig.from_pretrained(model, **{key: given[key] for key in _PLACE if key in given})
    target = _reach(wished, config) if target_from_model else settings.target_length
    longest = getattr(text_config(config), "max_position_embeddings", None) or 0
    if target is None or (not wished and longest >= target):
        yield
        return
    rope: Any = settings.rope
    if wished and "rope" not in settings.model_fields_set:
        rope = _as_settings(wished, config)
    show_log()
    plan = plan_rope(config, target, rope)
    log.info("rope before: %s", plan.before)
    log.info("rope after:  %s", plan.after)
    report(plan.findings, "rope: ")
    # A wish that the plan does not fulfil is refused.
    theirs = {key: given[key] for key in ("max_position_embeddings",) if key in given}
    ours = {"rope_parameters": plan.rope_parameters, "max_position_embeddings": plan.max_position_embeddings}
    where = "SFTConfig.model_init_kwargs"
    merge_overrides(ours, theirs | ({"rope_parameters": wished} if wished else {}), where, "target_length and rope")
    config = apply_plan(config, plan)
    for key in [key for key in given if key not in (*_NOT_SET, *_PLACE) and hasattr(config, key)]:
        value = given.pop(key)
        if key not in theirs:
            setattr(config, key, value)
    before = args.model_init_kwargs
    args.model_init_kwargs = {**given, "config": config}
    try:
        yield
    finally:
        args.model_init_kwargs = before


def _reach(wished: Mapping[str, Any] | None, config: Any) -> int | None:
    """Return the window that rope parameters stretch to, original × factor; None if they do not tell."""
    if not wished or not wished.get("factor"):
        return None
    original = wished.get("original_max_position_embeddings") or text_config(config).max_position_embeddings
    return round(float(wished["factor"]) * int(original))


def _as_settings(wished: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return transformers' `rope_parameters` as the settings of `rope`."""
    values = normalise(wished)
    kind = values.get("rope_type", "default")
    if kind == "default":
        theta, old = values.get("rope_theta"), text_config(config).rope_parameters
        return {"type": "base", "theta": theta} if theta and theta != old.get("rope_theta") else {"type": "none"}
    # The settings have the names of transformers' keys.
    known = KINDS[kind].settings if kind in KINDS else ()
    settings = {name: values[name] for name in known if values.get(name) is not None}
    if values.get("original_max_position_embeddings"):
        settings["original_length"] = values["original_max_position_embeddings"]
    return {"type": kind, **settings}
