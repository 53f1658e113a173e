"""Every sentence is its own chunk, as in LongRecipe (arXiv 2409.00509)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler
from pose_plugin.positions.samplers.pose import Pose
from pose_plugin.positions.sentence_borders import SentenceBorders

# About the tokens of a sentence in the vocabularies of current models.
_USUAL_SENTENCE = 25


@dataclass(frozen=True)
class Sentences(Sampler):
    """A jump after every sentence, the first sentence at 0.

    All non-decreasing sequences of skips from 0 to L_t − n are equally likely; the paper gets the same by putting its
    sentences into randomly chosen slots of a row as long as the target. A window without the end of a sentence is
    cut into two chunks as by `pose`.
    """

    name = "sentences"
    border_finder = SentenceBorders
    refused_contents = dict.fromkeys(("skip", "aligned"), "it would leave text out after every sentence")

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return borders + 1

    def usual_spacing(self, window: int) -> int:
        return _USUAL_SENTENCE

    def __call__(self, row: Row, draws: Draws) -> Layout:
        if row.borders is None:
            return Pose()(row, draws)
        lengths = np.diff(row.borders, prepend=0, append=row.window)
        free, jumps = row.target - row.window, len(row.borders)
        # Sorted distinct slots, each minus its rank: a sequence that never decreases and may repeat.
        skips = draws.subset(jumps, free + jumps) - np.arange(jumps)
        return Layout(lengths, np.concatenate([[0], skips]))
