"""No skips at all."""

from __future__ import annotations

from dataclasses import dataclass

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler
from pose_plugin.positions.samplers.chunks import SEVERAL_CHUNKS_REFUSED


@dataclass(frozen=True)
class Plain(Sampler):
    """Plain positions 0…n−1, for full-length training and for runs that only change RoPE."""

    name = "none"
    skips = False
    refused_contents = SEVERAL_CHUNKS_REFUSED

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return 1

    def __call__(self, row: Row, draws: Draws) -> Layout:
        return Layout([row.window], [0])
