"""PoSE: random chunk lengths, and skips that grow from chunk to chunk (arXiv 2309.10400)."""

from __future__ import annotations

from dataclasses import dataclass

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler
from pose_plugin.positions.samplers.chunks import chunk_lengths, growing


@dataclass(frozen=True)
class Pose(Sampler):
    """Random chunk lengths and u_i ~ U{u_(i−1), …, L_t − n} (section 3.2 of the paper).

        n = 8, L_t = 32   |c0 c0 c0|               |c1 c1 c1 c1 c1|
                           0  1  2                  13 14 15 16 17

    A row with fewer tokens than chunks is cut into as many chunks as it has tokens.

    Attributes:
        chunks: N.
        variant: "reference" keeps the first chunk within half of the window, as the authors' code does.
    """

    chunks: int = 2
    variant: str = "paper"

    name = "pose"

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return min(self.chunks, window)

    def __call__(self, row: Row, draws: Draws) -> Layout:
        lengths = chunk_lengths(row.window, draws, self.chunks, self.variant)
        return Layout(lengths, growing(len(lengths), row.target - row.window, draws))
