"""Which distances the settings train: the chance that one row holds a pair of tokens so far apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.config import PoSESettings
from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.basic import BORDERED
from pose_plugin.positions.windows import _layout
from pose_plugin.utils.errors import PoSEError

# Above this many chunks the pairs of chunks outnumber what an autocorrelation costs.
_MOST_CHUNKS_FOR_INTERVALS = 32


MOST_POSITIONS = 1 << 24


def simulable(settings: PoSESettings) -> bool:
    """Whether the target is small enough to count every distance below it in memory."""
    return settings.target_length + settings.target_margin <= MOST_POSITIONS


@dataclass(frozen=True)
class Coverage:
    """Coverage by distance.

    Attributes:
        probability: shape (L_t,); entry d is the chance that one row holds two tokens d positions apart.
        draws: simulated rows.
        settings: what was simulated.
    """

    probability: np.ndarray
    draws: int
    settings: PoSESettings

    def after(self, rows: int) -> np.ndarray:
        """Expected number of rows that hold each distance after training on `rows` rows, shape (L_t,)."""
        return self.probability * rows

    def table(self, distances: list[int] | None = None) -> str:
        """Two lines of text: distances, and their chances."""
        target = self.settings.target_length
        window = self.settings.train_length or target
        marks = {window // 2, 3 * window // 4, window - 1, target // 4, target // 2, target - window, target - 1}
        chosen = sorted({d for d in (distances or marks) if 0 < d < target})
        cells = [(str(d), f"{self.probability[d]:.3f}") for d in chosen]
        widths = [max(len(a), len(b)) for a, b in cells]
        head = "  ".join(a.rjust(w) for (a, _), w in zip(cells, widths, strict=True))
        body = "  ".join(b.rjust(w) for (_, b), w in zip(cells, widths, strict=True))
        return f"distance  {head}\nchance    {body}"


# What a sentence has, roughly, in the tokens of today's vocabularies.
_SENTENCE = 25
_TURNS = 8


def coverage(
    settings: PoSESettings, window: int | None = None, draws: int = 8000, seed: int = 0, every: int | None = None
) -> Coverage:
    """Simulates rows of `window` tokens and counts which distances each of them holds.

    Compare Figure 5 of the PoSE paper (arXiv 2309.10400).

    Args:
        settings: sampler, lengths and options; content `aligned` is taken on documents as long as the target.
        window: n in tokens; default `settings.train_length`.
        draws: rows to simulate; the standard error of a chance p is √(p(1−p)/draws).
        seed: of the simulation.
        every: for samplers that jump at borders: tokens from one border of the simulated rows to the next; default 25
            for sentences, an eighth of the window for turns. The real ones are known when the data is.

    Raises:
        PoSEError: neither `window` nor `train_length` is given, or the target is too large to simulate.
    """
    size = window or settings.train_length
    if size is None:
        raise PoSEError("coverage needs a window: set train_length to the window's tokens, or pass window=")
    target = settings.target_length
    if not simulable(settings):
        raise PoSEError(
            f"target_length={target} and target_margin={settings.target_margin} are more than the {MOST_POSITIONS} "
            "positions that can be simulated; give smaller numbers in the same proportion"
        )
    generator = np.random.default_rng(seed)
    counts = np.zeros(target + 1)
    borders = None
    chunks = size if settings.sampler == "randpos" else min(settings.chunks, size)
    if settings.sampler in BORDERED:
        every = every or (_SENTENCE if settings.sampler == "sentences" else max(size // _TURNS, 1))
        borders = np.arange(every, size, every)
    if settings.sampler == "sentences" and borders is not None:
        chunks = len(borders) + 1
    elif settings.sampler == "cream":
        chunks = 3
    by_intervals = chunks <= _MOST_CHUNKS_FOR_INTERVALS
    step = max(1, min(draws, (1 << 20) // (chunks * chunks if by_intervals else 4 * target)))
    for begin in range(0, draws, step):
        rows = min(step, draws - begin)
        windows = np.full(rows, size, dtype=np.int64)
        documents = np.full(rows, max(size, target), dtype=np.int64)
        offered = None if borders is None else [borders] * rows
        layout, _ = _layout(documents, windows, Draws(generator, rows), settings, offered)
        if by_intervals:
            counts += _count_by_intervals(layout, target)
        else:
            counts += _count_by_autocorrelation(layout, target)
    return Coverage(counts[:target] / draws, draws, settings)


def _count_by_intervals(layout: Layout, target: int) -> np.ndarray:
    """Rows per distance, shape (target + 1,): a pair of chunks holds one interval of distances."""
    lengths, first = layout.lengths, layout.starts + layout.skips
    last = first + lengths - 1
    low, high = [], []
    chunks = lengths.shape[1]
    for i in range(chunks):
        for j in range(i, chunks):
            present = (lengths[:, i] > 0) & (lengths[:, j] > 0)
            near = np.ones(layout.rows, dtype=np.int64) if i == j else first[:, j] - last[:, i]
            far = last[:, j] - first[:, i]
            # An absent chunk becomes an empty interval.
            low.append(np.where(present, near, 1))
            high.append(np.where(present, far, 0))
    lows, highs = np.stack(low, axis=1), np.stack(high, axis=1)
    order = np.argsort(lows, axis=1)
    lows, highs = np.take_along_axis(lows, order, 1), np.take_along_axis(highs, order, 1)
    # Union of intervals: each one counts from where the earlier ones have ended.
    reached = np.maximum.accumulate(np.concatenate([np.zeros((layout.rows, 1), np.int64), highs], 1), axis=1)
    lows = np.maximum(lows, reached[:, :-1] + 1)
    valid = lows <= highs
    lows, highs = np.minimum(lows[valid], target), np.minimum(highs[valid] + 1, target)
    steps = np.zeros(target + 1)
    np.add.at(steps, lows, 1)
    np.add.at(steps, highs, -1)
    return np.cumsum(steps)


def _count_by_autocorrelation(layout: Layout, target: int) -> np.ndarray:
    """The same for many chunks: a distance is held where the indicator of positions overlaps its shift."""
    counts = np.zeros(target + 1)
    reach = int((layout.starts + layout.skips + layout.lengths).max())
    for row in range(layout.rows):
        used = np.zeros(reach)
        used[layout.position_ids(row)] = 1
        spectrum = np.fft.rfft(used, 2 * reach)
        overlap = np.fft.irfft(spectrum * np.conj(spectrum), 2 * reach)[:reach]
        held = overlap > 0.5
        held[0] = False
        counts[: min(reach, target)] += held[:target]
    return counts
