"""The pictures of a report, drawn as for print: matplotlib is imported when the first one is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.results import Report
from pose_plugin.utils.plots import COLOURS, STYLE, require_matplotlib, tokens

# Told apart in black and white too.
MARKERS = "osD^vPX*"


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws what there are results for: passkey.png, passkey_depth.png, perplexity.png, needle_single.png, …

    Returns:
        the files written.

    Raises:
        PoSEError: matplotlib is missing.
    """
    written = []
    if any(model.passkey for model in report.models):
        written += [passkey_by_length(report, folder / "passkey.png")]
        written += [passkey_by_depth(report, folder / "passkey_depth.png")]
    if any(model.perplexity for model in report.models):
        written += [perplexity_by_length(report, folder / "perplexity.png")]
    models = list(enumerate(report.models))
    for kind in dict.fromkeys(kind for m in report.models if m.needle for kind in m.needle.kinds):
        written.append(needle_heat_map(report, folder / f"needle_{kind}.png", kind))
    shared = {
        "topics": [(i, m.name, m.topics.by_length("first")) for i, m in models if m.topics],
        "longppl": [
            (i, m.name, {n: w.longppl for n, w in m.longppl.by_length.items()}) for i, m in models if m.longppl
        ],
        "gap": [(i, m.name, {n: p.loss for n, p in m.gap.by_length.items()}) for i, m in models if m.gap],
    }
    labels = {
        "topics": ("first topics found", "prompt length (tokens)"),
        "longppl": ("LongPPL", "window size (tokens)"),
        "gap": ("loss of the moved tokens (nats)", "farthest position"),
    }
    for name, series in shared.items():
        if series:
            written.append(
                lines_by_length(report, folder / f"{name}.png", series, *labels[name], share=name == "topics")
            )
    return written


def passkey_by_length(report: Report, path: Path) -> Path:
    """Share of keys found by prompt length, one line a model; bars are Wilson's 95 % intervals."""
    with _figure(path) as (_, axes):
        measured = [(i, m.name, m.passkey) for i, m in enumerate(report.models) if m.passkey]
        for rank, (i, name, result) in enumerate(measured):
            # Lines at 0 and at 100 % would hide each other: moved apart by a hair, the same for all lengths.
            nudge = 2 ** (0.05 * (rank - (len(measured) - 1) / 2))
            x = [length * nudge for length in result.by_length]
            y = [100 * a.value for a in result.by_length.values()]
            # At 0 and 100 % rounding would leave a negative bar.
            below = [max(0, 100 * (a.value - a.interval[0])) for a in result.by_length.values()]
            above = [max(0, 100 * (a.interval[1] - a.value)) for a in result.by_length.values()]
            axes.errorbar(x, y, yerr=[below, above], label=name, elinewidth=0.8, capsize=0, **_look(i))
        _length_axis(axes, sorted({n for _, _, r in measured for n in r.lengths}), report)
        axes.set_ylim(-4, 104)
        axes.set_yticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
        axes.set_ylabel("passkeys found")
        axes.set_xlabel("prompt length (tokens)")
        _legend(axes, [name for _, name, _ in measured])
    return path


def perplexity_by_length(report: Report, path: Path) -> Path:
    """Perplexity by window size, one line a model, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with _figure(path) as (_, axes):
        measured = [(i, m.name, m.perplexity) for i, m in enumerate(report.models) if m.perplexity]
        values = []
        for i, name, result in measured:
            y = [w.perplexity if math.isfinite(w.perplexity) else math.nan for w in result.by_length.values()]
            values += [v for v in y if v == v]
            axes.plot(list(result.by_length), y, label=name, **_look(i))
        axes.set_yscale("log")
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        axes.set_ylim(low / 1.25, high * 1.25)
        # Over few decades the powers of ten alone would leave one label or none.
        subs: Any = range(1, 10) if high / low < 4 else (1, 2, 3, 5) if high / low < 100 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        _length_axis(axes, sorted({n for _, _, r in measured for n in r.by_length}), report)
        axes.set_ylabel("perplexity (log scale)")
        axes.set_xlabel("window size (tokens)")
        _legend(axes, [name for _, name, _ in measured])
    return path


def passkey_by_depth(report: Report, path: Path) -> Path:
    """One panel a model: depth by length, the share of keys found as colour and number."""
    measured = [
        (m.name, {cell: 100 * a.value for cell, a in m.passkey.by_depth.items()}) for m in report.models if m.passkey
    ]
    return heat_map(report, path, measured, "depth of the key", "passkeys found (%)")


def needle_heat_map(report: Report, path: Path, kind: str) -> Path:
    """One panel a model: depth by length, the mean score as colour and number, the trained window marked."""
    measured = [
        (m.name, {cell: 100 * value for cell, value in m.needle.cells(kind).items()})
        for m in report.models
        if m.needle and kind in m.needle.kinds
    ]
    label = {"single": "needles found (%)", "multi": "numbers found (%)", "kv": "values found (%)"}
    return heat_map(report, path, measured, "depth of the needle", label.get(kind, "score (%)"))


def heat_map(
    report: Report, path: Path, measured: list[tuple[str, dict[tuple[int, float], float]]], depth_label: str, label: str
) -> Path:
    """One panel a model.

    Args:
        measured: (name, {(length, depth): 0…100}) of each model.
        depth_label: of the vertical axis.
        label: of the colours.
    """
    lengths = sorted({n for _, cells in measured for n, _ in cells})
    depths = sorted({depth for _, cells in measured for _, depth in cells})
    # In rows of three or four, whichever leaves fewer gaps.
    columns = len(measured) if len(measured) <= 4 else min((3, 4), key=lambda n: -len(measured) % n)
    rows = math.ceil(len(measured) / columns)
    width, height = max(1.2, 0.36 * len(lengths)), max(1.0, 0.2 * len(depths))
    size = ((width + 0.25) * columns + 1.3, (height + 0.55) * rows + 0.35)
    with _figure(path, size, rows, columns, grid=True) as (figure, grid):
        image = None
        for axes, (name, cells) in zip(grid, measured, strict=False):
            values = [[cells.get((n, depth), math.nan) for n in lengths] for depth in depths]
            image = axes.imshow(values, aspect="auto", cmap="YlGnBu", vmin=0, vmax=100)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    if value == value:
                        look = {"color": "white" if value > 55 else "#333333", "fontsize": 6}
                        axes.text(column, row, f"{value:.0f}", ha="center", va="center", **look)
            axes.set_title(name, pad=12 if report.train_length or report.target_length else 4)
            axes.set_xticks(range(len(lengths)), [tokens(n) for n in lengths])
            axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
            axes.set_facecolor("#eeeeee")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            _mark_columns(axes, lengths, report)
        for axes in grid[len(measured) :]:
            axes.set_visible(False)
        for i, axes in enumerate(grid):
            axes.set_ylabel(depth_label if i % columns == 0 else "")
            axes.tick_params(labelleft=i % columns == 0)
        for axes in grid[max(0, len(measured) - columns) : len(measured)]:
            axes.set_xlabel("prompt length (tokens)")
        bar = figure.colorbar(image, ax=grid, shrink=0.95, aspect=14 * rows, pad=0.015)
        bar.set_label(label)
        bar.outline.set_visible(False)
    return path


def lines_by_length(
    report: Report, path: Path, series: list[tuple[int, str, dict[int, float]]], y: str, x: str, share: bool = False
) -> Path:
    """One line a model.

    Args:
        series: (number of the model, its name, {length: value}).
        y: label of the vertical axis.
        x: label of the horizontal one.
        share: whether values are shares of 1, shown in per cent from 0 to 100.
    """
    with _figure(path) as (_, axes):
        for i, name, values in series:
            axes.plot(list(values), [100 * v if share else v for v in values.values()], label=name, **_look(i))
        _length_axis(axes, sorted({n for _, _, values in series for n in values}), report)
        if share:
            axes.set_ylim(-4, 104)
            axes.set_yticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
        axes.set_ylabel(y)
        axes.set_xlabel(x)
        _legend(axes, [name for _, name, _ in series])
    return path


@contextmanager
def _figure(
    path: Path, size: tuple[float, float] = (4.8, 2.9), rows: int = 1, columns: int = 1, grid: bool = False
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes (one, or with `grid` a list), saved at the end; no global state."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, (list(axes.flat) if grid else axes[0][0])
        figure.savefig(path)


def _look(index: int) -> dict[str, Any]:
    colour = COLOURS[index % len(COLOURS)]
    marker = MARKERS[index % len(MARKERS)]
    return {"color": colour, "marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.7}


def _length_axis(axes: Any, lengths: list[int], report: Report) -> None:
    """A logarithmic axis with the measured lengths as ticks, the trained window shaded, the target marked."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [tokens(n) for n in lengths])
    left, right = lengths[0] / 1.25, lengths[-1] * 1.25
    axes.set_xlim(left, right)
    axes.grid(True, axis="y")
    above = {"transform": axes.get_xaxis_transform(), "va": "bottom", "fontsize": 7.5, "color": "#666666"}
    if report.train_length and report.train_length > left:
        end = min(report.train_length, right)
        axes.axvspan(left, end, color="#f0f0f0", linewidth=0, zorder=0)
        axes.axvline(end, color="#999999", linewidth=0.8, zorder=0)
        axes.text(end, 1.01, f"trained {tokens(report.train_length)}", ha="center", **above)
    if report.target_length and left < report.target_length < right:
        axes.axvline(report.target_length, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.text(report.target_length, 1.01, f"target {tokens(report.target_length)}", ha="center", **above)


def _mark_columns(axes: Any, lengths: list[int], report: Report) -> None:
    """Lines behind the last column within the trained and within the target window; all columns may be beyond one."""
    for label, window in (("trained", report.train_length), ("target", report.target_length)):
        inside = sum(n <= window for n in lengths) if window else 0
        if inside or (window and label == "trained"):
            line = "-" if label == "trained" else "--"
            axes.axvline(inside - 0.5, color="#D55E00", linewidth=1.2, linestyle=line)
            axes.text(
                inside - 0.5, 1.01, label, ha="center", va="bottom", fontsize=7, color="#D55E00",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip


def _legend(axes: Any, names: list[str]) -> None:
    """Below the axes, in as many columns as the figure is wide: a wider legend would squeeze the axes."""
    columns = max(1, min(len(names), 64 // (max(map(len, names)) + 7)))
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=columns, frameon=False, handlelength=1.8,
        columnspacing=1.4,
    )  # fmt: skip
