"""What to reconsider of a plan: warnings, each with a way out."""

from __future__ import annotations

import numpy as np

from pose_plugin.plan.types import Plan
from pose_plugin.rope.read import read_rope

# A distance in fewer rows is hardly trained; the paper's runs hold most of theirs in some thousands.
FEW_ROWS = 100
# arXiv 2309.10400: 1000 steps of 64 rows.
PAPER_ROWS = 64_000
_NO_STEPS = "the number of steps is not known here: give --steps, or --rows of the data set"


def warnings_of(plan: Plan) -> list[str]:
    """Everything to reconsider, in the order in which it is told."""
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
    from pose_plugin.training.frozen import LARGE

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
