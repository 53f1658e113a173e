"""What a sampler returns: how the rows of a batch are cut into chunks and how far each chunk is moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Chunks of a batch of rows.

        row of 8 tokens    |c0 c0 c0|c1 c1 c1 c1 c1|     lengths = 3 5
        position ids        0  1  2  13 14 15 16 17      skips   = 0 10

    Attributes:
        lengths: l_i in tokens, shape (rows, chunks), int64; 0 for chunks that a short row does not have.
        skips: u_i in positions, same shape, non-decreasing along a row.
    """

    lengths: np.ndarray
    skips: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """Return st_i, the index in the window at which chunk i starts, shape (rows, chunks)."""
        starts: np.ndarray = np.cumsum(self.lengths, axis=1) - self.lengths
        return starts

    def position_ids(self, row: int) -> np.ndarray:
        """Return u_i + st_i + (0…l_i−1) for every chunk of a row, shape (window,), strictly increasing."""
        return shifted_indices(self.lengths[row], self.skips[row])


def shifted_indices(lengths: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, … with shift i added over chunk i; shape (sum of lengths,)."""
    indices: np.ndarray = np.repeat(shifts, lengths)
    indices += np.arange(len(indices))
    return indices
