"""Skips drawn beyond both ends of their range and clamped to it, as LongEmbed does (arXiv 2404.12096)."""

from __future__ import annotations

from dataclasses import dataclass

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row
from pose_plugin.positions.samplers.chunks import chunk_lengths
from pose_plugin.positions.samplers.pose import Pose


@dataclass(frozen=True)
class Clamped(Pose):
    """As `pose`, with u = clamp(U{−n, …, L_t}, 0, L_t − n).

    About n/(L_t + n) of the rows stay plain, and as many reach the very end of the target, which `pose` rarely trains.
    """

    name = "clamped"

    def __call__(self, row: Row, draws: Draws) -> Layout:
        lengths = chunk_lengths(row.window, draws, self.chunks, self.variant)
        wide = [draws.integer(-row.window, row.target) for _ in lengths[1:]]
        free = row.target - row.window
        return Layout(lengths, [0, *sorted(min(max(skip, 0), free) for skip in wide)])
