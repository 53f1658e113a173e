"""Every sentence is its own chunk, as in LongRecipe (arXiv 2409.00509)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Rows, Sampler
from pose_plugin.positions.samplers.pose import Pose
from pose_plugin.positions.sentence_borders import SentenceBorders

# About the tokens of a sentence in the vocabularies of current models.
_USUAL_SENTENCE = 25


@dataclass(frozen=True)
class Sentences(Sampler):
    """A jump after every sentence, the first sentence at 0.

    All non-decreasing sequences of skips from 0 to L_t − n are equally likely; the paper gets the same by putting its
    sentences into randomly chosen slots of a row as long as the target. A row without the end of a sentence is cut
    into two chunks as by `pose`.
    """

    name = "sentences"
    border_finder = SentenceBorders
    refused_contents = dict.fromkeys(("skip", "aligned"), "it would leave text out after every sentence")

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return borders + 1

    def usual_spacing(self, window: int) -> int:
        return _USUAL_SENTENCE

    def __call__(self, rows: Rows, draws: Draws) -> Layout:
        anywhere = Pose()(rows, draws)
        found = [_sentences(window, row, rows) for row, window in enumerate(rows.windows.tolist())]
        own = anywhere.lengths.shape[1]
        columns = max([own, *(len(parts) for parts in found if parts is not None)])
        lengths = np.zeros((len(found), columns), dtype=np.int64)
        skips = np.zeros_like(lengths)
        for row, parts in enumerate(found):
            if parts is None:
                lengths[row, :own] = anywhere.lengths[row]
                skips[row, :own] = anywhere.skips[row]
                skips[row, own:] = anywhere.skips[row, -1]
                continue
            free, jumps = int(rows.targets[row] - rows.windows[row]), len(parts) - 1
            lengths[row, : len(parts)] = parts
            # Sorted distinct slots, each minus its rank: a sequence that never decreases and may repeat.
            skips[row, 1 : len(parts)] = draws.subset(row, jumps, free + jumps) - np.arange(jumps)
            skips[row, len(parts) :] = skips[row, jumps]
        return Layout(lengths, skips)


def _sentences(window: int, row: int, rows: Rows) -> np.ndarray | None:
    """Return the lengths of a row's sentences, shape (sentences,), or None if none ends within its window."""
    offered = None if rows.borders is None else rows.borders[row]
    if offered is None:
        return None
    inside = offered[(offered > 0) & (offered < window)]
    return np.diff(inside, prepend=0, append=window) if inside.size else None
