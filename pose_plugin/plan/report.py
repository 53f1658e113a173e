"""Show a plan: as text for the terminal, and as a picture. matplotlib is imported only when a picture is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.plan.advice import FEW_ROWS, rows_needed
from pose_plugin.plan.beacon import BeaconPlan
from pose_plugin.plan.types import Plan
from pose_plugin.positions import make_sampler
from pose_plugin.rope.plan import RopePlan
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.plots import COLOURS, check_ending, new_figure, tokens
from pose_plugin.utils.tables import counted

_METHODS = {
    "full": "all weights",
    "lora": "LoRA",
    "qlora": "QLoRA, 4 bits",
    "8bit": "LoRA on 8-bit weights",
    "beacon": "Activation Beacon",
}
_SHARDING = {0: "", 1: ", ZeRO-1", 2: ", ZeRO-2", 3: ", ZeRO-3 or FSDP"}
# Long and short name of each part of the memory that is not named as in `Memory`.
_GATHERED = {"gathered": ("weights gathered to compute", "gathered weights")}


def text(plan: Plan) -> str:
    """Return the whole plan for the terminal, section by section."""
    parts = [f"Plan for {plan.inputs.base}\n"]
    if plan.beacon is not None:
        parts.append(_beacons(plan.beacon))
    elif plan.inputs.beacon is not None:
        parts.append(f"Window     that of the base; texts of up to {plan.window} tokens are read in intervals")
    elif plan.target is None:
        parts.append(f"Window     {plan.window} tokens; nothing is extended")
    else:
        parts.append(f"Window     trained: {plan.window} tokens, target: {plan.target} ({_sampler(plan)})")
    if plan.rope is not None:
        parts.append(f"RoPE       before: {plan.rope.before}\n           after:  {plan.rope.after}")
        facts = [str(each) for each in plan.rope.findings if each.severity == "info"]
        parts += [f"           {note}" for note in (*plan.rope.notes, *facts)]
        parts.append(_layers(plan.rope))
    parts += [_steps(plan), *_needed(plan)]
    parts.append("\n" + _memory(plan))
    if plan.buckets:
        parts.append("\n" + _coverage(plan))
    parts += [f"\nNote: {note}" for note in plan.notes]
    parts += [f"\nWarning: {warning}" for warning in plan.warnings]
    return "\n".join(parts)


def _layers(rope: RopePlan) -> str:
    """Return the reach table: what each kind of layers sees, and what the extension changes there."""
    stretched = rope.type != "none" and not rope.fixed
    rows = [
        (
            f"{each.layers} × {each.name}",
            each.frequencies or "none",
            each.span,
            each.change(rope.original_length, stretched),
        )
        for each in rope.reach
    ]
    table = [("layers", "rope", "sees", "what an extension changes"), *rows]
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in table]
    return "\n".join(f"{'Layers' if i == 0 else '':<10} {line}" for i, line in enumerate(lines))


def _beacons(beacon: BeaconPlan) -> str:
    """Return how long texts are read."""
    drawn = {"random": ", one drawn per interval", "instance": ", one drawn per text"}
    ratios = ", ".join(map(str, beacon.ratios))
    policy = str(beacon.train_ratio)
    mask = f"mask {beacon.mask}, " if beacon.layout == "v1" else ""
    ratio = f"ratios {ratios}{drawn[policy]}" if policy in drawn else f"ratio {policy} (of {ratios})"
    lines = [
        f"Window     {beacon.window} tokens; texts of up to {beacon.text} are read in intervals of {beacon.interval}",
        f"Beacons    layout {beacon.layout}, {mask}{ratio}",
    ]
    if beacon.intervals and beacon.fewest is not None and beacon.most is not None:
        held = f"{beacon.fewest:,}" + (f" to {beacon.most:,}" if beacon.most != beacon.fewest else "")
        lines.append(
            f"           {beacon.text} tokens end as {held} beacons for {beacon.intervals} intervals, and "
            f"{beacon.raw:,} raw tokens"
        )
    if beacon.reading == 0:
        reading = "a text this short is read as by the base"
    elif beacon.ratio != "adapt":
        reading = f"ratio {beacon.ratio} {'fits' if beacon.reading else 'does not fit'} {beacon.text} tokens"
    elif beacon.reading:
        reading = f"`adapt` takes ratio {beacon.reading} for {beacon.text} tokens"
    else:
        reading = f"`adapt` has no ratio for {beacon.text} tokens"
    more = f", with room for {beacon.headroom:,} more" if beacon.ratio == "adapt" else ""
    lines.append(f"Reading    {reading}; the longest text is {max(beacon.readable, 0):,} tokens{more}")
    return "\n".join(lines)


def _sampler(plan: Plan) -> str:
    settings = plan.inputs.settings
    if settings is None or not make_sampler(settings).skips:
        return "plain positions"
    chunks = f", {counted(settings.chunks, 'chunk')}" if "chunks" in make_sampler(settings).options() else ""
    plain = f", {settings.unskipped_ratio:.0%} of the rows plain" if settings.unskipped_ratio else ""
    return f"sampler {settings.sampler}{chunks}{plain}"


def _steps(plan: Plan) -> str:
    """Return rows and tokens, of a step and of the training."""
    run, inputs = plan.inputs.run, plan.inputs
    gpus = counted(run.gpus, "GPU")
    if run.gpus_of_a_row > 1:
        gpus = f"{counted(run.groups, 'group')} of {run.gpus_of_a_row} GPUs"
    rows = f"{counted(run.rows, 'row')} × {inputs.accumulate} × {gpus}"
    step = plan.rows_of_step * plan.window
    lines = [f"Step       {counted(plan.rows_of_step, 'row')} ({rows}), up to {step:,} tokens"]
    if not plan.rows or not inputs.steps:
        return "\n".join([*lines, "In all     not known here: give --steps, or --rows of the data set"])
    rows = counted(plan.rows, "row", ",")
    lines.append(f"In all     {counted(inputs.steps, 'step')}, {rows}, up to {plan.tokens:,} tokens")
    if plan.target and plan.shorter:
        lines.append(
            f"           full-length rows would be {plan.rows * plan.target:,} tokens, "
            f"{plan.target / plan.window:g} times as many"
        )
    if plan.hours is not None:
        lines.append(f"Time       {_hours(plan.hours)} at {plan.tokens_per_second:g} tokens per second on each GPU")
        if plan.hours_full_length is not None and plan.shorter:
            lines.append(
                f"           full-length rows would take {_hours(plan.hours_full_length)}: each of their tokens is "
                f"{plan.more_work:.3g} times the work"
            )
    return "\n".join(lines)


def _needed(plan: Plan) -> list[str]:
    """Return the line with the rows that the stretch needs, unless nothing skips."""
    if plan.seen is None or not plan.skips:
        return []
    needed = rows_needed(plan)
    if needed is None:
        return [f"Needed     not known here: {plan.seen.draws} simulated rows lack some distances; give more --draws"]
    return [f"Needed     {needed:,} rows, so that the rarest trained distances are in {FEW_ROWS} each, a rule of thumb"]


def _memory(plan: Plan) -> str:
    """Return the estimated memory by part."""
    run, used = plan.inputs.run, plan.memory
    checkpointing = ", gradient checkpointing" if run.checkpointing else ""
    lines = [
        f"Estimated memory on each GPU ({_METHODS[run.method]}{_SHARDING[run.stage]}{checkpointing}); "
        f"{used.trained_parameters:,} of {plan.model.total:,} parameters are trained"
    ]
    rows = [(_GATHERED.get(name, (name,))[0], _gib(value)) for name, value in used.parts().items() if value]
    limit = f"  of {plan.gpu_bytes / 2**30:g} GiB" if plan.gpu_bytes else ""
    rows.append(("together", _gib(used.total) + limit))
    if plan.memory_full_length and plan.shorter:
        rows.append((f"full-length rows of {plan.target}", _gib(plan.memory_full_length.total)))
    lines += [f"  {name:<32} {value}" for name, value in rows]
    lines.append("  CUDA takes about 1 GiB more, and the allocator leaves some memory unused")
    return "\n".join(lines)


def _coverage(plan: Plan) -> str:
    """Return the table of distances."""
    settings = plan.inputs.settings
    about = " (with borders as often as usual)" if settings and make_sampler(settings).border_finder else ""
    lines = [f"Distances between two tokens{about}: chance that a row holds one, and rows of the run that will"]
    table = [("distance", "mean chance", "least", *(("mean rows", "least") if plan.rows else ()))]
    for each in plan.buckets:
        cells = [f"{each.first}–{each.last}", f"{each.chance:.3f}", f"{each.rarest:.3f}"]
        if each.rows is not None and each.rows_rarest is not None:
            cells += [f"{each.rows:,.0f}", f"{each.rows_rarest:,.0f}"]
        table.append(tuple(cells))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines)


def _hours(value: float) -> str:
    return f"{value:,.0f} hours" if value >= 10 else f"{value:.1f} hours"


def _gib(value: float) -> str:
    return f"{value / 2**30:9.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:9.2f} MiB"


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw the rows that hold each distance (or chances, if the steps are not known) and memory by part.

    Returns:
        the file written.

    Raises:
        PoSEError: there is nothing to draw, the ending is unknown, or matplotlib is missing.
    """
    path = Path(path)
    check_ending(path)
    if plan.seen is None or plan.target is None:
        raise PoSEError(
            "--output draws the coverage by distance, and this run has none: no `pose:` block, a target too long to "
            "simulate, or adapter: beacon, which skips no distances. Leave --output out"
        )
    with new_figure(path, (7.4, 2.9)) as figure:
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
            # Linear up to one row, so that distances in no row can be seen.
            left.set_yscale("symlog", linthresh=1)
            left.set_ylim(0, plan.rows * 2)
        else:
            left.set_ylim(0, 1.04)
        ticks = [plan.target * i // 4 for i in range(5)]
        left.set_xticks(ticks, [tokens(t) if t else "0" for t in ticks])
        left.grid(True, axis="y")
        left.set_xlabel("distance between two tokens")
        left.set_ylabel(f"rows of {plan.rows:,} that hold it" if plan.rows else "chance that a row holds it")
        _draw_memory(right, plan)
    return path


def _draw_memory(axes: Any, plan: Plan) -> None:
    """Draw stacked bars of the memory of this run and of full-length rows."""
    bars = [("this run", plan.memory)]
    if plan.memory_full_length and plan.shorter:
        bars.append(("full-length", plan.memory_full_length))
    beneath = [0.0] * len(bars)
    for i, name in enumerate(plan.memory.parts()):
        values = [memory.parts()[name] / 2**30 for _, memory in bars]
        if any(values):
            label = _GATHERED.get(name, (name,))[-1]
            axes.bar(range(len(bars)), values, 0.55, beneath, color=COLOURS[i % len(COLOURS)], label=label)
            beneath = [a + b for a, b in zip(beneath, values, strict=True)]
    if plan.gpu_bytes:
        axes.axhline(plan.gpu_bytes / 2**30, color="#444444", linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylabel("estimated GiB on each GPU")
    axes.grid(True, axis="y")
    axes.legend(frameon=False, fontsize=7)
