"""A plan as text for the terminal and as a picture. matplotlib is imported when it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.plan.beacon import BeaconPlan
from pose_plugin.plan.plan import require_settings
from pose_plugin.plan.types import Plan
from pose_plugin.positions.figure import check_ending

_METHODS = {
    "full": "all weights",
    "lora": "LoRA",
    "qlora": "QLoRA, 4 bits",
    "8bit": "LoRA on 8-bit weights",
    "beacon": "Activation Beacon",
}


def text(plan: Plan) -> str:
    """The whole plan, section by section; every number of memory is reckoned and says so."""
    inputs = plan.inputs
    parts = [f"Plan for {inputs.base}\n"]
    if plan.beacon is not None:
        parts.append(_beacon(plan.beacon))
    elif plan.inputs.beacon is not None:
        parts.append(f"Window     as the base has it; texts of up to {plan.window} tokens are read in intervals")
    elif plan.target is None:
        parts.append(f"Window     {plan.window} tokens; nothing is extended")
    else:
        parts.append(f"Window     {plan.window} tokens are trained, {plan.target} are wanted ({_sampler(plan)})")
    if plan.rope is not None:
        parts.append(f"RoPE       before: {plan.rope.before}\n           after:  {plan.rope.after}")
        parts += [f"           {note}" for note in plan.rope.notes]
    parts.append(_steps(plan))
    parts.append("\n" + _memory(plan))
    if plan.buckets:
        parts.append("\n" + _coverage(plan))
    parts += [f"\nNote: {note}" for note in inputs.notes]
    parts += [f"\nWarning: {warning}" for warning in plan.warnings]
    return "\n".join(parts)


def _beacon(beacon: BeaconPlan) -> str:
    """How long texts are read in a window that stays as it is."""
    drawn = {"random": ", one drawn for each interval", "instance": ", one drawn for each text"}
    ratios = ", ".join(map(str, beacon.ratios))
    policy = str(beacon.train_ratio)
    lines = [
        f"Window     {beacon.window} tokens; texts of up to {beacon.text} are read in intervals of {beacon.interval}",
        f"Beacons    layout {beacon.layout}, " + (f"mask {beacon.mask}, " if beacon.layout == "v1" else "")
        + (f"ratios {ratios}{drawn[policy]}" if policy in drawn else f"ratio {policy} (of {ratios})"),
    ]  # fmt: skip
    if beacon.refused is None and beacon.intervals and beacon.fewest is not None and beacon.most is not None:
        held = f"{beacon.fewest:,}"
        if beacon.most != beacon.fewest:
            held += f" to {beacon.most:,}"
        lines += [
            f"           at the end of {beacon.text} tokens {beacon.intervals} intervals stand condensed in {held} "
            "beacons,",
            f"           and {beacon.raw:,} tokens raw; no position passes {beacon.farthest:,}, and the window ends at "
            f"{beacon.window - 1:,}",
        ]
    if not beacon.intervals:
        reading = "so short a text is read as by the base"
    elif beacon.ratio != "adapt":
        reading = f"ratio {beacon.ratio} {'holds' if beacon.reading else 'does not hold'} {beacon.text} tokens"
    elif beacon.reading:
        reading = f"`adapt` takes ratio {beacon.reading} for {beacon.text} tokens"
    else:
        reading = f"`adapt` has no ratio for {beacon.text} tokens"
    longest = f"{max(beacon.readable, 0):,} tokens are the most"
    if beacon.ratio == "adapt":
        longest += f", with room for {beacon.headroom:,} more"
    lines.append(f"Reading    {reading}; {longest}")
    return "\n".join(lines)


def _sampler(plan: Plan) -> str:
    settings = plan.inputs.settings
    if settings is None or settings.sampler == "none":
        return "plain positions"
    chunks = "" if settings.sampler in ("randpos", "cream", "sentences") else f", {settings.chunks} chunks"
    plain = f", {settings.unskipped_ratio:.0%} of the rows plain" if settings.unskipped_ratio else ""
    return f"sampler {settings.sampler}{chunks}{plain}"


def _steps(plan: Plan) -> str:
    run, inputs = plan.inputs.run, plan.inputs
    rows = f"{run.rows} rows × {inputs.accumulate} × {run.gpus} GPU{'s' if run.gpus != 1 else ''}"
    step = plan.rows_of_step * plan.window
    lines = [f"Step       {plan.rows_of_step} rows ({rows}), up to {step:,} tokens"]
    if plan.rows and inputs.steps:
        lines.append(f"In all     {inputs.steps} steps, {plan.rows:,} rows, up to {step * inputs.steps:,} tokens")
        if plan.target and plan.target > plan.window:
            lines.append(
                f"           full-length rows would be {plan.rows * plan.target:,} tokens, "
                f"{plan.target / plan.window:g} times as many"
            )
    else:
        lines.append("In all     not known here: --steps, or --rows of the data set")
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    run, used = plan.inputs.run, plan.memory
    how = _METHODS[run.method]
    sharded = {0: "", 1: ", ZeRO-1", 2: ", ZeRO-2", 3: ", ZeRO-3 or FSDP"}[run.stage]
    kept = ", gradient checkpointing" if run.checkpointing else ""
    lines = [
        f"Memory on each GPU, reckoned ({how}{sharded}{kept}); {used.trained_parameters:,} of "
        f"{plan.model.total:,} parameters are trained"
    ]
    for name, value in used.parts().items():
        if value:
            lines.append(f"  {_NAMES[name]:<32} {_gib(value)}")
    lines.append(f"  {'together':<32} {_gib(used.total)}" + (
        f"  of {plan.gpu_bytes / 2**30:g} GiB" if plan.gpu_bytes else ""))  # fmt: skip
    if plan.memory_full_length and plan.target and plan.target > plan.window:
        lines.append(f"  {f'full-length rows of {plan.target}':<32} {_gib(plan.memory_full_length.total)}")
    lines.append("  CUDA itself takes about 1 GiB more, and what the allocator cannot use")
    return "\n".join(lines)


_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "gathered": "weights gathered while they work",
}


def _coverage(plan: Plan) -> str:
    settings = plan.inputs.settings
    about = " (borders as often as usual)" if settings and settings.sampler in ("turns", "sentences") else ""
    known = plan.rows is not None
    lines = [f"Distances between two tokens{about}: chance that a row holds one, and rows that will have"]
    rows = [("distance", "chance", "rarest", *(("rows", "rarest") if known else ()))]
    for each in plan.buckets:
        cells = [f"{each.first}–{each.last}", f"{each.chance:.3f}", f"{each.rarest:.3f}"]
        if each.rows is not None and each.rows_rarest is not None:
            cells += [f"{each.rows:,.0f}", f"{each.rows_rarest:,.0f}"]
        rows.append(tuple(cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _gib(value: float) -> str:
    return f"{value / 2**30:9.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:9.2f} MiB"


_SHORT = {"gathered": "gathered weights"}


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Rows that hold each distance (or chances, where the steps are not known) and memory by part.

    Returns:
        the file written.

    Raises:
        PoSEError: nothing to draw, an unknown ending, or matplotlib is missing.
    """
    from pose_plugin.evaluation.figures import COLOURS, STYLE, require_matplotlib, tokens

    path = Path(path)
    check_ending(path)
    require_settings(plan)
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert plan.seen is not None and plan.target is not None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 2.9), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=[1.8, 1])
        values = plan.seen.after(plan.rows) if plan.rows else plan.seen.probability
        left.plot(np.arange(1, plan.target), values[1:], color=COLOURS[0], linewidth=1.3)
        left.axvspan(0, plan.window, color="#f0f0f0", linewidth=0, zorder=0)
        above: dict[str, Any] = {"va": "bottom", "fontsize": 7.5, "color": "#666666"}
        above["transform"] = left.get_xaxis_transform()
        left.text(plan.window, 1.01, f"trained {tokens(plan.window)}", ha="center", **above)
        left.text(plan.target, 1.01, f"target {tokens(plan.target)}", ha="right", **above)
        left.set_xlim(0, plan.target)
        if plan.rows:
            left.set_yscale("symlog", linthresh=1)
            left.set_ylim(0, plan.rows * 2)
        else:
            left.set_ylim(0, 1.04)
        ticks = [plan.target * i // 4 for i in range(5)]
        left.set_xticks(ticks, [tokens(t) if t else "0" for t in ticks])
        left.grid(True, axis="y")
        left.set_xlabel("distance between two tokens")
        left.set_ylabel(f"rows of {plan.rows:,} that hold it" if plan.rows else "chance that a row holds it")
        _bars(right, plan)
        figure.savefig(path)
    return path


def _bars(axes: Any, plan: Plan) -> None:
    from pose_plugin.evaluation.figures import COLOURS

    wholes = [("this run", plan.memory)]
    if plan.memory_full_length and plan.target and plan.target > plan.window:
        wholes.append(("full-length", plan.memory_full_length))
    beneath = [0.0] * len(wholes)
    for i, name in enumerate(plan.memory.parts()):
        values = [memory.parts()[name] / 2**30 for _, memory in wholes]
        if any(values):
            axes.bar(
                range(len(wholes)), values, 0.55, beneath, color=COLOURS[i % len(COLOURS)], label=_SHORT.get(name, name)
            )
            beneath = [a + b for a, b in zip(beneath, values, strict=True)]
    if plan.gpu_bytes:
        axes.axhline(plan.gpu_bytes / 2**30, color="#444444", linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_xlim(-0.6, len(wholes) - 0.4)
    axes.set_xticks(range(len(wholes)), [name for name, _ in wholes])
    axes.set_ylabel("GiB on each GPU, reckoned")
    axes.grid(True, axis="y")
    axes.legend(frameon=False, fontsize=7)
