from __future__ import annotations

import itertools

import numpy as np
import pytest

from pose_plugin.positions import SAMPLERS, Draws, Rows
from pose_plugin.positions.draws import integers
from pose_plugin.positions.layout import Layout


def sample(rows: int = 400, window: int = 64, target: int = 512, sampler: str = "pose", seed: int = 0, **options):
    kind = SAMPLERS[sampler]
    read = {name: value for name, value in options.items() if name in kind.options()}
    return kind(**read)(Rows(np.full(rows, window), np.full(rows, target)), Draws(np.random.default_rng(seed), rows))


def test_layout_writes_positions_as_in_the_paper():
    layout = Layout(np.array([[3, 5]]), np.array([[0, 10]]))
    assert layout.starts.tolist() == [[0, 3]]
    assert layout.position_ids(0).tolist() == [0, 1, 2, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize(
    "window, target, chunks",
    [(64, 512, 2), (64, 512, 1), (64, 512, 3), (64, 512, 5), (64, 512, 64), (64, 512, 65), (64, 64, 2), (1, 9, 2)],
)
def test_positions_increase_from_zero_to_below_the_target(sampler, window, target, chunks):
    layout = sample(200, window, target, sampler, chunks=chunks)
    assert (layout.lengths.sum(axis=1) == window).all()
    for row in range(layout.rows):
        positions = layout.position_ids(row)
        assert positions.shape == (window,)
        assert (sampler == "randpos") or positions[0] == 0
        assert (np.diff(positions) > 0).all()
        assert positions[-1] < target


def test_chunks_are_as_many_as_asked_or_as_tokens_allow():
    rows = Rows(np.array([3, 50, 1]), np.full(3, 100))
    layout = SAMPLERS["pose"](chunks=5)(rows, Draws(np.random.default_rng(0), 3))
    assert (layout.lengths > 0).sum(axis=1).tolist() == [3, 5, 1]
    assert layout.lengths.sum(axis=1).tolist() == [3, 50, 1]


def test_first_chunk_lengths_are_uniform_and_the_reference_variant_stops_at_half():
    lengths = sample(20000, window=8).lengths[:, 0]
    shares = np.bincount(lengths, minlength=9)[1:8] / 20000
    # Standard error 0.0025 each.
    assert np.abs(shares - 1 / 7).max() < 0.012
    assert set(sample(2000, window=8, variant="reference").lengths[:, 0]) == {1, 2, 3, 4}


def test_skips_are_uniform_on_what_the_target_leaves():
    skips = sample(20000, window=6, target=10).skips[:, 1]
    assert np.abs(np.bincount(skips, minlength=5) / 20000 - 0.2).max() < 0.015


def test_skips_of_three_chunks_follow_one_another():
    skips = sample(30000, window=6, target=8, chunks=3).skips
    expected = {(u1, u2): 1 / 3 / (3 - u1) for u1 in range(3) for u2 in range(u1, 3)}
    for (u1, u2), share in expected.items():
        seen = ((skips[:, 1] == u1) & (skips[:, 2] == u2)).mean()
        assert abs(seen - share) < 0.015, (u1, u2)


def test_clamped_leaves_its_share_plain_and_reaches_the_end():
    skips = sample(20000, window=64, target=512, sampler="clamped").skips[:, 1]
    # U{-64 … 512} has 577 values: 65 clamp to 0, 65 clamp to 448.
    assert abs((skips == 0).mean() - 65 / 577) < 0.012
    assert abs((skips == 448).mean() - 65 / 577) < 0.012


def test_randpos_draws_every_subset_alike():
    layout = sample(12000, window=2, target=4, sampler="randpos")
    seen = [tuple(layout.position_ids(row)) for row in range(layout.rows)]
    for subset in itertools.combinations(range(4), 2):
        assert abs(seen.count(subset) / len(seen) - 1 / 6) < 0.02


def test_integers_never_leave_their_range():
    almost = np.full(3, np.nextafter(1.0, 0.0))
    assert integers(almost, np.array([0, 5, -3]), np.array([2**52, 5, -1])).tolist() == [2**52, 5, -1]
    assert integers(np.zeros(2), np.array([0, 7]), np.array([9, 7])).tolist() == [0, 7]
