"""Jumps only between the turns of a chat, after the idea of SkipAlign (arXiv 2405.03939)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler
from pose_plugin.positions.samplers.chunks import growing
from pose_plugin.positions.samplers.pose import Pose
from pose_plugin.positions.turn_borders import TurnBorders

# About the turns of a training window of chats.
_USUAL_TURNS = 8


@dataclass(frozen=True)
class Turns(Sampler):
    """Cuts at N − 1 of a window's borders, every choice equally likely, with skips as in `pose`.

    A window with fewer borders has fewer jumps, and one without borders has none. A row that shows no turns (raw text
    among chats) is cut as by `pose`.

    Attributes:
        chunks: N.
    """

    chunks: int = 2

    name = "turns"
    border_finder = TurnBorders
    needs_chats = True
    plain_without_borders = True
    refused_contents = dict.fromkeys(
        ("window", "skip", "aligned"),
        "it leaves parts of a document out, and a chat without its beginning or middle is another chat",
    )

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return min(self.chunks, window)

    def usual_spacing(self, window: int) -> int:
        return max(window // _USUAL_TURNS, 1)

    def __call__(self, row: Row, draws: Draws) -> Layout:
        if row.borders is None:
            return Pose(self.chunks)(row, draws)
        jumps = min(self.chunks - 1, len(row.borders))
        chosen = row.borders[draws.subset(jumps, len(row.borders))] if jumps else []
        lengths = np.diff(chosen, prepend=0, append=row.window)
        return Layout(lengths, growing(len(lengths), row.target - row.window, draws))
