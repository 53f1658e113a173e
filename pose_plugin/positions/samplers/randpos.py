"""RandPos: every token at its own random position (arXiv 2305.16843), a baseline of the PoSE paper."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Rows, Sampler
from pose_plugin.positions.samplers.chunks import SEVERAL_CHUNKS_REFUSED


@dataclass(frozen=True)
class RandPos(Sampler):
    """n sorted distinct positions out of L_t, every subset equally likely: each token is its own chunk."""

    name = "randpos"
    refused_contents = SEVERAL_CHUNKS_REFUSED

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return window

    def __call__(self, rows: Rows, draws: Draws) -> Layout:
        width = int(rows.windows.max(initial=0))
        lengths = (np.arange(width)[None, :] < rows.windows[:, None]).astype(np.int64)
        skips = np.zeros_like(lengths)
        for row, (window, target) in enumerate(zip(rows.windows, rows.targets, strict=True)):
            skips[row, :window] = draws.subset(row, int(window), int(target)) - np.arange(window)
            # Chunks that a shorter row does not have repeat its last skip, so that skips never decrease.
            skips[row, window:] = skips[row, window - 1] if window else 0
        return Layout(lengths, skips)
