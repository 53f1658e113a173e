"""Jumps only between the turns of a chat, after the idea of SkipAlign (arXiv 2405.03939)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Rows, Sampler
from pose_plugin.positions.samplers.chunks import chunk_lengths, growing_skips
from pose_plugin.positions.turn_borders import TurnBorders

# About the turns of a training window of chats.
_USUAL_TURNS = 8


@dataclass(frozen=True)
class Turns(Sampler):
    """Cuts at N − 1 of a row's borders, every choice equally likely, with skips as in `pose`.

    A row with fewer borders has fewer jumps. A row that shows no turns (raw text among chats) is cut as by `pose`.

    Attributes:
        chunks: N.
    """

    chunks: int = 2

    name = "turns"
    border_finder = TurnBorders
    needs_chats = True
    refused_contents = dict.fromkeys(
        ("window", "skip", "aligned"),
        "it leaves parts of a document out, and a chat without its beginning or middle is another chat",
    )

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return min(self.chunks, window)

    def usual_spacing(self, window: int) -> int:
        return max(window // _USUAL_TURNS, 1)

    def __call__(self, rows: Rows, draws: Draws) -> Layout:
        anywhere = chunk_lengths(rows, draws, self.chunks)
        lengths = np.zeros((len(rows.windows), self.chunks), dtype=np.int64)
        lengths[:, : anywhere.shape[1]] = anywhere
        for row, offered in enumerate(rows.borders or ()):
            if offered is not None:
                parts = self._parts(int(rows.windows[row]), offered, row, draws)
                lengths[row] = 0
                lengths[row, : len(parts)] = parts
        return growing_skips(lengths, rows, draws, self.chunks)

    def _parts(self, window: int, offered: np.ndarray, row: int, draws: Draws) -> np.ndarray:
        """Return the lengths of one row's chunks, shape (chunks of this row,)."""
        inside = offered[(offered > 0) & (offered < window)]
        count = min(self.chunks - 1, len(inside))
        chosen = inside[draws.subset(row, count, len(inside))] if count else inside[:0]
        return np.diff(chosen, prepend=0, append=window)
