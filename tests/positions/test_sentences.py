"""Ends of sentences, and the sampler that jumps there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.positions import draw_windows
from pose_plugin.positions.sentence_borders import SentenceBorders
from pose_plugin.utils.errors import PoSEError
from tests.positions.test_samplers import sample, stacked


class Spelled:
    """Token i spells piece i. A blank is part of the word after it, as in byte-level tokenizers."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = ["a", *pieces]
        self.decoded = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def decode(self, ids: list[int]) -> str:
        self.decoded += 1
        return "".join(self.pieces[i] for i in ids)


def ends(*pieces: str):
    found = SentenceBorders(Spelled(*pieces))(np.arange(1, len(pieces) + 1))
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    "pieces, expected",
    [
        (["One", " end", ".", " Two", "."], [3]),
        (["Why", "?", " Be", "cause", "!", " So"], [2, 5]),
        (["It", " is", " 3", ".", "14", "."], None),
        (["see", " a", ".", "org", " now"], None),
        (["a", ' end."', " Next"], [2]),
        (["a", " end.)", " Next"], [2]),
        (["line", "\n", "next", " line"], [2]),
        (["end", ".\n\n", "Next"], [2]),
        (["end", ".", "\n", "\n", "Next"], [4]),
        (["end", ".", " ", " Next", "."], [3]),
        (["终", "。", "下", "！", "又"], [2, 4]),
        (["wait", "...", " go"], [2]),
        (["\n", "a", " b"], [1]),
        (["no", " end"], None),
        ([".", " b"], [1]),
        (["end", "."], None),
        (["only"], None),
    ],
)
def test_ends(pieces, expected):
    assert ends(*pieces) == expected


def test_each_token_is_decoded_once():
    tokenizer = Spelled("One", ".", " Two")
    found = SentenceBorders(tokenizer)
    for _ in range(3):
        assert found(np.array([1, 2, 3, 2, 3])).tolist() == [2, 4]
    assert tokenizer.decoded == 4, "the anchor and three tokens"


def test_without_a_tokenizer():
    with pytest.raises(PoSEError, match=r"sampler=sentences .* got None"):
        SentenceBorders(None)


def settings(**changes):
    return parse_settings({"target_length": 512, "train_length": 64, "sampler": "sentences", **changes})


def test_every_sentence_moves_and_the_first_stays():
    documents = [np.random.default_rng(i).integers(0, 1000, 60) for i in range(40)]
    for window in draw_windows(documents, settings(target_length=100_000), 0, [np.array([9, 20, 41])] * 40):
        assert window.position_ids[:9].tolist() == list(range(9))
        assert (np.flatnonzero(np.diff(window.position_ids) > 1) + 1).tolist() == [9, 20, 41]
        assert window.content.tolist() == list(range(60))


def test_skips_are_all_sequences_alike():
    lengths, skips = stacked(sample(9000, window=6, target=8, sampler="sentences", borders=np.array([2, 4])))
    assert (lengths == [2, 2, 2]).all()
    sequences = list(itertools.combinations_with_replacement(range(3), 2))
    for first, second in sequences:
        share = ((skips[:, 1] == first) & (skips[:, 2] == second)).mean()
        assert abs(share - 1 / len(sequences)) < 0.02


@pytest.mark.parametrize("content", ["contiguous", "window"])
def test_a_window_without_a_border_is_cut_anywhere_and_counted_so(content):
    """The only border of the document is behind its window, or may be before it."""
    document = np.arange(1000, 1100)
    for epoch in range(40):
        (window,) = draw_windows([document], settings(content=content), epoch, [np.array([90])])
        begin = int(window.content[0])
        inside = begin < 90 < begin + 64
        assert window.borders == (1 if inside else None)
        jumps = (np.flatnonzero(np.diff(window.position_ids) > 1) + 1 + begin).tolist()
        assert jumps in ([], [90]) if inside else len(jumps) <= 1


def test_borders_that_do_not_increase():
    for wrong in ([20, 9], [9, 9]):
        with pytest.raises(ValueError, match="must increase"):
            draw_windows([np.arange(60)], settings(), 0, [np.array(wrong)])
    with pytest.raises(ValueError):
        draw_windows([np.arange(60)], settings(), 0, [])


def test_a_window_from_anywhere_keeps_its_own_borders():
    document, offered = np.arange(1000, 1200), np.arange(10, 200, 10)
    seen = set()
    for epoch in range(30):
        (window,) = draw_windows([document], settings(content="window"), epoch, [offered])
        begin = int(window.content[0])
        seen.add(begin)
        assert window.content.tolist() == list(range(begin, begin + 64))
        jumps = np.flatnonzero(np.diff(window.position_ids) > 1) + 1
        assert jumps.size and all((begin + jump) % 10 == 0 for jump in jumps)
    assert len(seen) > 20


def test_rows_of_both_kinds_do_not_depend_on_one_another():
    documents = [np.random.default_rng(i).integers(0, 1000, size) for i, size in enumerate((60, 2, 33, 48))]
    offered = [np.array([7, 21, 50]), None, np.array([12]), None]
    together = draw_windows(documents, settings(), 3, offered)
    for i, document in enumerate(documents):
        (alone,) = draw_windows([document], settings(), 3, [offered[i]])
        assert alone.position_ids.tolist() == together[i].position_ids.tolist()
    assert all(window.position_ids[-1] >= len(window.position_ids) for window in (together[0], together[2]))
