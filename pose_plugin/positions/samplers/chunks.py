"""Cutting windows into chunks and moving the chunks apart: what several samplers share."""

from __future__ import annotations

import numpy as np

from pose_plugin.positions.draws import Draws, integers
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Rows

# Of samplers that have no chunks to fill: contents that put another piece of the document into each chunk.
SEVERAL_CHUNKS_REFUSED = dict.fromkeys(("skip", "aligned"), "it fills several chunks, and this sampler has none")


def chunk_lengths(rows: Rows, draws: Draws, chunks: int, variant: str = "paper") -> np.ndarray:
    """Draw l_i with Σ l_i = n, each at least 1, one after the other as in Figure 6 of the PoSE paper.

    Args:
        rows: the batch.
        draws: randomness; `chunks` numbers are drawn for each row.
        chunks: N; a row with fewer tokens gets one chunk per token.
        variant: "reference" keeps the first chunk within half of the window.

    Returns:
        l_i in tokens, shape (rows, columns) with at most `chunks` columns; 0 for chunks that a row does not have.
    """
    windows = rows.windows
    count = np.minimum(chunks, windows)
    columns = max(int(count.max(initial=1)), 1)
    # As many numbers for every row, so that what follows does not depend on the other rows of a batch.
    uniform = draws.uniform(chunks)
    lengths = np.zeros((len(windows), columns), dtype=np.int64)
    rest = windows.copy()
    for i in range(columns):
        behind = count - 1 - i
        # Every chunk behind this one needs a token.
        most = np.maximum(rest - behind, 1)
        if i == 0 and variant == "reference":
            most = np.minimum(most, (windows + 1) // 2)
        drawn = integers(uniform[:, i], np.ones_like(most), most)
        lengths[:, i] = np.where(behind > 0, drawn, np.where(behind == 0, rest, 0))
        rest = rest - lengths[:, i]
    return lengths


def growing_skips(lengths: np.ndarray, rows: Rows, draws: Draws, chunks: int) -> Layout:
    """Draw u_0 = 0 and u_i ~ U{u_(i−1), …, L_t − n} (arXiv 2309.10400, section 3.2).

    Args:
        lengths: l_i, shape (rows, columns) with at most `chunks` columns.
        rows: the batch.
        draws: randomness; `chunks` numbers are drawn for each row, regardless of the other rows of the batch.
        chunks: N.
    """
    uniform = draws.uniform(chunks)
    skips = np.zeros_like(lengths)
    for i in range(1, lengths.shape[1]):
        skips[:, i] = integers(uniform[:, i], skips[:, i - 1], rows.targets - rows.windows)
    return Layout(lengths, skips)
