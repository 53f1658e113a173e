"""What a sampler returns: how a row is cut into chunks and how far each chunk is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pose_plugin.utils.arrays import counting

# Up to so many chunks a loop over chunks is faster than `np.repeat`.
_FEW = 4


class Layout(NamedTuple):
    """Chunks of one row.

        row of 8 tokens    |c0 c0 c0|c1 c1 c1 c1 c1|     lengths = 3 5
        position ids        0  1  2  13 14 15 16 17      skips   = 0 10

    Attributes:
        lengths: l_i in tokens, one per chunk; their sum is the row's length.
        skips: u_i in positions, one per chunk, non-decreasing.
    """

    lengths: Sequence[int] | np.ndarray
    skips: Sequence[int] | np.ndarray

    def position_ids(self) -> np.ndarray:
        """Return u_i + st_i + (0…l_i−1) for every chunk, shape (n,), strictly increasing."""
        return shifted_indices(self.lengths, self.skips)


def shifted_indices(lengths: Sequence[int] | np.ndarray, shifts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, … with shift i added over chunk i; shape (sum of lengths,), int64."""
    if len(lengths) > _FEW:
        repeated = np.repeat(np.asarray(shifts, dtype=np.int64), lengths)
        repeated += counting(len(repeated))
        return repeated
    # The usual few chunks: slices take half the time.
    indices = counting(int(sum(lengths))).copy()
    begin = 0
    for length, shift in zip(lengths, shifts, strict=True):
        end = begin + length
        if shift:
            # Not `indices[begin:end] += shift`, which afterwards copies the slice onto itself.
            chunk = indices[begin:end]
            chunk += shift
        begin = end
    return indices
