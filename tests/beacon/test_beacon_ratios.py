"""What fits, what adapt chooses, and what training draws."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from pose_plugin.beacon.ratios import (
    CANDIDATES,
    BeaconWindow,
    StreamState,
    adapt,
    check_ratio,
    draw,
    fits,
    from_compression,
    generator,
    intervals,
    plan,
)
from pose_plugin.beacon.training import IntervalSampler, group_by_intervals, interval_count
from pose_plugin.utils.errors import PoSEError

LLAMA = BeaconWindow(4096, 1024)


@pytest.mark.parametrize(
    ("tokens", "pending", "expected"),
    [
        (0, 0, (0, 0)),
        (1, 0, (0, 1)),
        (4, 0, (0, 4)),  # a full interval with nothing behind it
        (5, 0, (1, 1)),
        (8, 0, (1, 4)),
        (9, 0, (2, 1)),
        (1, 4, (1, 1)),
        (4, 3, (1, 3)),
    ],
)
def test_intervals(tokens, pending, expected):
    assert intervals(tokens, 4, pending) == expected


CAPACITY = {2: 7168, 4: 13312, 8: 25600, 16: 50176, 32: 99328, 64: 197632, 128: 394240}


@pytest.mark.parametrize(("ratio", "tokens"), CAPACITY.items())
def test_adapt_takes_the_smallest_that_is_enough(ratio, tokens):
    """(L − l)·α + l ≥ tokens + 1024; the largest capacity is the paper's 400K."""
    assert LLAMA.capacity(ratio) == tokens
    assert adapt(LLAMA, tokens - 1024) == ratio
    if ratio < 128:
        assert adapt(LLAMA, tokens - 1023) == 2 * ratio
    else:
        with pytest.raises(PoSEError, match=r"adapt finds no ratio for 393217 tokens.*394240"):
            adapt(LLAMA, tokens - 1023)


def test_adapt_uses_the_headroom_of_a_stream_that_has_begun():
    """A stream keeps its ratio while that fits, then uses larger ones, and does not return to a smaller one."""
    assert adapt(LLAMA, 2048, state=StreamState(memory=2048)) == 2
    assert adapt(LLAMA, 2048, state=StreamState(memory=2560)) == 4
    assert adapt(LLAMA, 1048, state=StreamState(memory=2560, pending=1000)) == 4
    assert adapt(LLAMA, 2048, state=StreamState(at_least=16)) == 16
    # Later calls may use what the first call kept free.
    assert adapt(LLAMA, 2048, state=StreamState(memory=3064)) == 128
    with pytest.raises(PoSEError, match="after 3072 beacons"):
        adapt(LLAMA, 1025, state=StreamState(memory=3072))


def test_adapt_counts_the_open_interval_with_the_ratio_that_it_has_begun_with():
    """Behind its 6 beacons and 3 raw tokens, 12 tokens and their beacons fill the window of 24 at ratio 4, not at 3."""
    window = BeaconWindow(24, 12, interleaved=True, overlap=3)
    begun = StreamState(pending=11, open_ratio=2)
    assert plan(window, "adapt", 14, begun, (2, 3, 4, 6), headroom=0) == [2, 4, 4]
    assert plan(window, "adapt", 14, StreamState(pending=11, open_ratio=6), (2, 6), headroom=0) == [6, 6, 6]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_capacity_is_what_fits_to_the_token(interleaved):
    for size, interval, overlap, memory in itertools.product((17, 30, 43), (4, 8), (0, 3), (0, 4)):
        window = BeaconWindow(size, interval, interleaved, overlap)
        for ratio in (2, 4):
            most = window.capacity(ratio, memory)
            for tokens, expected in ((most, True), (most + 1, False)):
                condensed, last = intervals(tokens, interval)
                assert fits(window, [ratio] * (condensed + interleaved), last, memory) is expected


def test_a_full_window_raises():
    """8192 tokens at ratio 2 would reach position 4608 in a window of 4096."""
    assert not fits(LLAMA, [2] * 7, 1024)
    assert fits(LLAMA, [2] * 6, 1024)
    with pytest.raises(PoSEError, match=r"window: 4096 positions are full: 3584 rows of memory.*ratio='adapt'"):
        plan(LLAMA, 2, 8192)
    assert plan(LLAMA, 2, 7168) == [2] * 6


def test_fit_to_the_position():
    """m + l ≤ L − 1 before an interval that condenses, m + n ≤ L for the last one. L = 11, l = 4, ratio 2."""
    window = BeaconWindow(11, 4)
    assert fits(window, [2, 2, 2, 2], 3)  # m = 0, 2, 4, 6 → 6 + 4 ≤ 10, then 8 + 3 ≤ 11
    assert not fits(window, [2, 2, 2, 2], 4)
    assert not fits(window, [2, 2, 2, 2, 2], 1)  # 8 + 4 > 10
    assert not fits(BeaconWindow(10, 4), [2, 2, 2, 2], 1)


def test_interleaved_fit_counts_the_beacons():
    window = BeaconWindow(11, 4, interleaved=True)
    # One ratio more, of the open interval: memory of 6, four raw tokens, one beacon between them.
    assert fits(window, [2, 2, 2, 2], 4)
    assert not fits(BeaconWindow(10, 4, interleaved=True), [2, 2, 2, 2], 4)
    assert not fits(window, [2, 2, 2, 2, 2], 1)  # 6 + 4 + 2 rows in the fourth


def test_draws_fit_and_use_what_fits():
    """8192 tokens: seven intervals condense into at most 3072 positions, so ratio 2 throughout is never drawn."""
    seen = set()
    for step in range(60):
        ratios = draw(LLAMA, 7, 1024, CANDIDATES, generator(0, step, 0))
        assert len(ratios) == 7
        assert fits(LLAMA, ratios, 1024)
        seen.update(ratios)
    assert seen == set(CANDIDATES)


def test_draws_narrow_to_what_still_fits():
    """L = 10, l = 4: memory of 2 + 2 + 1 leaves room for the last four tokens, 2 + 2 + 2 does not."""
    window = BeaconWindow(9, 4)
    for step in range(40):
        ratios = draw(window, 3, 4, (2, 4), generator(1, step, 0))
        assert sum(4 // ratio for ratio in ratios) <= 5
    with pytest.raises(PoSEError, match=r"training text too long: 9 intervals.*largest ratio, 4"):
        draw(window, 9, 4, (2, 4), generator(1, 0, 0))


def test_instance_wise_draws_one_ratio():
    window = BeaconWindow(64, 8)
    drawn = {tuple(draw(window, 5, 3, (2, 4, 8), generator(0, step, 0), same=True)) for step in range(40)}
    assert drawn == {(2,) * 5, (4,) * 5, (8,) * 5}


def test_instance_wise_draws_only_what_fits_throughout():
    """Window 9, l = 4: one interval may take ratio 2, all three may not."""
    window = BeaconWindow(9, 4)
    assert {tuple(draw(window, 3, 4, (2, 4), generator(0, step, 0), same=True)) for step in range(20)} == {(4, 4, 4)}


def test_draws_of_an_interleaved_stream_that_goes_on():
    """The open interval keeps its ratio, and its beacons will be in memory before the drawn ones."""
    window = BeaconWindow(14, 8, interleaved=True)
    # Four beacons of the open interval, then eight raw tokens and the beacons between them: 3, 1 or 0.
    state, candidates = StreamState(pending=4, open_ratio=2), (2, 4, 8)
    rngs = [functools.partial(generator, 0, step, 0) for step in range(20)]
    drawn = [plan(window, "random", 12, state, candidates, rng=rng) for rng in rngs]
    assert {tuple(ratios) for ratios in drawn} == {(2, 4), (2, 8)}


def test_draws_depend_on_seed_step_and_sample_only():
    """The same on two ranks and after a resume; the global generators do not move."""
    before = (np.random.get_state()[1].copy(), torch.random.get_rng_state().clone())
    rank0 = [draw(LLAMA, 4, 10, CANDIDATES, generator(7, step, sample)) for step in range(3) for sample in range(2)]
    rank1 = [draw(LLAMA, 4, 10, CANDIDATES, generator(7, step, sample)) for step in range(3) for sample in range(2)]
    assert rank0 == rank1
    assert len({tuple(ratios) for ratios in rank0}) > 3
    assert rank0 != [draw(LLAMA, 4, 10, CANDIDATES, generator(8, s, i)) for s in range(3) for i in range(2)]
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_plan_of_a_list():
    window = BeaconWindow(64, 8)
    assert plan(window, [2, 8, 4], 30) == [2, 8, 4]
    with pytest.raises(PoSEError, match="ratios: 2 given, but 30 tokens after 0 uncondensed ones need 3"):
        plan(window, [2, 8], 30)
    with pytest.raises(PoSEError, match=r"ratios\[1\]: 3"):
        plan(window, [2, 3, 4], 30)
    assert plan(BeaconWindow(64, 8, interleaved=True), [2, 8, 4, 4], 30) == [2, 8, 4, 4]
    assert plan(BeaconWindow(64, 8, interleaved=True), 4, 3, StreamState(pending=5, open_ratio=2)) == [2]
    assert plan(BeaconWindow(64, 8, interleaved=True), 4, 4, StreamState(pending=5, open_ratio=2)) == [2, 4]


def test_random_needs_training():
    with pytest.raises(PoSEError, match="ratio: 'random'"):
        plan(BeaconWindow(64, 8), "random", 30)


@pytest.mark.parametrize("bad", [0, 1, 3, 2.0, "8", True, None])
def test_bad_ratio(bad):
    with pytest.raises(PoSEError, match=r"ratio: .* divides the interval of 8"):
        check_ratio(bad, 8)


def test_compression_ratio_is_the_share_removed():
    assert from_compression(0.875) == 8
    assert from_compression(0.5) == 2
    with pytest.raises(PoSEError, match=r"compression_ratio: 0\.89.*nearest is 0\.8888"):
        from_compression(0.89)
    with pytest.raises(PoSEError, match="compression_ratio: 8"):
        from_compression(8)


def test_groups_have_one_interval_count():
    lengths = [3, 8, 9, 16, 17, 30, 5, 12, 8, 25]
    counts = [interval_count(length, 8) for length in lengths]
    assert counts == [1, 1, 2, 2, 3, 4, 1, 2, 1, 4]
    order = group_by_intervals(lengths, 8, batch_size=2, ranks=2)
    assert len(order) % 4 == 0
    assert set(order) == set(range(10))
    for start in range(0, len(order), 4):
        assert len({counts[index] for index in order[start : start + 4]}) == 1
    sampler = IntervalSampler(lengths, 8, 2, ranks=2)
    first = list(sampler)
    assert len(first) == len(sampler) == len(order)
    sampler.set_epoch(1)
    assert list(sampler) != first
