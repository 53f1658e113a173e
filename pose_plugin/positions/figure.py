"""Coverage as a figure and as a CSV file. Importing this file does not import matplotlib."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.positions.coverage import Coverage
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.plots import COLOURS, check_ending, new_figure, tokens

# Where two samplers agree, the earlier line shows through the dashes of the later one.
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.2)), "-", (0, (6, 1.5, 1, 1.5)))


def draw_coverage(coverages: Mapping[str, Coverage], path: str | Path) -> Path:
    """Draw the chance by distance, one line per sampler, as in Figure 5 of the PoSE paper (arXiv 2309.10400).

    Args:
        coverages: by the name in the legend; their targets may differ.
        path: the file to write; its ending selects the format (.png, .svg, .pdf).

    Returns:
        the path.

    Raises:
        PoSEError: nothing to draw, an unknown ending, or matplotlib is missing.
    """
    if not coverages:
        raise PoSEError("draw_coverage: coverages is empty; give at least one, e.g. {'pose': coverage}")
    path = Path(path)
    check_ending(path)
    reach = max(c.settings.target_length for c in coverages.values())
    with new_figure(path, (5.6, 3.1)) as figure:
        axes = figure.subplots()
        for i, (name, seen) in enumerate(coverages.items()):
            distances = np.arange(1, len(seen.probability))
            look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": _DASHES[i % len(_DASHES)]}
            axes.plot(distances, seen.probability[1:], label=name, linewidth=1.4, **look)
        above: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "va": "bottom",
            "fontsize": 7.5,
            "color": "#666666",
        }
        windows = {c.settings.train_length for c in coverages.values()} - {None}
        if len(windows) == 1 and (window := windows.pop()) is not None:
            axes.axvspan(0, window, color="#f0f0f0", linewidth=0, zorder=0)
            axes.axvline(window, color="#999999", linewidth=0.8, zorder=0)
            axes.text(window, 1.01, f"trained {tokens(window)}", ha="center", **above)
        axes.text(reach, 1.01, f"target {tokens(reach)}", ha="right", **above)
        axes.set_xlim(0, reach)
        axes.set_ylim(0, 1.04)
        ticks = [reach * i // 8 for i in range(9)]
        axes.set_xticks(ticks, [tokens(t) if t else "0" for t in ticks])
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0", "20 %", "40 %", "60 %", "80 %", "100 %"])
        axes.grid(True, axis="y")
        axes.set_xlabel("distance between two tokens")
        axes.set_ylabel("training rows that hold it")
        columns = min(3, len(coverages))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=2.6)
    return path


def write_coverage(coverages: Mapping[str, Coverage], path: str | Path, rows: int | None = None) -> Path:
    """Write the same as CSV: one line per distance, one column per sampler.

    Args:
        coverages: by the name of the column.
        path: the file to write.
        rows: rows of the training run; adds a column per sampler with the expected rows that hold each distance.

    Returns:
        the path.
    """
    path = Path(path)
    reach = max(len(c.probability) for c in coverages.values())
    names = list(coverages) + ([f"{name}, rows of {rows}" for name in coverages] if rows else [])
    columns = [c.probability for c in coverages.values()]
    columns += [c.after(rows) for c in coverages.values()] if rows else []
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["distance", *names])
        for distance in range(1, reach):
            # Beyond the target of a sampler, its cells stay empty.
            writer.writerow([distance, *(f"{c[distance]:.6g}" if distance < len(c) else "" for c in columns)])
    return path
