"""Skips drawn beyond both ends of their range and clamped to it, as LongEmbed does (arXiv 2404.12096)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws, integers
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Rows
from pose_plugin.positions.samplers.chunks import chunk_lengths
from pose_plugin.positions.samplers.pose import Pose


@dataclass(frozen=True)
class Clamped(Pose):
    """As `pose`, with u = clamp(U{−n, …, L_t}, 0, L_t − n).

    About n/(L_t + n) of the rows stay plain, and as many reach the very end of the target, which `pose` rarely trains.
    """

    name = "clamped"

    def __call__(self, rows: Rows, draws: Draws) -> Layout:
        lengths = chunk_lengths(rows, draws, self.chunks, self.variant)
        uniform = draws.uniform(self.chunks)[:, : lengths.shape[1]]
        free = (rows.targets - rows.windows)[:, None]
        wide = integers(uniform, -rows.windows[:, None], rows.targets[:, None])
        skips = np.clip(wide, 0, free)
        if lengths.shape[1] > 2:
            # Keeps the chunks in order. With two, only the second one is moved, so there is nothing to sort.
            skips = np.sort(skips, axis=1)
        skips[:, 0] = 0
        return Layout(lengths, skips)
