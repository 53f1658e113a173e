from __future__ import annotations

from statistics import NormalDist

import numpy as np

from tests.positions.test_samplers import sample, stacked


def test_head_at_zero_and_tail_at_the_end_of_the_target():
    lengths, skips = stacked(sample(2000, window=60, target=600, sampler="cream"))
    shapes = {tuple(row) for row in lengths.tolist()}
    # Thirds; and with 4 · 600/60 = 40 tokens at each end nothing would be left of 60, so thirds again.
    assert shapes == {(20, 20, 20)}
    assert (skips[:, 0] == 0).all() and (skips[:, 2] == 540).all()


def test_half_of_the_rows_have_short_ends():
    lengths, _ = stacked(sample(4000, window=300, target=3000, sampler="cream"))
    short = lengths[:, 0] == 40
    assert {tuple(row) for row in lengths.tolist()} == {(100, 100, 100), (40, 220, 40)}
    # Standard error 0.008.
    assert abs(short.mean() - 0.5) < 0.035


def test_exact_positions():
    (layout,) = sample(1, window=12, target=48, sampler="cream")
    skip = layout.skips[1]
    assert layout.position_ids().tolist() == [0, 1, 2, 3, *range(4 + skip, 8 + skip), 44, 45, 46, 47]


def test_the_middle_ends_where_the_gaussian_says():
    """The end's place is 0 to 1 between the head and the tail; its mean follows from the mean of α by symmetry."""
    lengths, skips = stacked(sample(20000, window=600, target=600 * 32, sampler="cream"))
    thirds = lengths[:, 0] == 200
    end = (skips[thirds, 1] + 400) / 600
    assert (skips[:, 1] >= 0).all() and (skips[:, 1] <= 600 * 31).all()
    # E: uniform from 1/3 + α/3 to α − 1/3 with α around 16.5 and σ 3.
    assert abs(end.mean() - (16.5 * 4 / 3) / 2) < 0.1
    spread = NormalDist(16.5, 3)
    low, high = (spread.inv_cdf(q) for q in (0.001, 0.999))
    assert ((end > low / 3) & (end < high)).mean() > 0.995


def test_rows_too_short_for_three_parts_stay_plain():
    lengths, skips = stacked(sample(5, window=2, target=64, sampler="cream"))
    assert (skips == 0).all() and lengths.tolist() == [[2]] * 5


def test_a_long_stretch_has_a_distribution_function_of_zero():
    _, skips = stacked(sample(50, window=12, target=12 * 1000, sampler="cream"))
    assert (np.diff(skips, axis=1) >= 0).all()
