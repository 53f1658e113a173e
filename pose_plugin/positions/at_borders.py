"""Samplers whose jumps stand at borders that the text offers (borders.py finds them)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pose_plugin.positions.chunks import SamplerOptions, chunk_lengths, growing_skips
from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout

# One a row: indices in the window at which a chunk may begin, sorted; empty: the row stays plain; None: it shows no
# borders, and jumps may stand anywhere.
Borders = Sequence["np.ndarray | None"]


def turns(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """Jumps between the turns of a chat only, after the idea of SkipAlign (arXiv 2405.03939).

    N − 1 of a row's borders, every choice equally likely, with skips as in `pose`. A row with fewer borders has fewer
    jumps. A row that shows no turns (raw text among chats) is cut as `pose` cuts it.

    Args:
        windows: n, tokens of each row, shape (rows,).
        targets: positions available to each row, at least n, shape (rows,).
        draws: randomness for `rows` rows.
        options: `chunks` is N.
        borders: see `Borders`; default None for every row.
    """
    anywhere = chunk_lengths(windows, draws, options)
    lengths = np.zeros((len(windows), max(options.chunks, 1)), dtype=np.int64)
    lengths[:, : anywhere.shape[1]] = anywhere
    for row, offered in enumerate(borders or ()):
        if offered is not None:
            lengths[row] = 0
            parts = _parts(int(windows[row]), offered, row, draws, options.chunks)
            lengths[row, : len(parts)] = parts
    return growing_skips(lengths, windows, targets, draws, options.chunks)


def _parts(window: int, offered: np.ndarray, row: int, draws: Draws, chunks: int) -> np.ndarray:
    inside = offered[(offered > 0) & (offered < window)]
    count = min(chunks - 1, len(inside))
    chosen = inside[draws.subset(row, count, len(inside))] if count else inside[:0]
    return np.diff(chosen, prepend=0, append=window)
