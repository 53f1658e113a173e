"""The plan itself: what will be trained, at which distances, with which frequencies, tokens and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pose_plugin.errors import PoSEError
from pose_plugin.plan.architecture import Architecture, architecture
from pose_plugin.plan.beacon import BeaconPlan, plan_beacon
from pose_plugin.plan.inputs import Inputs
from pose_plugin.plan.memory import Memory, memory
from pose_plugin.positions import Coverage, coverage, simulable
from pose_plugin.rope import rope_overrides
from pose_plugin.rope.plan import RopePlan, plan_rope
from pose_plugin.rope.read import as_config, read_rope

# A distance in fewer rows is hardly trained; the paper's runs hold most of theirs in some thousands.
FEW_ROWS = 100
# arXiv 2309.10400: 1000 steps of 64 rows.
PAPER_ROWS = 64_000
_DRAWS, _DRAWS_OF_MANY_CHUNKS = 4000, 400
_NO_STEPS = "the number of steps is not known here: give --steps, or --rows of the data set"


@dataclass(frozen=True)
class Bucket:
    """Distances first…last: how likely a row holds one and the rows that will have, in the mean and of the rarest."""

    first: int
    last: int
    chance: float
    rarest: float
    rows: float | None
    rows_rarest: float | None


@dataclass(frozen=True)
class Plan:
    """What will happen; lengths in tokens, memory in bytes on each GPU."""

    inputs: Inputs
    model: Architecture
    memory: Memory
    memory_full_length: Memory | None
    rope: RopePlan | None = None
    seen: Coverage | None = None
    beacon: BeaconPlan | None = None
    buckets: list[Bucket] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    gpu_bytes: float | None = None

    @property
    def rows_of_step(self) -> int:
        run = self.inputs.run
        return run.rows * self.inputs.accumulate * run.gpus

    @property
    def rows(self) -> int | None:
        """Rows of the training, None where the steps are not known."""
        return self.rows_of_step * self.inputs.steps if self.inputs.steps else None

    @property
    def window(self) -> int:
        return self.inputs.run.window

    @property
    def target(self) -> int | None:
        return self.inputs.settings.target_length if self.inputs.settings else None


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
    config = as_config(dict(inputs.config))
    model = architecture(config)
    used = memory(model, inputs.run)
    settings = inputs.settings
    gpu_bytes = gpu_gib * 2**30 if gpu_gib else None
    rope = plan_rope(dict(inputs.config), settings.target_length, settings.rope) if settings else None
    if settings is None or rope is None or inputs.beacon is not None:
        if inputs.beacon is not None:
            if settings:
                stretched = rope_overrides(dict(inputs.config), settings.target_length, settings.rope)
                config = as_config({**dict(inputs.config), **stretched})
            beacon = plan_beacon(inputs.beacon, config, inputs.run.window)
        else:
            beacon = None
        plan = Plan(inputs, model, used, None, rope, beacon=beacon, gpu_bytes=gpu_bytes)
        return replace(plan, warnings=_warnings(plan))
    whole = memory(model, replace(inputs.run, window=settings.target_length))
    seen = None
    if settings.train_length and simulable(settings):
        many = settings.sampler in ("randpos", "sentences") or settings.chunks > 32
        usual = max(20, min(_DRAWS_OF_MANY_CHUNKS, 2**26 // settings.target_length)) if many else _DRAWS
        seen = coverage(settings, draws=draws or usual)
    plan = Plan(inputs, model, used, whole, rope, seen, gpu_bytes=gpu_bytes)
    plan = replace(plan, buckets=_buckets(plan))
    return replace(plan, warnings=_warnings(plan))


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


def _warnings(plan: Plan) -> list[str]:
    inputs, settings = plan.inputs, plan.inputs.settings
    said = [*inputs.warnings, *(plan.rope.warnings if plan.rope else ())]
    said += _of_beacon(plan) if inputs.beacon is not None else _of_coverage(plan)
    said += _of_precision(plan)
    if not plan.model.known:
        said.append(
            f"parameters of model type {inputs.config.get('model_type')!r} are counted as a Llama's of the same sizes"
        )
    if plan.gpu_bytes and plan.memory.total > plan.gpu_bytes:
        said.append(
            f"{plan.memory.total / 2**30:.1f} GiB are reckoned on each GPU, which has {plan.gpu_bytes / 2**30:g}. "
            f"{_less(plan)}"
        )
    if inputs.beacon is not None:
        return said
    if settings is None:
        said.append("there is no `pose:` block: nothing is extended, and only tokens and memory are planned")
        return said
    original = plan.rope.original_length if plan.rope else read_rope(dict(inputs.config)).original_length
    if plan.window > original:
        said.append(
            f"the trained window, {plan.window}, is longer than the base's own, {original}: distances beyond it are "
            "trained in every row, and memory is what it takes"
        )
    said += _of_frozen(plan, original)
    if settings.sampler == "turns" and not inputs.chat:
        said.append(
            "sampler=turns needs chats: no data set is of type chat_template. Plain text is cut anywhere, as by pose"
        )
    if settings.content in ("skip", "window", "aligned") and inputs.chat:
        said.append(f"content={settings.content} takes pieces out of chats; use contiguous, the default, for chats")
    return said


def _of_coverage(plan: Plan) -> list[str]:
    said: list[str] = []
    if plan.inputs.settings is None or plan.target is None:
        return said
    if plan.inputs.steps is None:
        said.append(_NO_STEPS)
    if plan.seen is None:
        said.append("the target is too long to simulate; see pose-plugin coverage with smaller numbers")
        return said
    chances = plan.seen.probability[1:]
    never = np.flatnonzero(chances == 0)
    if never.size > plan.target * 0.05:
        said.append(
            f"{never.size} of {plan.target - 1} distances are in no row, the nearest {never[0] + 1}: the target is "
            "beyond what the sampler reaches"
        )
    rows = plan.rows
    if rows:
        before = chances[: max(plan.target - plan.window, 1)]
        # Those that are in no row have been told.
        rare = np.flatnonzero((before * rows < FEW_ROWS) & ((before > 0) | (never.size <= plan.target * 0.05)))
        if rare.size:
            said.append(
                f"{rare.size} distances before the last window will be in fewer than {FEW_ROWS} rows, the nearest "
                f"{rare[0] + 1}; more steps, more chunks or a nearer target train them"
            )
        if rows < PAPER_ROWS // 20:
            said.append(
                f"{rows} rows in all are few: the PoSE paper trained {PAPER_ROWS} (1000 steps of 64), and less than a "
                "twentieth of that is little to learn new distances from"
            )
    return said


def _of_beacon(plan: Plan) -> list[str]:
    said: list[str] = []
    if plan.inputs.steps is None:
        said.append(_NO_STEPS)
    beacon = plan.beacon
    if beacon is None:
        return said
    if beacon.refused:
        said.append(
            f"a text of sequence_len={beacon.text} tokens will stop the training: {beacon.refused}. A smaller "
            "sequence_len cuts texts shorter"
        )
    elif not beacon.intervals:
        said.append(
            f"sequence_len={beacon.text} is no longer than beacon.interval={beacon.interval}: no text is condensed, so "
            "nothing is trained, and the run ends with a warning. Raise sequence_len, or lower the interval"
        )
    return said


# A step is lost up and down in every bf16 weight of more than 512 steps: its neighbours are 1/256 of it away or more.
_LOST_BEYOND = 512


def _of_precision(plan: Plan) -> list[str]:
    inputs, run = plan.inputs, plan.inputs.run
    rate = inputs.learning_rate
    if inputs.bf16 is None or run.method not in ("full", "beacon") or (rate and rate * _LOST_BEYOND >= 1):
        return []
    small = (
        f"a step as long as learning_rate={rate:g} is rounded away in every weight above {rate * _LOST_BEYOND:.2g}"
        if rate
        else "small steps are rounded away"
    )
    if run.method == "beacon":
        ways = "`dtype: float32` in the `beacon:` block, or DeepSpeed"
    elif run.stage >= 2 and not run.master:
        ways = (
            "deepspeed: …/zero3.json in the place of FSDP 2, or optimizer: adamw_torch_8bit with optim_args: "
            "{bf16_stochastic_round: true} and fp32_norms: true"
        )
    else:
        ways = (
            "deepspeed: …/zero2.json, on one GPU too, or optimizer: adamw_torch_8bit with optim_args: "
            "{bf16_stochastic_round: true}, or bf16: false, or an adapter"
        )
    return [f"{inputs.bf16} keeps the trained weights in bf16, with no float32 copy of them: {small}. Ways out: {ways}"]


def _of_frozen(plan: Plan, original: int) -> list[str]:
    from pose_plugin.integrations.frozen import LARGE

    run = plan.inputs.run
    if run.method in ("full", "beacon") or plan.target is None or plan.target / original < LARGE:
        return []
    saved = " ".join(run.saved_modules)
    frozen = [name for name, part in (("embeddings", "embed"), ("norms", "norm")) if part not in saved]
    if not frozen:
        return []
    return [
        f"the adapter leaves {' and '.join(frozen)} frozen, and {original} → {plan.target} tokens is a stretch by "
        f"{plan.target / original:g}: LongLoRA (arXiv 2309.12307) needed them trained at 8. Add them to "
        "lora_modules_to_save"
    ]


def _less(plan: Plan) -> str:
    run = plan.inputs.run
    ways = []
    if not run.checkpointing:
        ways.append("gradient_checkpointing: true")
    if not run.fused_loss and plan.memory.logits > plan.memory.total / 5:
        ways.append("a fused loss (liger_fused_linear_cross_entropy: true)")
    if run.stage < 3 and run.gpus > 1:
        ways.append("ZeRO-3 or FSDP")
    if run.method in ("full", "lora"):
        ways.append("adapter: qlora with load_in_4bit: true")
    if run.rows > 1:
        ways.append(f"micro_batch_size: {run.rows // 2}")
    return f"What takes less: {', '.join(ways)}" if ways else "Use more or larger GPUs, or a shorter window"


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
