"""Which distances the settings train: the chance that one row holds two tokens so far apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from tqdm import tqdm

from pose_plugin.positions.draws import even_draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers import make_sampler
from pose_plugin.positions.settings import PositionSettings
from pose_plugin.positions.windows import lay_out
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.tables import columns

# Coverage keeps one number per distance in memory.
MOST_POSITIONS = 1 << 24


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
        chosen = [
            d for d in distances or usual_distances(target, self.settings.train_length or target) if 0 < d < target
        ]
        return _table(chosen, self.probability[chosen])


def simulable(settings: PositionSettings) -> bool:
    """Return whether the target is small enough to count every distance below it in memory."""
    return settings.target_length + settings.target_margin <= MOST_POSITIONS


def require_simulable(settings: PositionSettings) -> None:
    """Raise PoSEError unless `simulable`."""
    if not simulable(settings):
        raise PoSEError(
            f"target_length={settings.target_length} and target_margin={settings.target_margin} are together more than "
            f"the {MOST_POSITIONS} positions that can be simulated; divide all lengths by the same number"
        )


def affordable_draws(settings: PositionSettings, most: int) -> int:
    """Return how many rows take about ten seconds to simulate, at least 20 and at most `most`.

    Args:
        settings: with `train_length`.
        most: rows that suffice.
    """
    size = settings.train_length or settings.target_length
    chunks = _most_chunks(settings, size, _borders(settings, size))
    # A row with few chunks takes as long as drawing it; measured in pairs of chunks.
    target = settings.target_length
    cost = max(chunks * chunks if _by_intervals(chunks, target) else 4 * target, 200)
    return max(20, min(most, (1 << 28) // cost))


def sketch(settings: PositionSettings) -> str:
    """Return the table of `Coverage.table` for a few distances, in a time that does not depend on the target.

    Args:
        settings: with `train_length`.
    """
    window = settings.train_length
    assert window is not None
    distances = usual_distances(settings.target_length, window)
    draws = max(50, min(500, (1 << 21) // window))
    counts = np.zeros(len(distances))
    for layout in _layouts(settings, window, draws, _borders(settings, window)):
        positions = layout.position_ids()
        for i, distance in enumerate(distances):
            # Where the partner of each position would be, if the row holds it.
            at = np.searchsorted(positions, positions + distance)
            counts[i] += bool((positions[np.minimum(at, len(positions) - 1)] == positions + distance).any())
    return _table(distances, _with_plain_rows(counts / draws, np.array(distances), settings, window))


def usual_distances(target: int, window: int) -> list[int]:
    """Return distances around the trained window and the target, all in tokens."""
    marks = {window // 2, 3 * window // 4, window - 1, target // 4, target // 2, 3 * target // 4}
    marks |= {target - window, target - window // 2, target - 1}
    return sorted(d for d in marks if 0 < d < target)


def coverage(
    settings: PositionSettings,
    window: int | None = None,
    draws: int = 8000,
    seed: int = 0,
    every: int | None = None,
    progress: bool = False,
) -> Coverage:
    """Simulate rows of `window` tokens and count which distances each of them holds.

    Compare Figure 5 of the PoSE paper (arXiv 2309.10400).

    Args:
        settings: sampler, lengths and options; content `aligned` is simulated on documents as long as the target.
        window: n in tokens; default `settings.train_length`.
        draws: rows to simulate; the standard error of a chance p is at most about √(p(1−p)/draws), and much less with
            few chunks, because the rows are spread evenly.
        seed: of the simulation.
        every: for samplers that jump at borders: tokens from one border of the simulated rows to the next; default:
            the sampler's `usual_spacing`. Real borders depend on the data.
        progress: whether to show a progress bar.

    Raises:
        PoSEError: neither `window` nor `train_length` is given, or the target is too large to simulate.

    Examples:
        >>> seen = coverage(PoSESettings(target_length=16384, train_length=2048))
        >>> seen.probability[[1024, 8192]].round(2)
        array([1.  , 0.14])
    """
    size = window or settings.train_length
    if size is None:
        raise PoSEError("coverage needs a window: set train_length, the trained window in tokens, or pass window=")
    target = settings.target_length
    require_simulable(settings)
    borders = _borders(settings, size, every)
    chunks = _most_chunks(settings, size, borders)
    # None shows the bar in a terminal only.
    hidden = None if progress else True
    layouts = tqdm(_layouts(settings, size, draws, borders, seed), "rows", draws, disable=hidden, leave=False)
    by_intervals = _by_intervals(chunks, target)
    # Rows at a time, so that the arrays of a step stay within some megabytes.
    step = max(1, (1 << 18) // (chunks * chunks)) if by_intervals else 1
    counts = np.zeros(target + 1)
    for some in _in_turns(layouts, step):
        counts += _count_by_intervals(some, target) if by_intervals else _count_by_autocorrelation(some[0], target)
    chances = _with_plain_rows(counts[:target] / draws, np.arange(target), settings, size)
    chances[0] = 0
    return Coverage(chances, draws, settings)


def _layouts(
    settings: PositionSettings, window: int, draws: int, borders: np.ndarray | None, seed: int = 0
) -> Iterator[Layout]:
    """Yield the layouts of simulated rows that are not plain."""
    sampler = make_sampler(settings)
    size = max(window, settings.target_length)
    for numbers in even_draws(seed, draws):
        yield lay_out(size, window, numbers, settings, sampler, borders)[0]


def _with_plain_rows(chances: np.ndarray, distances: np.ndarray, settings: PositionSettings, window: int) -> np.ndarray:
    """Return the chances of all rows from those of rows that are not plain."""
    return settings.unskipped_ratio * (distances < window) + (1 - settings.unskipped_ratio) * chances


def _in_turns(layouts: Iterable[Layout], step: int) -> Iterator[list[Layout]]:
    each = iter(layouts)
    while some := list(islice(each, step)):
        yield some


def _table(distances: list[int], chances: np.ndarray) -> str:
    return columns([["distance", *map(str, distances)], ["chance", *(f"{chance:.3f}" for chance in chances)]])


def _borders(settings: PositionSettings, window: int, every: int | None = None) -> np.ndarray | None:
    """Return the borders of a simulated row, or None for samplers that cut anywhere."""
    sampler = make_sampler(settings)
    if sampler.border_finder is None:
        return None
    every = every or sampler.usual_spacing(window)
    return np.arange(every, window, every)


def _most_chunks(settings: PositionSettings, window: int, borders: np.ndarray | None) -> int:
    return make_sampler(settings).most_chunks(window, 0 if borders is None else len(borders))


def _by_intervals(chunks: int, target: int) -> bool:
    """Return whether listing the pairs of chunks costs less than an autocorrelation over the target."""
    return chunks * chunks <= 2 * target


def _count_by_intervals(layouts: Sequence[Layout], target: int) -> np.ndarray:
    """Count the rows per distance, shape (target + 1,): a pair of chunks holds one interval of distances."""
    chunks = max(len(layout.lengths) for layout in layouts)
    lengths, first = np.zeros((2, len(layouts), chunks), dtype=np.int64)
    for row, layout in enumerate(layouts):
        lengths[row, : len(layout.lengths)] = layout.lengths
        first[row, : len(layout.skips)] = layout.skips
    first += np.cumsum(lengths, axis=1) - lengths
    last = first + lengths - 1
    i, j = np.triu_indices(chunks)
    present = (lengths[:, i] > 0) & (lengths[:, j] > 0)
    # An absent chunk gives an empty interval.
    lows = np.where(present, np.where(i == j, 1, first[:, j] - last[:, i]), 1)
    highs = np.where(present, last[:, j] - first[:, i], 0)
    order = np.argsort(lows, axis=1)
    lows, highs = np.take_along_axis(lows, order, 1), np.take_along_axis(highs, order, 1)
    # Union of intervals: each one counts only from where the earlier ones have ended.
    reached = np.maximum.accumulate(np.pad(highs, ((0, 0), (1, 0))), axis=1)
    lows = np.maximum(lows, reached[:, :-1] + 1)
    valid = lows <= highs
    steps = np.bincount(np.minimum(lows[valid], target), minlength=target + 1).astype(np.float64)
    steps -= np.bincount(np.minimum(highs[valid] + 1, target), minlength=target + 1)
    return np.cumsum(steps)


def _count_by_autocorrelation(layout: Layout, target: int) -> np.ndarray:
    """Count the same for one row with many chunks: it holds d if its positions, shifted by d, overlap themselves."""
    counts = np.zeros(target + 1)
    positions = layout.position_ids()
    reach = int(positions[-1]) + 1
    # A power of two, as other lengths take several times longer.
    size = 1 << (2 * reach - 1).bit_length()
    used = np.zeros(size)
    used[positions] = 1
    spectrum = np.fft.rfft(used)
    overlap = np.fft.irfft(spectrum * np.conj(spectrum))[: min(reach, target)]
    counts[: len(overlap)] = overlap > 0.5
    counts[0] = 0
    return counts
