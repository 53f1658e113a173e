"""Which distances the settings train: the chance that one row holds two tokens so far apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers import make_sampler
from pose_plugin.positions.settings import PositionSettings
from pose_plugin.positions.windows import lay_out
from pose_plugin.utils.errors import PoSEError

# Coverage keeps one number per distance in memory.
MOST_POSITIONS = 1 << 24
# Above this many chunks, listing the pairs of chunks costs more than an autocorrelation.
_MOST_CHUNKS_FOR_INTERVALS = 32


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
    settings: PositionSettings

    def after(self, rows: int) -> np.ndarray:
        """Return the expected number of rows that hold each distance after training on `rows` rows, shape (L_t,)."""
        return self.probability * rows

    def table(self, distances: list[int] | None = None) -> str:
        """Return two lines of text: distances, and their chances."""
        target = self.settings.target_length
        window = self.settings.train_length or target
        marks = {window // 2, 3 * window // 4, window - 1, target // 4, target // 2, target - window, target - 1}
        chosen = sorted({d for d in (distances or marks) if 0 < d < target})
        cells = [(str(d), f"{self.probability[d]:.3f}") for d in chosen]
        widths = [max(len(a), len(b)) for a, b in cells]
        head = "  ".join(a.rjust(w) for (a, _), w in zip(cells, widths, strict=True))
        body = "  ".join(b.rjust(w) for (_, b), w in zip(cells, widths, strict=True))
        return f"distance  {head}\nchance    {body}"


def simulable(settings: PositionSettings) -> bool:
    """Return whether the target is small enough to count every distance below it in memory."""
    return settings.target_length + settings.target_margin <= MOST_POSITIONS


def many_chunks(settings: PositionSettings) -> bool:
    """Return whether a simulated row costs about a hundred times the usual, as it has too many chunks for intervals.

    Args:
        settings: with `train_length`.
    """
    size = settings.train_length or settings.target_length
    return _most_chunks(settings, size, _borders(settings, size)) > _MOST_CHUNKS_FOR_INTERVALS


def coverage(
    settings: PositionSettings, window: int | None = None, draws: int = 8000, seed: int = 0, every: int | None = None
) -> Coverage:
    """Simulate rows of `window` tokens and count which distances each of them holds.

    Compare Figure 5 of the PoSE paper (arXiv 2309.10400).

    Args:
        settings: sampler, lengths and options; content `aligned` is simulated on documents as long as the target.
        window: n in tokens; default `settings.train_length`.
        draws: rows to simulate; the standard error of a chance p is √(p(1−p)/draws).
        seed: of the simulation.
        every: for samplers that jump at borders: tokens from one border of the simulated rows to the next; default:
            the sampler's `usual_spacing`. Real borders depend on the data.

    Raises:
        PoSEError: neither `window` nor `train_length` is given, or the target is too large to simulate.

    Example:
        >>> seen = coverage(PoSESettings(target_length=16384, train_length=2048))
        >>> seen.probability[[1024, 8192]].round(2)
        array([1.  , 0.14])
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
    borders = _borders(settings, size, every)
    chunks = _most_chunks(settings, size, borders)
    by_intervals = chunks <= _MOST_CHUNKS_FOR_INTERVALS
    # Rows at a time, so that the arrays of a step stay within some megabytes.
    step = max(1, min(draws, (1 << 20) // (chunks * chunks if by_intervals else 4 * target)))
    for begin in range(0, draws, step):
        rows = min(step, draws - begin)
        windows = np.full(rows, size, dtype=np.int64)
        documents = np.full(rows, max(size, target), dtype=np.int64)
        offered = None if borders is None else [borders] * rows
        layout, _ = lay_out(documents, windows, Draws(generator, rows), settings, offered)
        if by_intervals:
            counts += _count_by_intervals(layout, target)
        else:
            counts += _count_by_autocorrelation(layout, target)
    return Coverage(counts[:target] / draws, draws, settings)


def _borders(settings: PositionSettings, window: int, every: int | None = None) -> np.ndarray | None:
    """Return the borders of a simulated row, or None for samplers that cut anywhere."""
    sampler = make_sampler(settings)
    if sampler.border_finder is None:
        return None
    every = every or sampler.usual_spacing(window)
    return np.arange(every, window, every)


def _most_chunks(settings: PositionSettings, window: int, borders: np.ndarray | None) -> int:
    return make_sampler(settings).most_chunks(window, 0 if borders is None else len(borders))


def _count_by_intervals(layout: Layout, target: int) -> np.ndarray:
    """Count the rows per distance, shape (target + 1,): a pair of chunks holds one interval of distances."""
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
    # Union of intervals: each one counts only from where the earlier ones have ended.
    reached = np.maximum.accumulate(np.concatenate([np.zeros((layout.rows, 1), np.int64), highs], 1), axis=1)
    lows = np.maximum(lows, reached[:, :-1] + 1)
    valid = lows <= highs
    lows, highs = np.minimum(lows[valid], target), np.minimum(highs[valid] + 1, target)
    steps = np.zeros(target + 1)
    np.add.at(steps, lows, 1)
    np.add.at(steps, highs, -1)
    return np.cumsum(steps)


def _count_by_autocorrelation(layout: Layout, target: int) -> np.ndarray:
    """Count the same for many chunks: a row holds d if the indicator of its positions overlaps itself shifted by d."""
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
