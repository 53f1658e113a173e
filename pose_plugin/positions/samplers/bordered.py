"""Samplers whose jumps stand at borders that the text offers (borders.py finds them)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def sentences(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """Every sentence is a chunk of its own, the first one at 0 (LongRecipe, arXiv 2409.00509).

    All non-decreasing sequences of skips from 0 to L_t − n are equally likely, as where the source puts its sentences
    into randomly chosen slots of a row as long as the target. A row that shows no end of a sentence is cut as `pose`
    cuts it.

    Args:
        windows: n, tokens of each row, shape (rows,).
        targets: positions available to each row, at least n, shape (rows,).
        draws: randomness for `rows` rows.
        options: for the rows without borders.
        borders: see `Borders`; default None for every row.
    """
    anywhere = chunk_lengths(windows, draws, options)
    plain = growing_skips(anywhere, windows, targets, draws, options.chunks)
    found = [
        (np.diff(o, prepend=0, append=windows[i]) if o is not None else None) for i, o in _inside(borders, windows)
    ]
    columns = max([anywhere.shape[1], *(len(parts) for parts in found if parts is not None)])
    lengths = np.zeros((len(windows), columns), dtype=np.int64)
    skips = np.zeros_like(lengths)
    for row in range(len(windows)):
        parts = found[row] if found else None
        if parts is None:
            lengths[row, : anywhere.shape[1]] = plain.lengths[row]
            skips[row, : anywhere.shape[1]] = plain.skips[row]
            skips[row, anywhere.shape[1] :] = plain.skips[row, -1]
            continue
        free, jumps = int(targets[row] - windows[row]), len(parts) - 1
        lengths[row, : len(parts)] = parts
        # A set of slots without its own count is a sequence that may stand still.
        skips[row, 1 : len(parts)] = draws.subset(row, jumps, free + jumps) - np.arange(jumps)
        skips[row, len(parts) :] = skips[row, jumps]
    return Layout(lengths, skips)


def _inside(borders: Borders | None, windows: np.ndarray) -> Iterator[tuple[int, np.ndarray | None]]:
    """Each row's borders within its window; None where there are none."""
    for row, offered in enumerate(borders or ()):
        inside = offered if offered is None else offered[(offered > 0) & (offered < windows[row])]
        yield row, inside if inside is not None and inside.size else None


def _parts(window: int, offered: np.ndarray, row: int, draws: Draws, chunks: int) -> np.ndarray:
    inside = offered[(offered > 0) & (offered < window)]
    count = min(chunks - 1, len(inside))
    chosen = inside[draws.subset(row, count, len(inside))] if count else inside[:0]
    return np.diff(chosen, prepend=0, append=window)
