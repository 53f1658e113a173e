"""Draws the facts found by distance, with YaRN and with linear interpolation, into docs/figures/recall.png.

    python benchmarks/recall/figure.py

A line is the mean over the seeds, and a small dot one trained model.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
from common import RESULTS, canvas  # noqa: E402
from recall.bands import BANDS, by_band  # noqa: E402
from recall.judge import answers_of  # noqa: E402
from recall.rows import load_rows  # noqa: E402
from recall.run import TITLES  # noqa: E402
from recall.settings import LENGTH  # noqa: E402
from recall.texts import NEAR  # noqa: E402

from pose_plugin.utils.plots import COLOURS  # noqa: E402

PANELS = {"yarn-4": "YaRN, factor 4", "linear-4": "linear, factor 4"}
LINES = {"": "RoPE only", **{arm: TITLES[arm] for arm in ("no_skip", "pose_skip", "full_length")}}


def main() -> None:
    """Draw the committed results."""
    draw(load_rows(RESULTS / "recall.json"), HERE.parents[1] / "docs" / "figures" / "recall.png")


def draw(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw one panel for each RoPE.

    Args:
        rows: of recall.json; those of other lengths are left out.
        path: the picture.
    """
    rows = [row for row in rows if row["length"] == LENGTH]
    places = range(len(BANDS) - 1)
    with canvas(path, 7.2, 3.1, columns=len(PANELS)) as (figure, axes):
        for panel, (rope, title) in zip(axes, PANELS.items(), strict=True):
            for (arm, label), colour in zip(LINES.items(), COLOURS, strict=False):
                shares = shares_by_band(rows, f"{arm}-{rope}-" if arm else rope)
                if not shares:
                    continue
                panel.plot(places, np.mean(shares, axis=0), color=colour, marker="o", label=label)
                if len(shares) > 1:
                    panel.plot(places, np.transpose(shares), ".", color=colour, markersize=3, alpha=0.6)
            panel.axvline(BANDS.index(NEAR) - 0.5, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)))
            panel.text(
                BANDS.index(NEAR) - 0.5, 1.01, "old window", ha="center", fontsize=7.5, color="#666666",
                transform=panel.get_xaxis_transform(),
            )  # fmt: skip
            panel.set_xticks(places, [f"{low // 1024}–{high // 1024}k" for low, high in itertools.pairwise(BANDS)])
            panel.set_title(title, pad=14)
            panel.set(xlabel="distance from the end, tokens", ylim=(-0.03, 1.03))
            panel.grid(True, axis="y")
        axes[0].set_ylabel("share of facts found")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES), fontsize=8)


def shares_by_band(rows: Iterable[dict[str, Any]], model: str) -> list[list[float]]:
    """Return the shares found in each band, nearest first, for each model whose name begins so, over all its texts."""
    answers: dict[str, list[Any]] = {}
    for row in rows:
        if row["model"].startswith(model):
            answers.setdefault(row["model"], []).extend(answers_of(row))
    return [[found / asked for found, asked in by_band(each).values()] for each in answers.values()]


if __name__ == "__main__":
    main()
