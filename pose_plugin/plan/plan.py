"""Make a plan: what will be trained, at which distances, with which frequencies, tokens and memory."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.plan.advice import notes_of, rows_needed, warnings_of
from pose_plugin.plan.beacon import plan_beacon
from pose_plugin.plan.config_reader import Inputs
from pose_plugin.plan.memory import architecture, memory
from pose_plugin.plan.types import Bucket, Plan
from pose_plugin.plan.work import token_operations
from pose_plugin.positions import Coverage, affordable_draws, coverage, simulable
from pose_plugin.rope import rope_overrides
from pose_plugin.rope.plan import plan_rope
from pose_plugin.rope.read import as_config

# Simulated rows: so many for each window in the target, within these limits. With fewer, the rarest distances would be
# in too few rows to tell their chance; more would take more than some seconds.
_DRAWS_OF_A_WINDOW, _FEWEST, _MOST = 100, 4000, 20_000


def make_plan(
    inputs: Inputs,
    gpu_gib: float | None = None,
    draws: int | None = None,
    tokens_per_second: float | None = None,
) -> Plan:
    """Work out what a run will do.

    Args:
        inputs: see `from_yaml`.
        gpu_gib: memory of each GPU; with it, a run that does not fit gets a warning.
        draws: simulated rows for the coverage; default: 4000, or up to 20,000 for a large stretch.
        tokens_per_second: that each GPU trains; with it, hours are estimated.

    Raises:
        PoSEError: settings that cannot work.
    """
    values, settings = dict(inputs.config), inputs.settings
    # Before the model: from a base that cannot be extended, transformers may not even build one.
    rope = plan_rope(values, settings.target_length, settings.rope) if settings else None
    model = architecture(values)
    plan = Plan(inputs, model, memory(model, inputs.run), rope=rope)
    plan = replace(plan, gpu_bytes=gpu_gib * 2**30 if gpu_gib else None, tokens_per_second=tokens_per_second)
    if inputs.beacon is not None:
        stretched = rope_overrides(values, settings.target_length, settings.rope) if settings else {}
        config = as_config({**values, **stretched})
        plan = replace(plan, beacon=plan_beacon(inputs.beacon, config, inputs.run.window))
    elif settings:
        full = replace(inputs.run, window=settings.target_length)
        more = token_operations(model, full) / token_operations(model, inputs.run)
        plan = replace(plan, memory_full_length=memory(model, full), seen=_coverage(settings, draws), more_work=more)
        plan = replace(plan, buckets=_buckets(plan))
    return replace(plan, notes=notes_of(inputs, plan.rope), warnings=warnings_of(plan))


def _coverage(settings: PoSESettings, draws: int | None) -> Coverage | None:
    """Return the chance that a row holds each distance, or None if the target is too long to simulate."""
    if not settings.train_length or not simulable(settings):
        return None
    enough = _DRAWS_OF_A_WINDOW * settings.target_length // settings.train_length
    return coverage(settings, draws=draws or affordable_draws(settings, min(max(enough, _FEWEST), _MOST)))


def _buckets(plan: Plan) -> list[Bucket]:
    """Return ranges of distances: halves and doubles of the window, up to the target."""
    if plan.seen is None or plan.target is None:
        return []
    edges = [1, max(plan.window // 2, 2), max(plan.window, 3)]
    while edges[-1] * 2 < plan.target:
        edges.append(edges[-1] * 2)
    # The last window before the target is rare in every uniform scheme, so it is a separate range.
    edges.append(plan.target - plan.window)
    edges = [*sorted({edge for edge in edges if edge < plan.target}), plan.target]
    buckets = []
    for first, end in pairwise(edges):
        chances = plan.seen.probability[first:end]
        mean, rarest = float(chances.mean()), float(chances.min())
        rows = (mean * plan.rows, rarest * plan.rows) if plan.rows else (None, None)
        buckets.append(Bucket(first, end - 1, mean, rarest, *rows))
    return buckets


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return the whole plan as plain numbers, for other programs."""
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
            "findings": [each.__dict__ for each in rope.findings],
            "layers": [each.__dict__ for each in rope.reach],
        },
        "method": inputs.run.method,
        "gpus": inputs.run.gpus,
        "rows_of_step": plan.rows_of_step,
        "steps": inputs.steps,
        "rows": plan.rows,
        "rows_needed": rows_needed(plan),
        "tokens": {
            "step": step,
            "all": plan.tokens,
            "all_full_length": plan.rows * plan.target if plan.rows and plan.target else None,
        },
        "hours": plan.hours,
        "hours_full_length": plan.hours_full_length,
        "beacon": asdict(plan.beacon) if plan.beacon else None,
        "coverage": [bucket.__dict__ for bucket in plan.buckets],
        "parameters": {"all": plan.model.total, "trained": plan.memory.trained_parameters},
        "memory_bytes": {**plan.memory.parts(), "total": plan.memory.total},
        "memory_bytes_full_length": plan.memory_full_length.total if plan.memory_full_length else None,
        "memory_is": "estimated, not measured",
        "notes": plan.notes,
        "warnings": plan.warnings,
    }  # fmt: skip
