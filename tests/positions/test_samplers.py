from __future__ import annotations

import itertools

import numpy as np
import pytest

from pose_plugin.positions import SAMPLERS, Draws, Row
from pose_plugin.positions.layout import Layout


def sample(
    rows: int = 400, window: int = 64, target: int = 512, sampler: str = "pose", borders=None, **options
) -> list[Layout]:
    kind = SAMPLERS[sampler]
    make = kind(**{name: value for name, value in options.items() if name in kind.options()})
    return [make(Row(window, target, borders), Draws(0, 0, row)) for row in range(rows)]


def stacked(layouts: list[Layout]) -> tuple[np.ndarray, np.ndarray]:
    """The lengths and the skips, shape (rows, chunks) each."""
    return np.array([layout.lengths for layout in layouts]), np.array([layout.skips for layout in layouts])


@pytest.mark.parametrize("kind", [list, np.array])
def test_layout_writes_positions_as_in_the_paper(kind):
    assert Layout(kind([3, 5]), kind([0, 10])).position_ids().tolist() == [0, 1, 2, 13, 14, 15, 16, 17]
    many = Layout(kind([1, 2, 1, 0, 2, 1]), kind([0, 0, 3, 3, 5, 9]))
    assert many.position_ids().tolist() == [0, 1, 2, 6, 9, 10, 15]


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize(
    "window, target, chunks",
    [(64, 512, 2), (64, 512, 1), (64, 512, 3), (64, 512, 5), (64, 512, 64), (64, 512, 65), (64, 64, 2), (1, 9, 2)],
)
def test_positions_increase_from_zero_to_below_the_target(sampler, window, target, chunks):
    for layout in sample(200, window, target, sampler, chunks=chunks):
        assert sum(layout.lengths) == window
        positions = layout.position_ids()
        assert positions.shape == (window,)
        assert (sampler == "randpos") or positions[0] == 0
        assert (np.diff(positions) > 0).all()
        assert positions[-1] < target


def test_chunks_are_as_many_as_asked_or_as_tokens_allow():
    for window, chunks in ((3, 3), (50, 5), (1, 1)):
        (layout,) = sample(1, window, 100, chunks=5)
        assert len(layout.lengths) == chunks and min(layout.lengths) >= 1 and sum(layout.lengths) == window


def test_first_chunk_lengths_are_uniform_and_the_reference_variant_stops_at_half():
    lengths = stacked(sample(20000, window=8))[0][:, 0]
    shares = np.bincount(lengths, minlength=9)[1:8] / 20000
    # Standard error 0.0025 each.
    assert np.abs(shares - 1 / 7).max() < 0.012
    assert {layout.lengths[0] for layout in sample(2000, window=8, variant="reference")} == {1, 2, 3, 4}


def test_skips_are_uniform_on_what_the_target_leaves():
    skips = stacked(sample(20000, window=6, target=10))[1][:, 1]
    assert np.abs(np.bincount(skips, minlength=5) / 20000 - 0.2).max() < 0.015


def test_skips_of_three_chunks_follow_one_another():
    skips = stacked(sample(30000, window=6, target=8, chunks=3))[1]
    expected = {(u1, u2): 1 / 3 / (3 - u1) for u1 in range(3) for u2 in range(u1, 3)}
    for (u1, u2), share in expected.items():
        seen = ((skips[:, 1] == u1) & (skips[:, 2] == u2)).mean()
        assert abs(seen - share) < 0.015, (u1, u2)


def test_clamped_leaves_its_share_plain_and_reaches_the_end():
    skips = stacked(sample(20000, window=64, target=512, sampler="clamped"))[1][:, 1]
    # U{-64 … 512} has 577 values: 65 clamp to 0, 65 clamp to 448.
    assert abs((skips == 0).mean() - 65 / 577) < 0.012
    assert abs((skips == 448).mean() - 65 / 577) < 0.012


def test_randpos_draws_every_subset_alike():
    seen = [tuple(layout.position_ids()) for layout in sample(12000, window=2, target=4, sampler="randpos")]
    for subset in itertools.combinations(range(4), 2):
        assert abs(seen.count(subset) / len(seen) - 1 / 6) < 0.02


def test_draws_never_leave_their_range():
    draws = Draws(0, 0, 0)
    for bits, low, high in ((0, -3, 5), (2**64 - 1, -3, 5)):
        draws._left = [bits] * 3
        assert draws.integer(low, high) == (low if bits == 0 else high)
        assert draws.integer(7, 7) == 7
        assert 0 <= draws.uniform() < 1


def test_a_document_can_draw_any_number_of_numbers():
    draws = Draws(3, 1, 7)
    drawn = np.array([draws.uniform() for _ in range(20000)])
    # Standard error 0.002.
    assert len(set(drawn)) == 20000 and abs(drawn.mean() - 0.5) < 0.008


def test_three_clamped_chunks_stay_in_order_and_reach_both_ends():
    skips = stacked(sample(20000, window=64, target=512, sampler="clamped", chunks=3))[1]
    assert (skips[:, 0] == 0).all() and (np.diff(skips, axis=1) >= 0).all()
    assert abs((skips[:, 1:] == 0).mean() - 65 / 577) < 0.012
    assert abs((skips[:, 1:] == 448).mean() - 65 / 577) < 0.012
