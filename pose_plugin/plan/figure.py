"""A plan as a picture: distances on the left, memory on the right. matplotlib is imported when it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.plan.plan import require_settings
from pose_plugin.plan.types import Plan
from pose_plugin.utils.plots import COLOURS, STYLE, check_ending, require_matplotlib, tokens

_SHORT = {"gathered": "gathered weights"}


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Rows that hold each distance (or chances, where the steps are not known) and memory by part.

    Returns:
        the file written.

    Raises:
        PoSEError: nothing to draw, an unknown ending, or matplotlib is missing.
    """

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
