"""The pictures of a report, drawn as for print. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.measures import MEASURES
from pose_plugin.evaluation.results import Report, Row
from pose_plugin.utils.plots import COLOURS, new_figure, tokens

# Distinct in black and white too.
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Picture:
    """A figure of a report.

    Attributes:
        png: the file for model cards; `svg` is next to it, for print and for the web page.
        measure: name of the measure.
        caption: what it shows, in sentences.
    """

    png: Path
    measure: str
    caption: str

    @property
    def svg(self) -> Path:
        return self.png.with_suffix(".svg")


def draw(report: Report, folder: Path) -> list[Picture]:
    """Draw a picture of each measure and kind: a line per model over the lengths, a heat map over lengths and depths.

    A heat map takes the place of the lines if there are several kinds.

    Returns:
        the pictures, e.g. passkey.png, passkey_depth.png, perplexity.png, needle_single.png, each also as SVG.

    Raises:
        PoSEError: matplotlib is missing.
    """
    written = []
    for name in report.measures:
        measure = MEASURES[name]
        if measure.comparison or measure.chosen_by:
            # One length, or lm-eval's own figures: a table says it all.
            continue
        results = [(i, m.name, m.results[name]) for i, m in enumerate(report.models) if name in m.results]
        kinds = list(dict.fromkeys(kind for _, _, result in results for kind in result.kinds))
        for kind in kinds:
            own = [(i, who, result) for i, who, result in results if kind in result.kinds]
            cells = [(who, result.by_depth(kind)) for _, who, result in own]
            deep = any(by_depth for _, by_depth in cells)
            if not deep or len(kinds) == 1:
                path = folder / (f"{name}.png" if len(kinds) == 1 else f"{name}_{kind}.png")
                series = [(i, who, r.by_length(kind)) for i, who, r in own]
                lines(report, path, measure, series)
                rows = [row for _, _, found in series for row in found.values()]
                written.append(Picture(path, name, line_caption(report, measure, kind, rows)))
            if deep:
                path = folder / f"{name}_{kind or 'depth'}.png"
                heat_map(report, path, measure, cells)
                rows = [row for _, found in cells for row in found.values()]
                written.append(Picture(path, name, heat_map_caption(report, measure, kind, rows)))
    return written


def line_caption(report: Report, measure: type[Measure], kind: str, rows: list[Row]) -> str:
    """Return what a picture of `lines` shows: the axes, the points, the bars and the marks."""
    said = [f"{_subject(measure, kind)} by {_plain(measure.x_label)}."]
    if measure.higher_is_better:
        said.append(f"A point is {_mean(rows)}. Its bar is the 95 % interval of Wilson (1927).")
        if len(report.models) > 1:
            said.append("The points of different models are moved apart a little, so that none hides another.")
    else:
        said.append("Lower is better.")
    trained, target = _marks(report, {row.length for row in rows})
    if trained:
        said.append(f"The grey area is the trained window, {trained} tokens.")
    if target:
        said.append(f"The dashed line is the target window, {target} tokens.")
    return " ".join(said)


def heat_map_caption(report: Report, measure: type[Measure], kind: str, rows: list[Row]) -> str:
    """Return what a picture of `heat_map` shows: the axes, the cells and the marks."""
    said = [
        f"{_subject(measure, kind)} in per cent, by {_plain(measure.x_label)} and {measure.depth_label}.",
        f"0 % is the start of the prompt. A cell is {_mean(rows)}; grey ones were not measured.",
    ]
    if report.train_length:
        said.append(f"Left of the solid line: within the trained window, {report.train_length} tokens.")
    if report.target_length:
        said.append(f"Left of the dashed line: within the target window, {report.target_length} tokens.")
    return " ".join(said)


def _subject(measure: type[Measure], kind: str) -> str:
    label = _plain(measure.label)
    return f"{label[0].upper()}{label[1:]}{f' ({kind})' if kind else ''}"


def _plain(label: str) -> str:
    """Return the label of an axis without its unit or scale in brackets."""
    return label.partition(" (")[0]


def _marks(report: Report, lengths: Iterable[int]) -> tuple[int | None, int | None]:
    """Return the trained and the target window, each None if an axis over the lengths does not reach it."""
    left, right = _limits(lengths)
    trained, target = report.train_length or 0, report.target_length or 0
    return trained if trained > left else None, target if left < target < right else None


def _limits(lengths: Iterable[int]) -> tuple[float, float]:
    ordered = sorted(lengths)
    return ordered[0] / 1.25, ordered[-1] * 1.25


def _mean(rows: Iterable[Row]) -> str:
    counts = sorted({row.n for row in rows})
    if counts == [1]:
        return "one answer"
    return f"the mean of {' to '.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} answers"


def lines(report: Report, path: Path, measure: type[Measure], series: list[tuple[int, str, dict[int, Row]]]) -> None:
    """Draw one line per model; for shares the bars are Wilson's 95 % intervals.

    Args:
        report: for the windows to mark.
        series: (number of the model, its name, rows by length) of each model.
    """
    with _figure(path) as (_, axes):
        for rank, (i, name, rows) in enumerate(series):
            if measure.higher_is_better:
                # Lines at 0 and at 100 % would hide each other: moved apart by a hair, the same for all lengths.
                nudge = 2 ** (0.05 * (rank - (len(series) - 1) / 2))
                y = [100 * row.score for row in rows.values()]
                # At 0 and 100 % rounding would leave a negative bar.
                below = [max(0, 100 * (row.score - row.interval[0])) for row in rows.values()]
                above = [max(0, 100 * (row.interval[1] - row.score)) for row in rows.values()]
                x = [length * nudge for length in rows]
                axes.errorbar(x, y, yerr=[below, above], label=_label(name), elinewidth=0.8, capsize=0, **_look(i))
            else:
                y = [row.score if math.isfinite(row.score) else math.nan for row in rows.values()]
                axes.plot(list(rows), y, label=_label(name), **_look(i))
        if measure.higher_is_better:
            axes.set_ylim(-4, 104)
            axes.set_yticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
        if measure.log_scale:
            _log_axis(axes, [row.score for _, _, rows in series for row in rows.values()])
        _length_axis(axes, sorted({n for _, _, rows in series for n in rows}), report)
        axes.set_ylabel(measure.label)
        axes.set_xlabel(measure.x_label)
        _legend(axes, [name for _, name, _ in series])


def _log_axis(axes: Any, values: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    finite = [value for value in values if math.isfinite(value)] or [1.0, 10.0]
    low, high = min(finite), max(finite)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.25)
    # Over few decades the powers of ten alone would leave one label or none.
    subs: Any = range(1, 10) if high / low < 4 else (1, 2, 3, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def heat_map(
    report: Report, path: Path, measure: type[Measure], measured: list[tuple[str, dict[tuple[int, float], Row]]]
) -> None:
    """Draw one panel per model: depth by length, the score in per cent as colour and number.

    Args:
        report: for the windows to mark.
        measured: (name, rows by (length, depth)) of each model.
    """
    lengths = sorted({n for _, cells in measured for n, _ in cells})
    depths = sorted({depth for _, cells in measured for _, depth in cells})
    # In rows of three or four, depending on which leaves fewer gaps.
    columns = len(measured) if len(measured) <= 4 else min((3, 4), key=lambda n: -len(measured) % n)
    rows = math.ceil(len(measured) / columns)
    width, height = max(1.2, 0.36 * len(lengths)), max(1.0, 0.2 * len(depths))
    size = ((width + 0.25) * columns + 1.3, (height + 0.55) * rows + 0.35)
    with _figure(path, size, rows, columns, grid=True) as (figure, grid):
        image = None
        for axes, (name, cells) in zip(grid, measured, strict=False):
            values = [
                [100 * cells[n, depth].score if (n, depth) in cells else math.nan for n in lengths] for depth in depths
            ]
            image = axes.imshow(values, aspect="auto", cmap="YlGnBu", vmin=0, vmax=100)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    if value == value:
                        look = {"color": "white" if value > 55 else "#333333", "fontsize": 6}
                        axes.text(column, row, f"{value:.0f}", ha="center", va="center", **look)
            axes.set_title(_label(name), pad=12 if report.train_length or report.target_length else 4)
            axes.set_xticks(range(len(lengths)), [tokens(n) for n in lengths])
            axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
            axes.set_facecolor("#eeeeee")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            _mark_columns(axes, lengths, report)
        for axes in grid[len(measured) :]:
            axes.set_visible(False)
        for i, axes in enumerate(grid):
            axes.set_ylabel(measure.depth_label if i % columns == 0 else "")
            axes.tick_params(labelleft=i % columns == 0)
        for axes in grid[max(0, len(measured) - columns) : len(measured)]:
            axes.set_xlabel(measure.x_label)
        bar = figure.colorbar(image, ax=grid, shrink=0.95, aspect=14 * rows, pad=0.015)
        bar.set_label(f"{measure.label} (%)")
        bar.outline.set_visible(False)


@contextmanager
def _figure(
    path: Path, size: tuple[float, float] = (4.8, 2.9), rows: int = 1, columns: int = 1, grid: bool = False
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes (one, or with `grid` a list), written at the end as PNG and SVG."""
    with new_figure(path, size, path.with_suffix(".svg")) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, (list(axes.flat) if grid else axes[0][0])


def _label(name: str) -> str:
    """Return a model's name as matplotlib shows it: not as a formula, and in the legend if it begins with _."""
    escaped = name.replace("$", r"\$")
    return f"\u200b{escaped}" if name.startswith("_") else escaped


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
    left, right = _limits(lengths)
    axes.set_xlim(left, right)
    trained, target = _marks(report, lengths)
    axes.grid(True, axis="y")
    above = {"transform": axes.get_xaxis_transform(), "va": "bottom", "fontsize": 7.5, "color": "#666666"}
    if trained:
        end = min(trained, right)
        axes.axvspan(left, end, color="#f0f0f0", linewidth=0, zorder=0)
        axes.axvline(end, color="#999999", linewidth=0.8, zorder=0)
        axes.text(end, 1.01, f"trained {tokens(trained)}", ha="center", **above)
    if target:
        axes.axvline(target, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.text(target, 1.01, f"target {tokens(target)}", ha="center", **above)


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
