"""From a model's config and one number, `target_length`, to the complete rope parameters.

`plan_rope` decides and explains; it writes nothing. `apply_plan` in apply.py writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.config import RopeSettings, parse_settings
from pose_plugin.rope.read import RopeSource, read_rope
from pose_plugin.rope.stretch import LONGROPE_ONLY, Stretch, stretched
from pose_plugin.utils.errors import PoSEError

# Which settings mean something for which type. A setting without effect is refused, not ignored.
_APPLIES = {
    "factor": ("linear", "ntk", "yarn", "yarn-revised", "llama3", "longrope"),
    "beta_fast": ("yarn", "yarn-revised"),
    "beta_slow": ("yarn", "yarn-revised"),
    "attention_factor": ("yarn", "yarn-revised", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
}
# Their full-attention layers have no rotary positions; only the sliding ones turn.
_ROTARY_WHERE_SLIDING = ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "afmoe")


@dataclass(frozen=True)
class RopePlan:
    """What will be written, and why. Lengths in tokens; s = target_length / original_length."""

    type: str  # as asked for, with `auto` resolved
    model_type: str
    rope_parameters: dict[str, Any]  # complete; nested by layer type where the model's are
    layer_type: str | None  # the key that changed; None where the dict is flat
    rotary_dim: int
    max_position_embeddings: int
    target_length: int
    original_length: int
    original_theta: float
    factor: float
    record: dict[str, Any]  # what the config remembers, so that a later extension starts from the true original
    top_original: bool  # original_max_position_embeddings is also written outside of the rope dict
    head_dim: int | None  # written where the config leaves it null, which some kinds cannot read
    fixed: bool  # the model ignores rope parameters, so none are written
    before: str
    after: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def current(self) -> dict[str, Any]:
        """A copy of the flat dict of the layers that change."""
        return copy.deepcopy(self.rope_parameters[self.layer_type] if self.layer_type else self.rope_parameters)


def rope_settings(rope: str | Mapping[str, Any] | RopeSettings, target_length: int) -> RopeSettings:
    """The validated settings, with `target_length` checked as well.

    Raises:
        PoSEError: naming the key, its value and the way out.
    """
    if isinstance(rope, RopeSettings):
        rope = rope.model_dump(exclude_unset=True)
    settings = parse_settings({"target_length": target_length, "rope": rope}).rope
    for key, types in _APPLIES.items():
        value = getattr(settings, key)
        if key in settings.model_fields_set and value is not None and settings.type not in types:
            raise PoSEError(
                f"rope.{key}={value} has no effect with rope.type={settings.type}; it belongs to "
                f"{', '.join(types)}. Remove it or change the type"
            )
    return settings


def plan_rope(config: Any, target_length: int, rope: str | Mapping[str, Any] | RopeSettings = "yarn") -> RopePlan:
    """Decides how a model's frequencies are stretched to a longer window.

    Args:
        config: a transformers config or the dict of its config.json; not modified.
        target_length: L_t, the wanted window in tokens.
        rope: a type's name, the settings as a dict (`{"type": "base", "theta": 2e8}`) or RopeSettings.

    Raises:
        PoSEError: the model has no RoPE, the settings contradict each other, or the target is not
            beyond the original window.
    """
    settings = rope_settings(rope, target_length)
    source = read_rope(config, settings.original_length)
    _refuse(source, settings, target_length)
    if settings.type == "none":
        maximum, factor = max(source.max_position_embeddings, target_length), 1.0
        current, kind = _pinned(source), "none"
        notes, warnings = [], _unstretched(source, target_length)
    else:
        maximum, factor = target_length, settings.factor or target_length / source.original_length
        request = Stretch(source, settings, target_length, float(factor))
        current, kind = stretched(request), "base" if settings.type == "auto" else settings.type
        notes = [*source.notes, *request.notes, *_replaced(source, target_length)]
        warnings = [*request.warnings, *_short_factor(settings, source, target_length)]
    parameters = current
    if source.layer_type:
        parameters = copy.deepcopy(source.parameters) | {source.layer_type: current}
        others = sorted(key for key in parameters if key != source.layer_type)
        notes.append(f"only the {source.layer_type} layers change; {', '.join(others)} keep their own rope")
    return RopePlan(
        type=kind,
        model_type=source.model_type,
        rope_parameters=parameters,
        layer_type=source.layer_type,
        rotary_dim=source.rotary_dim,
        max_position_embeddings=maximum,
        target_length=target_length,
        original_length=source.original_length,
        original_theta=source.original_theta,
        factor=float(factor),
        record={
            # `none` leaves an earlier stretch in force, so its name stays.
            "rope": source.record.get("rope", kind) if kind == "none" else kind,
            "target_length": maximum,
            "original_length": source.original_length,
            "original_theta": source.original_theta,
        },
        top_original=current["rope_type"] == "longrope" or (source.top_original and not _from_our_list(source)),
        head_dim=None if current["rope_type"] == "default" else source.unset_head_dim,
        fixed=source.fixed,
        before=describe(source.current, source.max_position_embeddings),
        after=describe(current, maximum),
        notes=tuple(notes),
        warnings=(*warnings, *_window_warnings(source, target_length)),
    )


def _from_our_list(source: RopeSource) -> bool:
    """Whether the key outside of the rope dict came with a list of ours, and goes with it."""
    return bool(source.record) and source.current["rope_type"] == "longrope" and source.model_type not in LONGROPE_ONLY


def _short_factor(settings: RopeSettings, source: RopeSource, target: int) -> list[str]:
    reached = (settings.factor or 0) * source.original_length
    if settings.type == "base" or not 0 < reached < target:
        return []
    return [
        f"rope.factor={settings.factor:g} stretches {source.original_length} positions to {reached:g}, less than "
        f"target_length={target}; leave factor out, and it follows from the target"
    ]


def describe(parameters: Mapping[str, Any], maximum: int) -> str:
    """One line: type, base, factor, original length, window."""
    parts = [str(parameters["rope_type"]), f"theta {parameters['rope_theta']:g}"]
    if parameters.get("factor"):
        parts.append(f"factor {parameters['factor']:g}")
    if parameters.get("original_max_position_embeddings"):
        parts.append(f"from {parameters['original_max_position_embeddings']}")
    return f"{', '.join(parts)}; window {maximum}"


def _refuse(source: RopeSource, settings: RopeSettings, target: int) -> None:
    if settings.type == "dynamic" or (settings.type == "none" and source.current["rope_type"] == "dynamic"):
        raise PoSEError(
            "dynamic NTK is for inference only: its base follows the largest position of each batch, and "
            "PoSE draws those anew for every batch, so the model would never see the same frequencies "
            "twice. Use rope: ntk for the same stretch at a fixed base, or rope: yarn"
        )
    if settings.type == "none":
        return
    if source.fixed:
        raise PoSEError(
            f"model type {source.model_type!r} computes its rotary table with base 10000 and reads no rope "
            f"parameters, so rope.type={settings.type} would change nothing. Use rope: none, or another model"
        )
    if target <= source.original_length:
        raise PoSEError(
            f"target_length={target} does not exceed the model's original window of "
            f"{source.original_length}, so there is nothing for rope.type={settings.type} to stretch. Raise "
            "target_length, or keep the frequencies with rope: none; if the original window is wrong, set "
            "rope.original_length"
        )


def _unstretched(source: RopeSource, target: int) -> list[str]:
    known = source.max_position_embeddings
    if target <= known:
        return []
    return [
        f"rope.type=none keeps the frequencies: positions from {known} to {target - 1} turn the slow "
        "dimensions by angles the model has never seen, and training alone has to teach them. Use rope: "
        "yarn unless that is what you want to study"
    ]


def _pinned(source: RopeSource) -> dict[str, Any]:
    """The unchanged dict; a factor that readers derive from the maximum is written down before that rises."""
    current = source.current
    original = current.get("original_max_position_embeddings")
    if current["rope_type"] in ("yarn", "longrope") and current.get("factor") is None and original:
        current["factor"] = source.max_position_embeddings / original
    return current


def _replaced(source: RopeSource, target: int) -> list[str]:
    old, maximum = source.current, source.max_position_embeddings
    notes = []
    if old["rope_type"] not in ("default", "proportional"):
        notes.append(
            f"replaces the model's own scaling ({describe(old, maximum)}); computed from its original window "
            f"of {source.original_length}, so nothing is scaled twice"
        )
    elif source.record and source.original_length != maximum:
        notes.append(
            f"the model was extended before ({source.record.get('rope')}, from {source.original_length} to "
            f"{maximum}); computed from its original window and base {source.original_theta:g}, so nothing "
            "is scaled twice"
        )
    if target < maximum:
        notes.append(
            f"the model's window was {maximum} and becomes target_length={target}; rope: none would keep its "
            "own frequencies and window"
        )
    return notes


def _window_warnings(source: RopeSource, target: int) -> list[str]:
    layers, total = source.sliding_layers
    window = source.sliding_window
    if not window or not layers or window >= target:
        return []
    if layers == total:
        return [
            f"every layer of this model sees only a sliding window of {window} tokens (sliding_window), so no token "
            f"attends further back than that, whatever the frequencies; target_length={target} will not be reached"
        ]
    if source.model_type in _ROTARY_WHERE_SLIDING:
        return [
            f"model type {source.model_type!r} rotates only its {layers} sliding layers, whose window is "
            f"{window} tokens; the {total - layers} layers that see further have no rotary positions to "
            "stretch"
        ]
    shared = "" if source.layer_type else " They share the rope of the others and are stretched with them"
    return [
        f"{layers} of {total} layers see only a sliding window of {window} tokens; the reach to {target} "
        f"rests on the other {total - layers}.{shared}"
    ]
