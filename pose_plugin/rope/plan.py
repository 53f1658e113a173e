"""Derive the complete rope parameters from a model's config and one number, `target_length`.

`plan_rope` decides and explains; `apply_plan` in apply.py writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.config import RopeSettings, parse_settings
from pose_plugin.rope.read import RopeSource, read_rope
from pose_plugin.rope.stretch import KINDS, LONGROPE_ONLY, Stretch, stretched
from pose_plugin.utils.errors import PoSEError

# Only their sliding layers have rotary positions; those with full attention have none.
_ROTARY_WHERE_SLIDING = ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "afmoe")


@dataclass(frozen=True)
class RopePlan:
    """What will be written, and why. Lengths in tokens; s = target_length / original_length unless given."""

    type: str  # the kind, with `auto` resolved
    model_type: str
    rope_parameters: dict[str, Any]  # complete; nested by layer type if the model's are
    layer_type: str | None  # the key that changed; None if the dict is flat
    rotary_dim: int  # d, the rotated dimensions of a head
    max_position_embeddings: int
    target_length: int
    original_length: int
    original_theta: float
    factor: float  # s
    record: dict[str, Any]  # kept in the config, so that a later extension starts from the true original
    top_original: bool  # original_max_position_embeddings is also written outside the rope dict
    head_dim: int | None  # written if the config leaves it null, which some kinds cannot read
    fixed: bool  # the model ignores rope parameters, so none are written
    before: str
    after: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def current(self) -> dict[str, Any]:
        """Return a copy of the flat dict of the layers that change."""
        return copy.deepcopy(self.rope_parameters[self.layer_type] if self.layer_type else self.rope_parameters)


def plan_rope(config: Any, target_length: int, rope: str | Mapping[str, Any] | RopeSettings = "yarn") -> RopePlan:
    """Decide how a model's frequencies are stretched to a longer window.

    Args:
        config: a transformers config or the dict of a config.json; not modified.
        target_length: L_t, the wanted window in tokens.
        rope: a kind's name, the settings as a dict (`{"type": "base", "theta": 2e8}`) or RopeSettings.

    Raises:
        PoSEError: the model has no RoPE, the settings contradict each other, or the target does not exceed the
            original window.
    """
    if isinstance(rope, RopeSettings):
        rope = rope.model_dump(exclude_unset=True)
    parsed = parse_settings({"target_length": target_length, "rope": rope})
    settings, target_length = parsed.rope, parsed.target_length
    kind = KINDS[settings.type]
    source = read_rope(config, settings.original_length)
    if kind.stretches:
        _refuse(source, settings.type, target_length)
    factor = float(settings.factor or target_length / source.original_length) if kind.stretches else 1.0
    request = Stretch(source, settings.model_dump(), frozenset(settings.model_fields_set), target_length, factor)
    current = stretched(kind, request)
    maximum = target_length if kind.stretches else max(source.max_position_embeddings, target_length)
    notes = [*source.notes, *request.notes, *_replaced(source, target_length)] if kind.stretches else []
    parameters = current
    if source.layer_type:
        parameters = copy.deepcopy(source.parameters) | {source.layer_type: current}
        others = sorted(key for key in parameters if key != source.layer_type)
        notes.append(f"only the {source.layer_type} layers change; {', '.join(others)} keep their own rope")
    name = kind.record or kind.name
    return RopePlan(
        type=name,
        model_type=source.model_type,
        rope_parameters=parameters,
        layer_type=source.layer_type,
        rotary_dim=source.rotary_dim,
        max_position_embeddings=maximum,
        target_length=target_length,
        original_length=source.original_length,
        original_theta=source.original_theta,
        factor=factor,
        record={
            # An earlier stretch stays in force under `none`, so its name stays.
            "rope": name if kind.stretches else source.record.get("rope", name),
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
        warnings=(*request.warnings, *_window_warnings(source, target_length)),
    )


def _from_our_list(source: RopeSource) -> bool:
    """Whether the key outside the rope dict was written together with an earlier list, and goes with it."""
    return bool(source.record) and source.current["rope_type"] == "longrope" and source.model_type not in LONGROPE_ONLY


def describe(parameters: Mapping[str, Any], maximum: int) -> str:
    """Return one line: type, base, factor, original length, window."""
    parts = [str(parameters["rope_type"]), f"theta {parameters['rope_theta']:g}"]
    if parameters.get("factor"):
        parts.append(f"factor {parameters['factor']:g}")
    if parameters.get("original_max_position_embeddings"):
        parts.append(f"from {parameters['original_max_position_embeddings']}")
    return f"{', '.join(parts)}; window {maximum}"


def _refuse(source: RopeSource, kind: str, target: int) -> None:
    if source.fixed:
        raise PoSEError(
            f"model type {source.model_type!r} computes its rotary table with base 10000 and reads no rope "
            f"parameters, so rope.type={kind} would change nothing. Use rope: none, or another model"
        )
    if target <= source.original_length:
        raise PoSEError(
            f"target_length={target} does not exceed the model's original window of {source.original_length}, so "
            f"rope.type={kind} has nothing to stretch. Raise target_length, or keep the frequencies with rope: none; "
            "if the original window is wrong, set rope.original_length"
        )


def _replaced(source: RopeSource, target: int) -> list[str]:
    old, maximum = source.current, source.max_position_embeddings
    notes = []
    if old["rope_type"] not in ("default", "proportional"):
        notes.append(
            f"replaces the model's own scaling ({describe(old, maximum)}); computed from its original window of "
            f"{source.original_length}, so nothing is scaled twice"
        )
    elif source.record and source.original_length != maximum:
        notes.append(
            f"the model was extended before ({source.record.get('rope')}, from {source.original_length} to {maximum}); "
            f"computed from its original window and base {source.original_theta:g}, so nothing is scaled twice"
        )
    if target < maximum:
        notes.append(
            f"the model's window was {maximum} and becomes target_length={target}; rope: none would keep its own "
            "frequencies and window"
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
            f"attends further back with any frequencies: target_length={target} will not be reached"
        ]
    if source.model_type in _ROTARY_WHERE_SLIDING:
        return [
            f"model type {source.model_type!r} rotates only its {layers} sliding layers, whose window is {window} "
            f"tokens; the other {total - layers} layers have no rotary positions to stretch"
        ]
    shared = "" if source.layer_type else ", whose rope they share and are stretched with"
    return [
        f"{layers} of {total} layers see only a sliding window of {window} tokens; only the other {total - layers} "
        f"can reach to {target}{shared}"
    ]
