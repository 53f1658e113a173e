"""RandPos: every token at its own random position (arXiv 2305.16843), a baseline of the PoSE paper."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler
from pose_plugin.positions.samplers.chunks import SEVERAL_CHUNKS_REFUSED


@dataclass(frozen=True)
class RandPos(Sampler):
    """n sorted distinct positions out of L_t, every subset equally likely: each token is its own chunk."""

    name = "randpos"
    refused_contents = SEVERAL_CHUNKS_REFUSED

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return window

    def __call__(self, row: Row, draws: Draws) -> Layout:
        skips = draws.subset(row.window, row.target) - np.arange(row.window)
        return Layout(np.ones_like(skips), skips)
