"""CREAM: three segments, the middle one drawn from the middle of the target (arXiv 2406.07138)."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from statistics import NormalDist

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.base import Row, Sampler

# Standard deviation of the Gaussian, in trained windows (the paper's σ).
SIGMA = 3.0
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Cream(Sampler):
    """Head at 0, tail at the end of the target, and a middle between them whose end follows a truncated Gaussian.

        n = 12, L_t = 48   |head    |        |middle  |             |tail    |
                            0 1 2 3           17 … 20                44 … 47

    Half of the rows have a head and a tail of n/3 tokens each (continuity), half of 4·L_t/n each (relativity: nearly
    all tokens are in the middle). The middle ends within α windows, with α from a Gaussian around (1 + L_t/n)/2 with
    σ = 3, cut off at 1 and L_t/n: uniform from head + (middle − 1)·α to α·n − tail − 1. Rows below three tokens stay
    plain.
    """

    name = "cream"

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return 3

    def __call__(self, row: Row, draws: Draws) -> Layout:
        window, free = row.window, row.target - row.window
        ends = window // 3
        if draws.uniform() >= 0.5:
            ends = min(4 * (row.target // window), ends)
        if not ends:
            return Layout([window], [0])
        middle = window - 2 * ends
        alpha = _truncated(draws.uniform(), row.target / window)
        low = floor(ends + (middle - 1) * alpha)
        last = draws.integer(low, max(floor(alpha * window) - ends - 1, low))
        skip = min(max(last - (ends + middle - 1), 0), free)
        return Layout([ends, middle, ends], [0, skip, free])


def _truncated(uniform: float, stretch: float) -> float:
    """Return a number of [1, stretch] from a Gaussian around the middle, by its inverse distribution function."""
    centre = (1 + stretch) / 2
    first, last = (_NORMAL.cdf((end - centre) / SIGMA) for end in (1.0, stretch))
    share = first + uniform * (last - first)
    # Far from the centre the distribution function rounds to 0 or 1, and has no inverse there.
    value = centre + SIGMA * _NORMAL.inv_cdf(min(max(share, 1e-300), 1 - 1e-16))
    return min(max(value, 1.0), stretch)
