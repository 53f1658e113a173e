"""Derive the complete rope parameters from a model's config and one number, `target_length`.

`plan_rope` decides and explains; `apply_plan` in apply.py writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.config import RopeSettings, parse_settings
from pose_plugin.rope.findings import about_base, about_change, describe
from pose_plugin.rope.kinds import inverse_frequencies
from pose_plugin.rope.reach import LayerKind
from pose_plugin.rope.source import RopeSource, read_rope
from pose_plugin.rope.stretch import KINDS, LONGROPE_ONLY, Stretch, stretched
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import Finding


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
    notes: tuple[str, ...]  # how values were computed
    findings: tuple[Finding, ...]
    reach: tuple[LayerKind, ...]  # what each kind of layers sees

    @property
    def current(self) -> dict[str, Any]:
        """Return a copy of the flat dict of the layers that change."""
        return copy.deepcopy(self.rope_parameters[self.layer_type] if self.layer_type else self.rope_parameters)


def plan_rope(config: Any, target_length: int, rope: str | Mapping[str, Any] | RopeSettings = "yarn") -> RopePlan:
    """Decide how a model's frequencies are stretched to a longer window.

    Args:
        config: a transformers config or the dict of a config.json; not modified.
        target_length: L_t, the target window in tokens.
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
    factor = float(settings.factor or source.factor(target_length)) if kind.stretches else 1.0
    request = Stretch(source, settings.model_dump(), frozenset(settings.model_fields_set), target_length, factor)
    current = stretched(kind, request)
    maximum = target_length if kind.stretches else max(source.max_position_embeddings, target_length)
    notes, findings = list(request.notes), [*about_base(source, target_length), *request.findings]
    if kind.stretches:
        forced = bool({"factor", "theta"} & request.given)
        made = inverse_frequencies(current, source.rotary_dim, max_position_embeddings=maximum)
        findings += about_change(source, settings.type, target_length, *made, forced)
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
        record=_record(source, name if kind.stretches else None, target_length),
        top_original=current["rope_type"] == "longrope" or (source.top_original and not _from_our_list(source)),
        head_dim=None if current["rope_type"] == "default" else source.unset_head_dim,
        fixed=source.fixed,
        before=describe(source.current, source.max_position_embeddings),
        after=describe(current, maximum),
        notes=tuple(notes),
        findings=tuple(findings),
        reach=source.reach,
    )


def _from_our_list(source: RopeSource) -> bool:
    """Whether the key outside the rope dict was written together with an earlier list, and goes with it."""
    return bool(source.record) and source.current["rope_type"] == "longrope" and source.model_type not in LONGROPE_ONLY


def _record(source: RopeSource, name: str | None, target: int) -> dict[str, Any]:
    """Return what is kept in the config.

    Args:
        source: the base.
        name: of the kind; None if the frequencies stay, and with them the name of an earlier stretch.
        target: the new window; below the maximum if `rope: none` keeps a longer one.
    """
    record = {
        "rope": name or source.record.get("rope", "none"),
        "target_length": target,
        "original_length": source.original_length,
        "original_theta": source.original_theta,
    }
    published = source.published
    return record | {"published": list(published)} if published[0] > 1.001 else record


def _refuse(source: RopeSource, kind: str, target: int) -> None:
    if source.fixed:
        raise PoSEError(
            f"model type {source.model_type!r} computes its rotary table with base 10000 and reads no rope "
            f"parameters, so rope.type={kind} would change nothing. Use rope: none, or another model"
        )
    far = [each for each in source.reach if each.rotates and each.sees_beyond(source.original_length)]
    if not far:
        raise PoSEError(_why_nothing_changes(source, kind, target))
    if target <= source.original_length:
        raise PoSEError(
            f"target_length={target} does not exceed the model's original window of {source.original_length}, so "
            f"rope.type={kind} has nothing to stretch. Raise target_length, or keep the frequencies with rope: none; "
            "if the original window is wrong, set rope.original_length"
        )


def _why_nothing_changes(source: RopeSource, kind: str, target: int) -> str:
    """Return why no layer of a base can use other frequencies, from its reach table."""
    rows = "; ".join(
        f"{each.layers} × {each.name}: {'rotates' if each.rotates else 'no positions'}, sees {each.span}"
        for each in source.reach
    )
    near = next((each for each in source.reach if each.rotates), None)
    if near is None:
        return (
            f"model type {source.model_type!r}: no layer rotates queries and keys ({rows}), so rope.type={kind} would "
            "change nothing. Choose a model with RoPE in the layers that see far"
        )
    key = "attention_chunk_size" if near.chunks else "sliding_window"
    return (
        f"{key}={near.sees}: no layer of model type {source.model_type!r} both rotates and sees beyond the original "
        f"window of {source.original_length} ({rows}), so rope.type={kind} would change nothing up to target_length="
        f"{target}. Keep the frequencies with rope: none, or set {key}: null in the base's config if these layers "
        "should see far"
    )
