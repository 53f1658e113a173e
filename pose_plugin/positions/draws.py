"""Randomness that depends only on (seed, epoch, the document's own tokens).

The same document gets the same positions on every rank, in every dataloader worker, packed or not, and after a resume;
it gets new ones in the next epoch. No global generator is read or moved.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from pose_plugin.utils.arrays import int_array

_EIGHT = struct.Struct("<8Q")
# Simulated rows that are spread evenly together: more would only need more memory.
_EVEN_ROWS = 1 << 16


class Draws:
    """Random numbers of one document: the bits of a hash.

    Most documents need fewer than eight numbers, which one hash gives. Constructing a generator of numpy takes ten
    times as long.

    Args:
        seed: the run's seed.
        epoch: 0, 1, …
        document: what tells this document from others.
    """

    __slots__ = ("_block", "_left")

    def __init__(self, seed: int, epoch: int, document: int) -> None:
        self._block = hashlib.blake2b(b"%d/%d/%d" % (seed, epoch, document)).digest()
        self._left: list[int] = [*_EIGHT.unpack(self._block)]

    @classmethod
    def of(cls, tokens: Sequence[int] | np.ndarray, seed: int, epoch: int) -> Draws:
        """Return the numbers of a document.

        Args:
            tokens: its token ids, before any of them is left out, shape (L_x,).
            seed: the run's seed.
            epoch: 0, 1, …
        """
        # The fastest checksum, as a longer hash of the tokens takes as long as all the rest. Two documents in 2³² have
        # the same one and get the same numbers, which does no harm. Four bytes hold the ids of every vocabulary.
        return cls(seed, epoch, zlib.crc32(np.ascontiguousarray(int_array(tokens), dtype="<i4").data))

    def _bits(self) -> int:
        """Return 64 random bits."""
        if not self._left:
            self._block = hashlib.blake2b(self._block).digest()
            self._left = [*_EIGHT.unpack(self._block)]
        return self._left.pop()

    def uniform(self) -> float:
        """Draw a uniform number on [0, 1)."""
        return (self._bits() >> 11) * 2.0**-53

    def integer(self, low: int, high: int) -> int:
        """Draw an integer of low…high, both included, each equally likely."""
        return low + (self._bits() * (high - low + 1) >> 64)

    def subset(self, size: int, below: int) -> np.ndarray:
        """Draw `size` distinct sorted integers of 0…below−1, every subset equally likely, shape (size,)."""
        generator = np.random.Generator(np.random.Philox(key=self._bits()))
        return np.sort(generator.choice(below, size=size, replace=False, shuffle=False))


def even_draws(seed: int, rows: int) -> Iterator[Draws]:
    """Yield the random numbers of simulated rows, which together fill every range evenly (Latin hypercube sampling).

    The k-th numbers of n rows lie in different ones of n equal ranges. Chances that are counted over the rows are
    closer to the truth than with independent rows.

    Args:
        seed: of the simulation.
        rows: how many.
    """
    for first in range(0, rows, _EVEN_ROWS):
        together = min(_EVEN_ROWS, rows - first)
        orders: list[np.ndarray] = []
        for place in range(together):
            yield _EvenDraws(seed, first, place, together, orders)


class _EvenDraws(Draws):
    """The numbers of one of the rows that share `orders`: for each k, in which range the k-th number of each row is."""

    __slots__ = ("_first", "_orders", "_place", "_seed", "_taken", "_together")

    def __init__(self, seed: int, first: int, place: int, together: int, orders: list[np.ndarray]) -> None:
        super().__init__(seed, 0, first + place)
        self._seed, self._first, self._place, self._together = seed, first, place, together
        self._orders, self._taken = orders, 0

    def _bits(self) -> int:
        if self._taken == len(self._orders):
            key = Draws(self._seed, 1 + self._first, self._taken)._bits()
            self._orders.append(np.random.Generator(np.random.Philox(key=key)).permutation(self._together))
        nth = int(self._orders[self._taken][self._place])
        self._taken += 1
        return ((nth << 64) + super()._bits()) // self._together
