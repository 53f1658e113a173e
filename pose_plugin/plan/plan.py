"""The plan itself: what will be trained, at which distances, with which frequencies, tokens and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from pose_plugin.plan.advice import warnings_of
from pose_plugin.plan.beacon import plan_beacon
from pose_plugin.plan.config_reader import Inputs
from pose_plugin.plan.memory import architecture, memory
from pose_plugin.plan.types import Bucket, Plan
from pose_plugin.positions import coverage, simulable
from pose_plugin.rope import rope_overrides
from pose_plugin.rope.plan import plan_rope
from pose_plugin.rope.read import as_config
from pose_plugin.utils.errors import PoSEError

_DRAWS, _DRAWS_OF_MANY_CHUNKS = 4000, 400


def make_plan(inputs: Inputs, gpu_gib: float | None = None, draws: int | None = None) -> Plan:
    """Works the plan out.

    Args:
        inputs: see `from_yaml`.
        gpu_gib: memory of a GPU, to be told whether the run fits.
        draws: simulated rows for the coverage.

    Raises:
        PoSEError: settings that cannot work, with the key, its value and the way out.
    """
    # As the model's own defaults stand for keys that a config.json leaves out.
    try:
        config = as_config(dict(inputs.config))
    except Exception as error:  # transformers has a class of its own for each kind of wrong value
        reason = " ".join(str(error).split())
        raise PoSEError(
            f"the base's config.json is refused by transformers: {reason}. Give another folder by --base FOLDER"
        ) from error
    model = architecture(config)
    used = memory(model, inputs.run)
    settings = inputs.settings
    gpu_bytes = gpu_gib * 2**30 if gpu_gib else None
    rope = plan_rope(dict(inputs.config), settings.target_length, settings.rope) if settings else None
    beacon = None
    if inputs.beacon is not None:
        if settings:
            stretched = rope_overrides(dict(inputs.config), settings.target_length, settings.rope)
            config = as_config({**dict(inputs.config), **stretched})
        beacon = plan_beacon(inputs.beacon, config, inputs.run.window)
    if settings is None or inputs.beacon is not None:
        plan = Plan(inputs, model, used, None, rope, beacon=beacon, gpu_bytes=gpu_bytes)
        return replace(plan, warnings=warnings_of(plan))
    whole = memory(model, replace(inputs.run, window=settings.target_length))
    seen = None
    if settings.train_length and simulable(settings):
        many = settings.sampler in ("randpos", "sentences") or settings.chunks > 32
        usual = max(20, min(_DRAWS_OF_MANY_CHUNKS, 2**26 // settings.target_length)) if many else _DRAWS
        seen = coverage(settings, draws=draws or usual)
    plan = Plan(inputs, model, used, whole, rope, seen, gpu_bytes=gpu_bytes)
    plan = replace(plan, buckets=_buckets(plan))
    return replace(plan, warnings=warnings_of(plan))


def _buckets(plan: Plan) -> list[Bucket]:
    """Distances by halves and doubles of the window, up to the target."""
    if plan.seen is None or plan.target is None:
        return []
    edges = [1, max(plan.window // 2, 2), max(plan.window, 3)]
    while edges[-1] * 2 < plan.target:
        edges.append(edges[-1] * 2)
    # The last window before the target is rare in every uniform scheme, and stands alone.
    last = plan.target - plan.window
    edges = [*sorted({edge for edge in [*edges, last] if edge < plan.target}), plan.target]
    found = []
    for first, end in pairwise(edges):
        chances = plan.seen.probability[first:end]
        mean, rarest = float(chances.mean()), float(chances.min())
        rows = plan.rows
        found.append(
            Bucket(first, end - 1, mean, rarest, mean * rows if rows else None, rarest * rows if rows else None)
        )
    return found


def as_dict(plan: Plan) -> dict[str, Any]:
    """Everything for a program, in plain numbers."""
    inputs, rope = plan.inputs, plan.rope
    step = plan.rows_of_step * plan.window
    return {
        "base": inputs.base,
        "window": plan.window,
        "target": plan.target,
        "sampler": inputs.settings.sampler if inputs.settings else None,
        "rope": None if rope is None else {
            "before": rope.before, "after": rope.after, "type": rope.type, "original_length": rope.original_length,
            "factor": rope.factor, "notes": list(rope.notes), "parameters": rope.rope_parameters,
        },
        "method": inputs.run.method,
        "gpus": inputs.run.gpus,
        "rows_of_step": plan.rows_of_step,
        "steps": inputs.steps,
        "rows": plan.rows,
        "tokens": {
            "step": step,
            "all": step * inputs.steps if inputs.steps else None,
            "all_full_length": plan.rows * plan.target if plan.rows and plan.target else None,
        },
        "beacon": plan.beacon.as_dict() if plan.beacon else None,
        "coverage": [bucket.__dict__ for bucket in plan.buckets],
        "parameters": {"all": plan.model.total, "trained": plan.memory.trained_parameters},
        "memory_bytes": {**plan.memory.parts(), "total": plan.memory.total},
        "memory_bytes_full_length": plan.memory_full_length.total if plan.memory_full_length else None,
        "memory_is": "reckoned, not measured",
        "notes": inputs.notes,
        "warnings": plan.warnings,
    }  # fmt: skip


def require_settings(plan: Plan) -> None:
    """Raises PoSEError where a picture of the coverage was asked for and there is none."""
    if plan.seen is None:
        raise PoSEError(
            "--output draws the coverage by distance, and this run has none: no `pose:` block, no window, or "
            "adapter: beacon, which skips no distances"
        )
