from __future__ import annotations

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.positions import SAMPLERS, affordable_draws, coverage, sketch
from pose_plugin.positions.coverage import _count_by_autocorrelation, _count_by_intervals
from pose_plugin.positions.draws import even_draws
from pose_plugin.utils.lengths import LONGEST
from tests.positions.test_samplers import sample

DISTANCES = [1024, 1536, 2047, 4096, 8192, 14336, 15360, 16000, 16380]
# Chance that one example holds a pair at each distance; L_c = 2048, L_t = 16384.
PUBLISHED = {
    ("pose", "reference"): [1.00, 0.55, 0.14, 0.15, 0.14, 0.15, 0.08, 0.03, 0.00],
    ("pose", "paper"): [1.00, 0.55, 0.14, 0.15, 0.13, 0.14, 0.07, 0.03, 0.00],
    ("clamped", "paper"): [1.00, 0.58, 0.22, 0.12, 0.11, 0.11, 0.17, 0.13, 0.11],
}


def settings(**changes):
    return parse_settings({"target_length": 16384, "train_length": 2048, **changes})


@pytest.mark.parametrize("sampler, variant", PUBLISHED)
def test_coverage_of_two_chunks_from_2k_to_16k(sampler, variant):
    seen = coverage(settings(sampler=sampler, variant=variant), draws=8000).probability[DISTANCES]
    # Both are simulated with 8000 draws: up to 0.0055 standard error each, and two decimals.
    assert np.abs(seen - PUBLISHED[sampler, variant]).max() < 0.03


def exact_two_chunks(window: int, target: int) -> np.ndarray:
    """P(d ≤ max(l0, l1) − 1 or u + 1 ≤ d ≤ u + n − 1); l0 and u are independent, and only the first part has l0."""
    distance = np.arange(target)
    longest = np.maximum(np.arange(1, window), window - np.arange(1, window))
    near = np.array([(longest > d).mean() for d in distance])
    first, last = np.maximum(distance - window + 1, 0), np.minimum(distance - 1, target - window)
    far = np.maximum(last - first + 1, 0) / (target - window + 1)
    chance = 1 - (1 - near) * (1 - far)
    chance[0] = 0
    return chance


def test_simulation_agrees_with_the_closed_form():
    seen = coverage(parse_settings({"target_length": 256, "train_length": 32}), draws=20000).probability
    # 20000 draws: 0.0035 standard error at most; 256 distances.
    assert np.abs(seen[1:] - exact_two_chunks(32, 256)[1:]).max() < 0.015


@pytest.mark.parametrize("target, window, ratio", [(2**18, 4096, 0), (2**17, 4096, 0.5), (2**20, 8192, 0.1)])
def test_the_rarest_distance_is_not_the_unluckiest(target, window, ratio):
    """The minimum of noisy chances would be too small: 0.52 of the truth for 4000 independent rows of 256K tokens."""
    chosen = parse_settings({"target_length": target, "train_length": window, "unskipped_ratio": ratio})
    rarest = coverage(chosen, draws=8000).probability[1 : target - window].min()
    # Of the distances that the window does not hold.
    assert rarest == pytest.approx((1 - ratio) * (window - 1) / (target - window + 1), rel=0.04)


def test_plain_rows_are_counted_without_noise():
    rest, all_rows = (coverage(settings(unskipped_ratio=ratio), draws=50).probability for ratio in (0, 0.25))
    plain = coverage(settings(sampler="none"), draws=1).probability
    assert all_rows == pytest.approx(0.25 * plain + 0.75 * rest)


def test_even_draws_fill_every_range_and_no_two_numbers_of_a_row_go_together():
    drawn = np.array([[draws.uniform() for _ in range(9)] for draws in even_draws(3, 1000)])
    assert (np.sort(np.floor(drawn * 1000), axis=0) == np.arange(1000)[:, None]).all()
    # Standard error 0.03 for each of the 36 pairs.
    assert np.abs(np.corrcoef(drawn.T) - np.eye(9)).max() < 0.13
    again, other = (next(even_draws(seed, 1000)).uniform() for seed in (3, 4))
    assert again == drawn[0, 0] != other


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_intervals_count_what_listing_all_pairs_counts(chunks):
    layouts = sample(60, window=20, target=90, chunks=chunks)
    listed = np.zeros(91)
    for layout in layouts:
        positions = layout.position_ids()
        for distance in {int(b - a) for a in positions for b in positions if b > a}:
            listed[distance] += 1
    assert _count_by_intervals(layouts, 90)[:90].tolist() == listed[:90].tolist()
    assert sum(_count_by_autocorrelation(each, 90) for each in layouts)[:90].tolist() == listed[:90].tolist()


def test_no_skip_covers_the_window_and_nothing_else():
    seen = coverage(settings(sampler="none"), draws=10).probability
    assert (seen[1:2048] == 1).all() and (seen[2048:] == 0).all()


def test_margin_lifts_the_last_distances():
    plain = coverage(settings(), draws=4000).probability[16000]
    wide = coverage(settings(target_margin=2048), draws=4000).probability[16000]
    assert plain < 0.05 < 0.1 < wide


def test_table_and_rows():
    result = coverage(settings(), draws=2000)
    head, body = result.table([1024, 16000]).splitlines()
    assert head.split() == ["distance", "1024", "16000"]
    assert body.split()[0] == "chance" and 0.99 < float(body.split()[1]) <= 1
    assert result.after(100)[1024] == pytest.approx(100 * result.probability[1024])


def test_turns_of_half_a_window_are_fixed_halves():
    """The chances of Axolotl's built-in PoSE, which has one fixed border, as measured there."""
    seen = coverage(settings(sampler="turns"), draws=8000, every=1024).probability[DISTANCES]
    fixed = [0.08, 0.11, 0.15, 0.14, 0.14, 0.14, 0.07, 0.03, 0.00]
    assert np.abs(seen - fixed).max() < 0.02


def test_sentences_spread_over_everything_and_creams_tail_reaches_the_end():
    spread = coverage(settings(sampler="sentences"), draws=60).probability
    assert spread[1] == 1 and spread[DISTANCES[:5]].min() > 0.95
    cream = coverage(settings(sampler="cream"), draws=3000).probability
    # Half of the rows have ends of 682 tokens, half of 32: from head to tail all hold the farthest distances.
    assert cream[16383] == 1 and cream[16384 - 33] == 1 and abs(cream[16384 - 800] - 0.5) < 0.05


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sketch_agrees_with_the_whole_table(sampler):
    chosen = parse_settings({"target_length": 512, "train_length": 64, "sampler": sampler})
    head, body = sketch(chosen).splitlines()
    distances = [int(cell) for cell in head.split()[1:]]
    whole = coverage(chosen, draws=4000).probability[distances]
    # 500 rows: 0.022 standard error at most.
    assert np.abs(np.array(body.split()[1:], dtype=float) - whole).max() < 0.09


@pytest.mark.parametrize("changes", [{"sampler": "randpos"}, {"chunks": 64}, {"sampler": "sentences"}])
def test_a_sketch_never_makes_arrays_as_long_as_the_target(changes, monkeypatch):
    """The log shows it at the start of every run, whose target may be of any length."""
    chosen = parse_settings({"target_length": LONGEST, "train_length": 64, **changes})

    def no_fourier_transform(*args):
        raise AssertionError("work that grows with the target")

    monkeypatch.setattr(np.fft, "rfft", no_fourier_transform)
    assert sketch(chosen).splitlines()[0].split()[-1] == str(LONGEST - 1)


def test_fewer_rows_are_simulated_the_more_each_costs():
    assert affordable_draws(settings(), 8000) == 8000
    randpos = [affordable_draws(settings(sampler="randpos", target_length=t), 8000) for t in (16384, 2**20, 2**24)]
    assert randpos == [4096, 64, 64]
