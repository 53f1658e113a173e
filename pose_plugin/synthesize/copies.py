"""Texts that were there before, word for word or nearly: whoever is asked about both has read the answers already.

Nearly the same are two editions of a book, or pieces of one that repeats itself. Each text is sketched by the smallest
hashes of its runs of words (MinHash, Broder 1997), so that memory does not grow with its length.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter

from pose_plugin.synthesize.texts import digest

# Words of a run, hashes of a sketch, and the share of runs in common from which two texts are nearly the same: at 128
# hashes an estimate of 0.5 is off by 0.04 (one standard error).
RUN, SKETCH, LIKE = 8, 128, 0.5
# A hash that so many texts have is of what they all begin or end with, such as a licence.
COMMON = 100


class Copies:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._sketches: list[frozenset[int]] = []
        self._owners: dict[int, list[int]] = {}

    def same(self, text: str) -> bool:
        """Whether this very text was shown here before."""
        key = digest(text)
        known = key in self._digests
        self._digests.add(key)
        return known

    def like(self, text: str) -> bool:
        """Whether a text with at least half of its runs of words was shown here before; if not, it is remembered."""
        mine = sketch(text)
        owners = (self._owners.get(each, []) for each in mine)
        shared = Counter(number for found in owners if len(found) < COMMON for number in found)
        if any(likeness(mine, self._sketches[number]) >= LIKE for number in shared):
            return True
        for each in mine:
            self._owners.setdefault(each, []).append(len(self._sketches))
        self._sketches.append(mine)
        return False


def sketch(text: str) -> frozenset[int]:
    """The smallest hashes of all runs of 8 words, or of 8 characters where words are not parted by spaces."""
    words = text.casefold().split()
    if sum(map(len, words)) > 20 * len(words):
        words = list("".join(words))
    runs = {" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}
    return frozenset(heapq.nsmallest(SKETCH, {zlib.crc32(run.encode("utf-8")) for run in runs}))


def likeness(one: frozenset[int], other: frozenset[int]) -> float:
    """Estimates the share of runs that two texts have in common (Jaccard), from 0 to 1."""
    smallest = heapq.nsmallest(SKETCH, one | other)
    return sum(each in one and each in other for each in smallest) / max(1, len(smallest))
