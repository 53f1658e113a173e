"""Positions, masks and rows, written out by hand for small intervals."""

from __future__ import annotations

import pytest
import torch

from pose_plugin.beacon.layout import RAW, Pass, Scheme, lay_out, moves, positions, visible
from pose_plugin.beacon.losses import shift_labels

R = RAW


def mask_of(given: Pass) -> list[str]:
    """One line per row: # if a key is seen."""
    return ["".join("#" if seen else "." for seen in row) for row in visible(given).tolist()]


# Interval 4, ratio 2, one whole interval that closes: rows are raw 0-3, then beacons 1 and 2. Keys are in this order
# behind the memory.
FIRST = {
    "stepwise": (
        [0, 1, 2, 3, 2, 4],
        ["#.....", "##....", "###...", "####..", "##..#.", "####.#"],
    ),
    "segmentation": (
        [0, 1, 2, 3, 2, 4],
        ["#.....", "##....", "###...", "####..", "##..#.", "..##.#"],
    ),
    "full": (
        [0, 1, 2, 3, 4, 4],
        ["#.....", "##....", "###...", "####..", "#####.", "####.#"],
    ),
}


@pytest.mark.parametrize("mask", FIRST)
def test_first_interval(mask):
    given = lay_out(0, (), 4, Scheme(4, mask), ratio=2, closing=True)
    where, seen = FIRST[mask]
    assert given.rows == (R, R, R, R, 1, 2)
    assert positions(given) == where
    assert mask_of(given) == seen


@pytest.mark.parametrize("mask", FIRST)
def test_interval_behind_memory(mask):
    """Behind three beacons, every row is three places further and sees all three."""
    given = lay_out(3, (), 4, Scheme(4, mask), ratio=2, closing=True)
    where, seen = FIRST[mask]
    assert positions(given) == [place + 3 for place in where]
    assert mask_of(given) == ["###" + row for row in seen]


def test_beacons_without_memory():
    given = lay_out(2, (), 4, Scheme(4, attend_previous=False), ratio=2, closing=True)
    assert mask_of(given) == ["###.....", "####....", "#####...", "######..", "..##..#.", "..####.#"]


@pytest.mark.parametrize("mask", FIRST)
def test_partial_interval_has_no_beacons(mask):
    given = lay_out(2, (), 3, Scheme(4, mask))
    assert given.rows == (R, R, R)
    assert positions(given) == [2, 3, 4]
    assert mask_of(given) == ["###..", "####.", "#####"]
    assert given.plain


def test_full_last_interval_waits():
    """Four tokens with nothing behind them stay raw; the beacons come with the next token, and only they."""
    waiting = lay_out(0, (), 4, Scheme(4))
    assert waiting.rows == (R, R, R, R)
    closing = lay_out(0, (R, R, R, R), 0, Scheme(4), ratio=2, closing=True)
    assert closing.rows == (1, 2)
    assert positions(closing) == [2, 4]
    assert mask_of(closing) == ["##..#.", "####.#"]


def test_interval_in_two_parts():
    """Three tokens are cached, the fourth closes the interval: keys are memory, three raw, one raw, beacons."""
    given = lay_out(1, (R, R, R), 1, Scheme(4), ratio=2, closing=True)
    assert given.rows == (R, 1, 2)
    assert positions(given) == [4, 3, 5]
    assert mask_of(given) == ["#####..", "###..#.", "#####.#"]


def test_ratio_of_the_whole_interval():
    given = lay_out(0, (), 4, Scheme(4), ratio=4, closing=True)
    assert positions(given) == [0, 1, 2, 3, 4]
    assert mask_of(given)[-1] == "#####"


@pytest.mark.parametrize(
    ("mask", "shifts"),
    [("stepwise", [0 - 2, 1 - 4]), ("segmentation", [0 - 2, 1 - 4]), ("full", [0 - 4, 1 - 4])],
)
def test_moves_to_memory(mask, shifts):
    """Beacon b of an interval behind m beacons goes to slot m + b − 1, for every m."""
    for memory in (0, 3):
        assert moves(lay_out(memory, (), 4, Scheme(4, mask), ratio=2, closing=True)) == ([4, 5], shifts)


def test_interleaved_interval():
    given = lay_out(1, (), 4, Scheme(4, interleaved=True), ratio=2, closing=True)
    assert given.rows == (R, R, 1, R, R, 2)
    assert positions(given) == [1, 2, 3, 4, 5, 6]
    assert mask_of(given) == ["##.....", "###....", "####...", "#####..", "######.", "#######"]
    assert given.order == [0, 1, 4, 2, 3, 5]
    # Beacon 1 moves from position 3 to slot 1, beacon 2 from 6 to 2.
    assert moves(given) == ([2, 5], [-2, -4])


@pytest.mark.parametrize(
    ("tail", "tokens", "closing", "rows"),
    [
        ((), 2, False, (R, R)),  # no token follows the second, so its beacon waits
        ((R, R), 1, False, (1, R)),
        ((R, R, 1, R), 1, False, (R,)),
        ((R, R, 1, R, R), 0, True, (2,)),
        ((), 3, False, (R, R, 1, R)),
    ],
)
def test_interleaved_parts(tail, tokens, closing, rows):
    assert lay_out(0, tail, tokens, Scheme(4, interleaved=True), ratio=2, closing=closing).rows == rows


def test_labels_are_shifted_over_the_interval_border():
    """Interval 3: token 2 predicts token 3, the first of the next interval."""
    labels = torch.tensor([[10, 11, 12, 13, 14, -100, 16]])
    assert shift_labels(labels).tolist() == [[11, 12, 13, 14, -100, 16, -100]]
