"""CREAM: three segments, the middle one drawn from the middle of the window (arXiv 2406.07138)."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from pose_plugin.positions.chunks import SamplerOptions
from pose_plugin.positions.draws import Draws, integers
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.bordered import Borders

# Width of the Gaussian, in trained windows.
SIGMA = 3.0
_NORMAL = NormalDist()


def cream(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """Head at 0, tail at the end of the target, and between them a middle whose end is drawn by a truncated Gaussian.

        n = 12, L_t = 48   |head    |        |middle  |             |tail    |
                            0 1 2 3           17 … 20                44 … 47

    Half of the rows have a head and a tail of n/3 tokens each (continuity), half of 4·L_t/n each (relativity, where
    nearly all tokens are in the middle). The end of the middle lies within α windows, α from a Gaussian around the
    centre (1 + L_t/n)/2 with σ = 3, cut off at 1 and L_t/n: uniform from head + (middle − 1)·α to α·n − tail − 1.

    Args:
        windows: n, tokens of each row, shape (rows,); rows below three tokens stay plain.
        targets: positions available to each row, at least n, shape (rows,).
        draws: randomness for `rows` rows.
        options: not read; there are three segments.
    """
    windows, targets = windows.astype(np.int64), targets.astype(np.int64)
    uniform = draws.uniform(3)
    third = windows // 3
    short = np.minimum(4 * (targets // np.maximum(windows, 1)), third)
    ends = np.where(uniform[:, 0] < 0.5, third, short)
    middle = windows - 2 * ends
    stretch = targets / np.maximum(windows, 1)
    alpha = np.array([_truncated(u, float(s)) for u, s in zip(uniform[:, 1], stretch, strict=True)])
    low = np.floor(ends + (middle - 1) * alpha).astype(np.int64)
    high = np.maximum(np.floor(alpha * windows).astype(np.int64) - ends - 1, low)
    free = targets - windows
    skip = np.clip(integers(uniform[:, 2], low, high) - (ends + middle - 1), 0, free)
    apart = ends > 0
    lengths = np.stack([np.where(apart, ends, windows), np.where(apart, middle, 0), ends], axis=1)
    skips = np.stack([np.zeros_like(skip), np.where(apart, skip, 0), np.where(apart, free, 0)], axis=1)
    return Layout(lengths, skips)


def _truncated(uniform: float, stretch: float) -> float:
    """A number of [1, stretch] from a Gaussian around the middle, by its inverse distribution function."""
    centre = (1 + stretch) / 2
    first, last = (_NORMAL.cdf((end - centre) / SIGMA) for end in (1.0, stretch))
    share = first + uniform * (last - first)
    # Far out the distribution function is 0 or 1 in floats, and has no inverse there.
    value = centre + SIGMA * _NORMAL.inv_cdf(min(max(share, 1e-300), 1 - 1e-16))
    return min(max(value, 1.0), stretch)
