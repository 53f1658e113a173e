"""Texts that were there before, word for word or nearly: whoever is asked about both has read the answers already.

Nearly the same are two editions of a book, or pieces of one that repeats itself. Each text is sketched by hashes of its
runs of words (MinHash, Broder 1997, of datasketch), so that memory does not grow with its length.
"""

from __future__ import annotations

import zlib
from itertools import islice
from typing import Any

from pose_plugin.synthesize.documents import digest
from pose_plugin.utils.errors import PoSEError

# Words of a run, and the share of runs in common from which two texts are nearly the same.
RUN, LIKE = 8, 0.5
# Sketches that agree in three hashes of one band are compared: of two texts at LIKE 996 in 1000, and of two that share
# a tenth, such as a licence, 41. An estimate of 0.5 from all 126 hashes is off by 0.045 (one standard error).
BANDS = 42, 3
# Runs hashed at a time: each takes 126 numbers while it is.
AT_ONCE = 4096


class Copies:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._sketches: list[Any] = []
        self._index = _datasketch().MinHashLSH(num_perm=BANDS[0] * BANDS[1], params=BANDS)

    def same(self, text: str) -> bool:
        """Whether this very text was shown here before."""
        key = digest(text)
        known = key in self._digests
        self._digests.add(key)
        return known

    def like(self, text: str) -> bool:
        """Whether a text with at least half of its runs of words was shown here before; if not, it is remembered."""
        mine = sketch(text)
        if any(mine.jaccard(self._sketches[number]) >= LIKE for number in self._index.query(mine)):
            return True
        self._index.insert(len(self._sketches), mine)
        self._sketches.append(mine)
        return False


def sketch(text: str) -> Any:
    """A MinHash of all runs of 8 words, or of 8 characters where words are not parted by spaces.

    The same in every process, as a run that goes on must find the same copies. Two of them estimate the share of runs
    that their texts have in common (`jaccard`, from 0 to 1).
    """
    words = text.casefold().split()
    if sum(map(len, words)) > 20 * len(words):
        words = list("".join(words))
    runs = iter({" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))})
    found = _datasketch().MinHash(num_perm=BANDS[0] * BANDS[1], scheme="affine32", hashfunc=zlib.crc32)
    while some := [run.encode("utf-8") for run in islice(runs, AT_ONCE)]:
        found.update_batch(some)
    return found


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise PoSEError('synthesize needs datasketch: pip install "pose-plugin[synthesize]"') from None
    return datasketch
