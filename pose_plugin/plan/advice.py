"""Warnings about a plan, each with a fix, and advice."""

from __future__ import annotations

import math
import shlex

import numpy as np

from pose_plugin.plan.config_reader import Inputs
from pose_plugin.plan.types import Plan
from pose_plugin.positions import Coverage, make_sampler
from pose_plugin.rope.plan import RopePlan
from pose_plugin.rope.source import read_rope
from pose_plugin.training.checks import LARGE_STRETCH, warning_of_no_jumps
from pose_plugin.utils.models import last_names
from pose_plugin.utils.tables import counted

# A rule of thumb, not measured; in the PoSE paper's runs most distances are in some thousands of rows.
FEW_ROWS = 100
# arXiv 2309.10400: 1000 steps of 64 rows.
PAPER_ROWS = 64_000
# A stretch at which no run of ours found most passkeys at the target; see docs/paper_tables.md.
UNSHOWN_STRETCH = 64
# bf16 keeps 8 bits, so the neighbours of a weight w are at least w/256 away: a step below w/512 is rounded away.
LOST_BEYOND = 512


def warnings_of(plan: Plan) -> list[str]:
    """Return all warnings, in the order in which they are printed."""
    inputs, settings = plan.inputs, plan.inputs.settings
    findings = plan.rope.findings if plan.rope else ()
    warnings = [*inputs.warnings, *(str(each) for each in findings if each.severity != "info")]
    if inputs.steps is None and (settings or inputs.beacon):
        warnings.append("the number of steps is not known here: give --steps, or --rows (the rows of the data set)")
    warnings += _about_beacons(plan) if inputs.beacon else _about_coverage(plan)
    warnings += _about_precision(plan)
    warnings += _about_memory(plan)
    if inputs.beacon:
        return warnings
    if settings is None:
        warnings.append("there is no `pose:` block: nothing is extended, and only tokens and memory are planned")
        return warnings
    warnings += filter(None, [warning_of_no_jumps(settings)])
    original = plan.rope.original_length if plan.rope else read_rope(dict(inputs.config)).original_length
    if plan.window > original and plan.skips:
        warnings.append(
            f"the trained window, {plan.window}, is longer than the base's own, {original}: every row trains distances "
            "beyond it and needs memory for the whole window. A smaller sequence_len needs less"
        )
    warnings += _about_frozen_parts(plan, original)
    if make_sampler(settings).needs_chats and not inputs.chat:
        warnings.append(
            f"sampler={settings.sampler} needs chats, but no data set has type: chat_template. Plain text is split at "
            "any place, as with sampler: pose"
        )
    if settings.content in ("skip", "window", "aligned") and inputs.chat:
        warnings.append(f"content={settings.content} takes pieces out of chats; use contiguous, the default, for chats")
    return warnings


def notes_of(inputs: Inputs, rope: RopePlan | None) -> list[str]:
    """Return what was assumed, and advice about what to measure first."""
    notes, settings = [*inputs.notes], inputs.settings
    if not settings or not rope or not make_sampler(settings).skips:
        return notes
    stretch = settings.target_length / rope.original_length
    if rope.type.startswith("yarn") and stretch <= LARGE_STRETCH:
        more = settings.rope.model_dump(exclude={"type"}, exclude_defaults=True)
        extend = {"target_length": settings.target_length, "rope": rope.type, **more}
        measure = ["pose-plugin", "evaluate", inputs.base, "--output", "base-extended"]
        measure += ["--extend", ",".join(f"{key}={value}" for key, value in extend.items())]
        notes.append(
            f"YaRN at {stretch:g} times the window may find far facts without training. On SmolLM2-135M, at 4 and 8 "
            "times, PoSE found more than no training, but was not shown to be worth it (docs/smollm2.md). Measure the "
            f"base before you train: {shlex.join(measure)}"
        )
    elif rope.type == "linear" or (rope.type in ("ntk", "base") and stretch >= 4):
        only = ", at 16 times, where alone base was measured" if rope.type == "base" else ""
        notes.append(
            f"{rope.type} needs training. At 4 times the window, SmolLM2-135M with linear found no far fact without "
            "training, and about as many with ordinary positions as with PoSE. A tiny model found far more with PoSE"
            f"{only} (docs/how.md#which-settings). Without training, yarn finds more than linear"
        )
    if stretch >= UNSHOWN_STRETCH:
        notes.append(
            f"nothing was shown to work at {stretch:g} times the window: at 64 times, PoSE found few passkeys with a "
            "tiny model; at 16 times, it found most (docs/paper_tables.md). Consider a smaller target_length"
        )
    return notes


def rows_needed(plan: Plan) -> int | None:
    """Return the rows of which FEW_ROWS hold the rarest trained distance; None if nothing skips or it is not known.

    The last window before the target is left out, because it is rare in every uniform scheme.
    """
    if plan.seen is None or not plan.skips:
        return None
    before = _before_the_last_window(plan.seen, plan.window)
    least = before[before > 0].min() if _unreached(plan.seen).size else before.min()
    return math.ceil(FEW_ROWS / least) if least else None


def _before_the_last_window(seen: Coverage, window: int) -> np.ndarray:
    """Return the chances of the distances 1, 2, … that are not in the last window before the target."""
    return seen.probability[1 : max(len(seen.probability) - window, 2)]


def _unreached(seen: Coverage) -> np.ndarray:
    """Return the distances in no row, or none of them if they are so few that a simulation may have missed them."""
    never = np.flatnonzero(seen.probability[1:] == 0) + 1
    return never if never.size > len(seen.probability) * 0.05 else never[:0]


def _about_coverage(plan: Plan) -> list[str]:
    """Return warnings about distances that few or no rows hold."""
    if plan.target is None:
        return []
    if plan.seen is None:
        return ["the target is too long to simulate; run pose-plugin coverage with smaller numbers"]
    warnings: list[str] = []
    never = _unreached(plan.seen)
    if never.size:
        warnings.append(
            f"{never.size} of {plan.target - 1} distances are in no row, the nearest {never[0]}: the sampler does not "
            "reach the target. Use another sampler, or lower target_length"
        )
    if not plan.rows:
        return warnings
    before = _before_the_last_window(plan.seen, plan.window)
    few = before * plan.rows < FEW_ROWS
    if never.size:
        few &= before > 0  # the others are in the warning above
    rare = np.flatnonzero(few)
    if rare.size:
        needed = rows_needed(plan)
        enough = f"{needed:,} rows would hold each of them in {FEW_ROWS}. " if needed else ""
        warnings.append(
            f"{rare.size} distances will be in fewer than {FEW_ROWS} rows, the nearest {rare[0] + 1} (the last "
            f"{plan.window} before the target not counted). {enough}Train more steps, or lower target_length"
        )
    if plan.rows < PAPER_ROWS // 20:
        warnings.append(
            f"{counted(plan.rows, 'row')} in all are fewer than a twentieth of the PoSE paper's {PAPER_ROWS} (1000 "
            "steps of 64), which may be too few to learn new distances; train more steps or larger batches"
        )
    return warnings


def _about_beacons(plan: Plan) -> list[str]:
    """Return warnings about texts that are too long or too short to condense."""
    beacon = plan.beacon
    if beacon is None:
        return []
    if beacon.refused:
        return [
            f"a text of sequence_len={beacon.text} tokens will stop the training: {beacon.refused}. A smaller "
            "sequence_len cuts texts shorter"
        ]
    if not beacon.intervals:
        end = "stops before the first step" if beacon.layout == "v1" else "ends with a warning"
        return [
            f"sequence_len={beacon.text} is not longer than beacon.interval={beacon.interval}: no text is condensed, "
            f"so nothing is trained, and the run {end}. Raise sequence_len, or lower the interval"
        ]
    return []


def _about_precision(plan: Plan) -> list[str]:
    """Return a warning if trained bf16 weights lose small steps."""
    inputs, run = plan.inputs, plan.inputs.run
    rate = inputs.learning_rate
    if inputs.bf16 is None or run.method not in ("full", "beacon") or (rate and rate * LOST_BEYOND >= 1):
        return []
    lost = "small steps are rounded away"
    if rate:
        lost = f"a step of learning_rate={rate:g} is rounded away in every weight above {rate * LOST_BEYOND:.2g}"
    rounding = "optimizer: adamw_torch_8bit with optim_args: {bf16_stochastic_round: true}"
    if run.method == "beacon":
        fix = "`dtype: float32` in the `beacon:` block, or DeepSpeed"
    elif run.stage >= 2 and not run.master:
        fix = f"deepspeed: …/zero3.json instead of FSDP 2, or {rounding} and fp32_norms: true"
    else:
        fix = f"deepspeed: …/zero2.json (on one GPU too), or {rounding}, or bf16: false, or an adapter"
    return [f"{inputs.bf16} keeps the trained weights in bf16 without a float32 copy: {lost}. Use {fix}"]


def _about_frozen_parts(plan: Plan, original: int) -> list[str]:
    """Return a warning if an adapter leaves parts frozen that a large stretch needs trained."""
    run = plan.inputs.run
    if run.method in ("full", "beacon") or plan.target is None or plan.target / original < LARGE_STRETCH:
        return []
    saved = tuple(run.saved_modules)
    modules = plan.model.beside_lora
    frozen = [part for part, paths in modules.items() if not any(path.endswith(saved) for path in paths)]
    if not frozen:
        return []
    names = ", ".join(name for part in frozen for name in last_names(modules[part]))
    return [
        f"the adapter leaves {' and '.join(frozen)} frozen, and {original} → {plan.target} tokens is a stretch by "
        f"{plan.target / original:g}: LongLoRA (arXiv 2309.12307) had to train them for a stretch by 8. Add "
        f"modules_to_save=[{names}] (Axolotl: lora_modules_to_save)"
    ]


def _about_memory(plan: Plan) -> list[str]:
    """Return warnings if the run does not fit the GPU, or if the model's sizes are a guess."""
    warnings = []
    if not plan.model.known:
        warnings.append(
            f"model_type={plan.inputs.config.get('model_type')!r} is not known to transformers: parameters are counted "
            "as those of a Llama of the same sizes"
        )
    if plan.gpu_bytes and plan.memory.total > plan.gpu_bytes:
        warnings.append(
            f"each GPU needs about {plan.memory.total / 2**30:.1f} GiB and has {plan.gpu_bytes / 2**30:g}. "
            f"{_savings(plan)}"
        )
    return warnings


def _savings(plan: Plan) -> str:
    """Return which settings would need less memory."""
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
    if run.quantised and plan.model.experts and not run.quantised_experts:
        ways.append("quantize_moe_experts: true")
    if run.rows > 1:
        ways.append(f"micro_batch_size: {run.rows // 2}")
    return f"To save memory: {', '.join(ways)}" if ways else "Use more or larger GPUs, or a shorter window"
