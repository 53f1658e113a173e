"""What a base, and an extension of it, will do that its user may not expect.

`about_base` needs a base and a target only, `about_change` also the frequencies that a plan writes. `plan_rope` puts
both into `RopePlan.findings`, which `extend_context`, the plan command, the Axolotl plugin and trainers report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pose_plugin.rope.kinds import SHAPES, Frequencies
from pose_plugin.rope.reach import LayerKind
from pose_plugin.rope.source import RopeSource, read_rope
from pose_plugin.utils.findings import Finding

# Keys that say how a published config is to be read, known to transformers or to single families.
_KNOWN = SHAPES | {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta"}
# Kinds that a user can ask for by name alone.
_BY_NAME = {"linear", "yarn", "llama3"}
# Relative differences below this are rounding.
_ROUNDING = 1e-4


def describe(parameters: Mapping[str, Any], maximum: int) -> str:
    """Return one line: type, base, factor, original length, window."""
    parts = [str(parameters["rope_type"]), f"theta {parameters['rope_theta']:g}"]
    if parameters.get("factor"):
        parts.append(f"factor {parameters['factor']:g}")
    if parameters.get("original_max_position_embeddings"):
        parts.append(f"from {parameters['original_max_position_embeddings']}")
    return f"{', '.join(parts)}; window {maximum}"


def base_findings(config: Any, target: int) -> list[Finding]:
    """Return what follows from a base alone for a run up to `target` tokens, however its frequencies are stretched.

    Args:
        config: a transformers config or the dict of a config.json, extended or not.
        target: L_t, tokens.
    """
    return [*about_base(read_rope(config), target)]


def about_base(source: RopeSource, target: int) -> Iterator[Finding]:
    """Yield what follows from a base alone for a run up to `target` tokens."""
    yield from _about_reach(source, target)
    yield from _about_published_keys(source)


def _about_reach(source: RopeSource, target: int) -> Iterator[Finding]:
    total = sum(kind.layers for kind in source.reach)
    far = sum(kind.layers for kind in source.reach if kind.rotates and kind.sees_beyond(target - 1))
    for kind in source.reach:
        if not kind.attends:
            yield Finding(
                "layer_types",
                kind.name,
                f"{kind.layers} of {total} layers read tokens in order into a state and have no positions, so an "
                "extension does not change them: only training on long texts teaches them more",
                severity="info",
            )
        elif kind.sees is None and not kind.rotates:
            yield Finding(
                "layer_types",
                kind.name,
                f"{kind.layers} of {total} layers have no positions (NoPE), so an extension does not change them",
                severity="info",
            )
        elif kind.sees is not None and kind.sees < target:
            yield _about_window(source, kind, total, far, target)


def _about_window(source: RopeSource, kind: LayerKind, total: int, far: int, target: int) -> Finding:
    key = "attention_chunk_size" if kind.chunks else "sliding_window"
    what = f"chunks of {kind.sees} tokens" if kind.chunks else f"a sliding window of {kind.sees} tokens"
    if not far and kind.layers == total:
        return Finding(
            key,
            kind.sees,
            f"every layer sees only {what}, so other frequencies let no token attend further back: "
            f"target_length={target} will not be reached",
            f"Set {key}: null in the config if full attention is wanted",
        )
    if not far:
        return Finding(
            key,
            kind.sees,
            f"model type {source.model_type!r} rotates only its {kind.layers} layers that see {what}; the others have "
            "no rotary positions to stretch",
            "The layers without positions may reach further by training alone: use rope: none",
        )
    shared = ", whose rope they share and are stretched with" if kind.shared and kind.rotates else ""
    return Finding(
        key,
        kind.sees,
        f"{kind.layers} of {total} layers see only {what}; only the other {far} can reach to {target}{shared}",
    )


def _about_published_keys(source: RopeSource) -> Iterator[Finding]:
    current = source.current
    unknown = sorted(current.keys() - _KNOWN - source.keys_read)
    if unknown:
        yield Finding(
            "rope_parameters",
            {key: current[key] for key in unknown},
            "neither transformers nor the model's class knows these keys; they are kept as they are",
            severity="info",
        )
    if source.restated or current.get("alpha"):
        yield Finding(
            "rope_type",
            current["rope_type"],
            f"the model's class computes a fixed base of {source.original_theta:g} from {current}; an extension starts "
            "from that base",
            severity="info",
        )
    factor, maximum = float(current.get("factor") or 1.0), source.max_position_embeddings
    if current["rope_type"] == "linear" and factor > 1 and not source.record:
        yield Finding(
            "max_position_embeddings",
            maximum,
            f"with linear scaling by {factor:g} the original window should be {maximum} / {factor:g} = "
            f"{round(maximum / factor)}, and {source.original_length} is used. Some checkpoints keep the unscaled "
            "maximum, and a factor that is computed from a window that is too short stretches too much",
            f"If {maximum} is the unscaled maximum, set rope.original_length: {maximum}",
            "warning" if source.original_length != maximum else "info",
        )
    elif source.window > maximum:
        yield Finding(
            "max_position_embeddings",
            maximum,
            f"factor {factor:g} × {source.original_length} reaches {source.window}, which counts as the base's window",
            severity="info",
        )
    for fast, slow in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
        if current.get(fast) and current.get(slow) and current[fast] <= current[slow]:
            yield Finding(
                f"rope_parameters.{fast}",
                current[fast],
                f"the model publishes {slow}={current[slow]:g}, so no dimension lies between them; both are kept",
                severity="info",
            )


def about_change(
    source: RopeSource,
    kind: str,
    target: int,
    frequencies: Frequencies,
    attention: float,
    forced: bool,
) -> Iterator[Finding]:
    """Yield what an extension replaces, and where it does not stretch what it should.

    Args:
        source: the base.
        kind: the value of `rope.type`.
        target: L_t, tokens.
        frequencies: those of the plan, shape [d / 2].
        attention: the plan's scale of cos and sin.
        forced: whether the user gave the factor or the base.
    """
    yield from _about_replaced(source, kind, target)
    ratio = frequencies[source.frequencies > 0] / source.frequencies[source.frequencies > 0]
    if np.abs(ratio - 1).max() < _ROUNDING:
        yield Finding(
            "rope.type",
            kind,
            f"the frequencies of this base stay as they are, so nothing is stretched towards target_length={target}",
            "Raise target_length or set rope.factor, or use rope: none to say so",
        )
    elif ratio[-1] > 1 + _ROUNDING:
        yield Finding(
            "rope.factor" if forced else "rope.type",
            kind,
            f"the slowest pair becomes {ratio[-1]:.3g} times faster than the base's own, so the model reaches less "
            "far than before",
            "Remove rope.factor or rope.theta, and both follow from the target"
            if forced
            else "Start from the base that was extended last time with the same rope.type",
        )
    if abs(attention - source.attention) > _ROUNDING and abs(source.attention - 1) > _ROUNDING and attention == 1.0:
        yield Finding(
            "attention_factor",
            f"{source.attention:g}",
            f"the base scales cos and sin by this, and rope.type={kind} has no scale, so all logits change",
            "Use rope: yarn, which keeps it",
        )


def _about_replaced(source: RopeSource, kind: str, target: int) -> Iterator[Finding]:
    old, window, record = source.current, source.window, source.record
    before = describe(old, source.max_position_embeddings)
    if record and source.original_length != window:
        yield Finding(
            "pose_plugin",
            record.get("rope"),
            f"the model was extended before, from {source.original_length} to {window} ({before}); computed from its "
            f"original window and base {source.original_theta:g}, so nothing is scaled twice",
            severity="info",
        )
    elif old["rope_type"] not in ("default", "proportional"):
        yield Finding(
            "rope_type",
            old["rope_type"],
            f"rope.type={kind} replaces the model's own scaling ({before}); computed from its original window of "
            f"{source.original_length}, so nothing is scaled twice",
            f"To keep its kind, set rope: {old['rope_type']}" if old["rope_type"] in _BY_NAME - {kind} else "",
            "info" if old["rope_type"] == kind else "warning",
        )
    stretch, limit = source.published
    if source.factor(target) > target / source.original_length * (1 + _ROUNDING):
        yield Finding(
            "rope.factor",
            f"{source.factor(target):g}",
            f"the base stretches its slowest pair by {stretch:g} for a window of {limit}, more than {limit} / "
            f"{source.original_length} = {limit / source.original_length:g}, so the factor is larger than target / "
            "original",
            severity="info",
        )
    if target < window:
        yield Finding(
            "target_length",
            target,
            f"the model's window was {window} and becomes shorter",
            "Use rope: none to keep its own frequencies and window",
        )
