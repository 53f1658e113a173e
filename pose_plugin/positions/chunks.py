"""Cutting windows into chunks and moving the chunks apart: what several samplers share."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pose_plugin.positions.draws import Draws, integers
from pose_plugin.positions.layout import Layout


class SamplerOptions(Protocol):
    """The settings that samplers read (`PoSESettings` has them)."""

    @property
    def chunks(self) -> int: ...
    @property
    def variant(self) -> str: ...


def chunk_lengths(windows: np.ndarray, draws: Draws, options: SamplerOptions) -> np.ndarray:
    """l_i with Σ l_i = n, each at least 1, drawn one after the other as in Figure 6 of the PoSE paper."""
    windows = windows.astype(np.int64)
    count = np.minimum(options.chunks, windows)
    columns = max(int(count.max(initial=1)), 1)
    # As many numbers for every row, so that what follows does not depend on the other rows of a batch.
    uniform = draws.uniform(options.chunks)
    lengths = np.zeros((len(windows), columns), dtype=np.int64)
    rest = windows.copy()
    for i in range(columns):
        behind = count - 1 - i
        # Every chunk behind this one needs a token.
        most = np.maximum(rest - behind, 1)
        if i == 0 and options.variant == "reference":
            most = np.minimum(most, (windows + 1) // 2)
        drawn = integers(uniform[:, i], np.ones_like(most), most)
        lengths[:, i] = np.where(behind > 0, drawn, np.where(behind == 0, rest, 0))
        rest = rest - lengths[:, i]
    return lengths


def growing_skips(lengths: np.ndarray, windows: np.ndarray, targets: np.ndarray, draws: Draws, count: int) -> Layout:
    """u_0 = 0; u_i ~ U{u_(i−1), …, L_t − n} (arXiv 2309.10400, section 3.2).

    Args:
        lengths: l_i, shape (rows, columns), columns at most `count`.
        windows: n, shape (rows,).
        targets: positions available to each row, shape (rows,).
        draws: randomness for `rows` rows.
        count: N; so many numbers are drawn a row, whatever the other rows of the batch are like.
    """
    uniform = draws.uniform(count)
    skips = np.zeros_like(lengths)
    for i in range(1, lengths.shape[1]):
        skips[:, i] = integers(uniform[:, i], skips[:, i - 1], targets - windows)
    return Layout(lengths, skips)
