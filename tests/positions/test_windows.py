from __future__ import annotations

import random

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.positions import draw_windows
from pose_plugin.utils.errors import PoSEError


def documents(count: int = 8, size: int = 200):
    return [np.random.default_rng(i).integers(0, 1000, size) for i in range(count)]


def settings(**changes):
    return parse_settings({"target_length": 512, "train_length": 64, **changes})


def same(a, b) -> bool:
    return all(
        np.array_equal(x.position_ids, y.position_ids) and np.array_equal(x.content, y.content)
        for x, y in zip(a, b, strict=True)
    )


def test_positions_depend_on_seed_epoch_and_tokens_only():
    docs = documents()
    first = draw_windows(docs, settings(content="skip"), 3)
    random.seed(1)
    np.random.seed(1)
    assert same(first, draw_windows(docs, settings(content="skip"), 3))
    assert same(first[5:6], draw_windows(docs[5:6], settings(content="skip"), 3)), "alone or in a batch"
    assert same(first[::-1], draw_windows(docs[::-1], settings(content="skip"), 3)), "in any order"
    as_lists = [doc.tolist() for doc in docs]
    assert same(first, draw_windows(as_lists, settings(content="skip"), 3)), "as a list or an array"
    for other in (
        draw_windows(docs, settings(content="skip"), 4),
        draw_windows(docs, settings(content="skip", seed=1), 3),
        draw_windows([doc + 1 for doc in docs], settings(content="skip"), 3),
    ):
        assert not any(np.array_equal(x.position_ids, y.position_ids) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("changes", "positions", "content"),
    [
        ({}, [0, 8, 9, 10, 11, 12, 13, 14], range(8)),
        (
            {"chunks": 3, "content": "skip"},
            [0, 52, 58, 59, 60, 61, 62, 63],
            [0, 6, 9, 10, 11, 12, 13, 14],
        ),
        ({"content": "window", "variant": "reference"}, [0, *range(52, 59)], range(1, 9)),
        ({"sampler": "clamped", "chunks": 6}, [0, 1, 6, 7, 8, 20, 43, 62], range(8)),
        ({"sampler": "cream", "target_margin": 9}, [0, 1, 14, 15, 16, 17, 71, 72], range(8)),
    ],
)
def test_a_seed_keeps_its_positions(changes, positions, content):
    """A run that is resumed with a later version continues with the same positions."""
    chosen = parse_settings({"target_length": 64, "train_length": 8, "seed": 5, **changes})
    (window,) = draw_windows([list(range(20))], chosen, 2)
    assert window.position_ids.tolist() == positions
    assert window.content.tolist() == list(content)


def test_global_generators_are_not_touched():
    before = random.getstate(), np.random.get_state()[1].copy()
    draw_windows(documents(), settings(sampler="randpos"), 0)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_contiguous_takes_the_head_and_marks_no_seam():
    for window in draw_windows(documents(), settings(), 0):
        assert window.content.tolist() == list(range(64))
        assert window.seams.size == 0
        assert window.position_ids[-1] > 63


def test_skip_reads_the_whole_document_and_marks_where_it_jumped():
    farthest = 0
    for window in draw_windows(documents(200), settings(content="skip"), 0):
        jumps = np.flatnonzero(np.diff(window.content) != 1) + 1
        assert window.seams.tolist() == jumps.tolist()
        assert (window.content[0] == 0 or not jumps.size) and len(window.content) == 64 and window.content[-1] < 200
        farthest = max(farthest, int(window.content[-1]))
    assert farthest > 190


def test_aligned_keeps_true_offsets_and_ends_with_the_text():
    for window in draw_windows(documents(100), settings(content="aligned"), 0):
        assert np.array_equal(window.content, window.position_ids)
        assert window.content[-1] < 200


def test_short_documents_keep_their_length_and_still_reach_far():
    windows = draw_windows(documents(50, size=10), settings(content="skip"), 0)
    assert all(window.content.tolist() == list(range(10)) for window in windows)
    assert max(window.position_ids[-1] for window in windows) > 400
    assert all(window.seams.size == 0 for window in windows)


def test_unskipped_ratio_leaves_that_share_plain():
    windows = draw_windows(documents(2000, size=64), settings(unskipped_ratio=0.25), 0)
    plain = np.mean([window.position_ids[-1] == 63 for window in windows])
    assert abs(plain - 0.25) < 0.04


@pytest.mark.parametrize("changes", [{"unskipped_ratio": 0.5, "chunks": 3}, {"sampler": "clamped"}])
def test_neighbouring_positions_have_neighbouring_texts(changes):
    """A row without jumps is one piece of its document, from anywhere."""
    begins = []
    for window in draw_windows(documents(1000), settings(content="skip", **changes), 0):
        joined = np.diff(window.position_ids) == 1
        assert (np.diff(window.content)[joined] == 1).all()
        if joined.all():
            begins.append(int(window.content[0]))
    assert len(begins) > 50 and min(begins) < 20 and max(begins) > 110


def test_margin_goes_beyond_the_target():
    windows = draw_windows(documents(500, size=64), settings(target_margin=100), 0)
    last = max(window.position_ids[-1] for window in windows)
    assert 560 < last < 612


def test_three_pieces_of_content_follow_one_another():
    for window in draw_windows(documents(50), settings(content="skip", chunks=3), 0):
        assert (np.diff(window.content) > 0).all()
        assert len(window.seams) <= 2


def test_a_sample_longer_than_the_target():
    with pytest.raises(PoSEError, match=r"600 tokens, more than target_length=512.*train_length"):
        draw_windows([np.arange(600)], parse_settings({"target_length": 512}), 0)


def test_no_documents():
    assert draw_windows([], settings(), 0) == []


def test_window_takes_one_piece_from_anywhere():
    starts = []
    for window in draw_windows(documents(300), settings(content="window"), 0):
        assert (np.diff(window.content) == 1).all() and len(window.content) == 64
        assert window.seams.size == 0
        starts.append(int(window.content[0]))
    assert min(starts) < 10 and max(starts) > 126
