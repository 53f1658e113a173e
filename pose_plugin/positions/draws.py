"""Randomness that depends only on (seed, epoch, the document's own tokens).

The same document gets the same positions on every rank, in every dataloader worker, packed or not, and after a resume;
it gets new ones in the next epoch. No global generator is read or moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def document_generator(tokens: Sequence[int] | np.ndarray, seed: int, epoch: int) -> np.random.Generator:
    """Return a generator keyed by (seed, epoch, tokens).

    Args:
        tokens: the document's token ids, before any of them is left out, shape (L_x,).
        seed: the run's seed, any integer.
        epoch: 0, 1, …
    """
    content = np.ascontiguousarray(tokens, dtype="<i8").tobytes()
    digest = hashlib.blake2b(content, digest_size=16, key=f"{seed}/{epoch}".encode())
    # Philox is counter-based: making one from a key costs microseconds and needs no warm-up.
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))


class Draws:
    """Random numbers for a batch of rows, one independent stream per row.

    Args:
        generators: one per row; or a single one with `rows`, which then serves all rows (for simulation).
    """

    def __init__(self, generators: Sequence[np.random.Generator] | np.random.Generator, rows: int | None = None):
        self._shared = generators if isinstance(generators, np.random.Generator) else None
        self._each = [] if isinstance(generators, np.random.Generator) else list(generators)
        if self._shared is not None and rows is None:
            raise TypeError("a single generator needs the number of rows")
        self.rows = len(self._each) if rows is None else rows

    def uniform(self, columns: int) -> np.ndarray:
        """Draw uniform numbers on [0, 1), shape (rows, columns)."""
        if self._shared is not None:
            return self._shared.random((self.rows, columns))
        return np.stack([generator.random(columns) for generator in self._each])

    def subset(self, row: int, size: int, below: int) -> np.ndarray:
        """Draw `size` distinct sorted integers of 0…below−1, every subset equally likely, shape (size,)."""
        generator = self._shared if self._shared is not None else self._each[row]
        return np.sort(generator.choice(below, size=size, replace=False, shuffle=False))


def integers(uniform: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Turn uniform numbers into integers of low…high, both included, elementwise."""
    span = high - low + 1
    # A float just below 1 times a large span can round up to the span itself.
    result: np.ndarray = low + np.minimum((uniform * span).astype(np.int64), span - 1)
    return result
