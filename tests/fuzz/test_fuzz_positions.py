"""Any settings, documents, borders and batches: what must hold of every window, and that all else is refused."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pose_plugin.collator import PositionCollator
from pose_plugin.config import PoSESettings, RopeSettings, parse_settings
from pose_plugin.positions import SAMPLERS, draw_windows
from pose_plugin.positions.samplers import unread_options
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import LONGEST
from tests.fuzz.settings import fuzz

TOKENS = st.lists(st.integers(0, LONGEST), min_size=1, max_size=40)


@st.composite
def settings(draw) -> PoSESettings:
    """Settings that the model accepts, with lengths around those of the documents."""
    kind = SAMPLERS[draw(st.sampled_from(sorted(SAMPLERS)))]
    contents = [each for each in ("contiguous", "window", "skip", "aligned") if each not in kind.refused_contents]
    train = draw(st.integers(1, 30))
    options = {
        "chunks": draw(st.integers(2, 40)),
        "variant": draw(st.sampled_from(["paper", "reference"])),
        "unskipped_ratio": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "target_margin": draw(st.integers(0, 70)),
    }
    return PoSESettings(
        target_length=train + draw(st.integers(0, 50) | st.integers(0, LONGEST - 100)),
        train_length=train,
        sampler=kind.name,
        content=draw(st.sampled_from(contents)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        **{name: value for name, value in options.items() if name not in unread_options(kind.name)},
    )


@st.composite
def documents(draw) -> tuple[list[list[int]], list[np.ndarray | None]]:
    """Documents, and the borders that each of them shows."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=4))
    shown = [draw(st.none() | st.sets(st.integers(1, max(1, len(each) - 1)))) for each in tokens]
    return tokens, [each if each is None else np.array(sorted(each), dtype=np.int64) for each in shown]


@fuzz
@given(documents(), settings(), st.integers(0, 3))
def test_windows(given_documents, chosen, epoch):
    tokens, borders = given_documents
    if SAMPLERS[chosen.sampler].border_finder is None:
        borders = [None] * len(tokens)
    windows = draw_windows(tokens, chosen, epoch, borders)
    for document, offered, window in zip(tokens, borders, windows, strict=True):
        size = min(len(document), chosen.train_length)
        assert len(window.content) == len(window.position_ids) == size
        assert (np.diff(window.position_ids) > 0).all() and window.position_ids[0] >= 0
        assert window.position_ids[-1] < chosen.target_length + chosen.target_margin
        assert (np.diff(window.content) > 0).all()
        assert window.content[0] >= 0 and window.content[-1] < len(document)
        assert window.seams.tolist() == (np.flatnonzero(np.diff(window.content) != 1) + 1).tolist()
        jumps = np.flatnonzero(np.diff(window.position_ids) > 1) + 1
        if chosen.sampler not in ("randpos", "sentences"):
            assert len(jumps) < max(chosen.chunks, 4 if chosen.sampler == "cream" else 0)
        if window.borders is not None:
            assert set(window.content[jumps]) <= set(offered), "a jump elsewhere than at a border"
            assert window.borders == len(set(offered) & set(window.content[1:]))
        (alone,) = draw_windows([document], chosen, epoch, [offered])
        for one, other in zip(alone, window, strict=True):
            assert np.array_equal(one, other), "a window that depends on the other documents"


NUMBERS = st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | st.text(max_size=4)
KEYS = st.sampled_from([*PoSESettings.model_fields, "chunk", "theta"])
ROPE = st.dictionaries(st.sampled_from([*RopeSettings.model_fields, "alpha"]), NUMBERS | st.just("yarn"), max_size=3)


@fuzz
@given(st.dictionaries(KEYS, NUMBERS | ROPE | st.sampled_from(["skip", *SAMPLERS]), max_size=6))
def test_settings_are_refused_or_work(values):
    try:
        chosen = parse_settings(values)
    except PoSEError as error:
        assert all(str(error).splitlines())
        return
    assert chosen.target_length + chosen.target_margin <= LONGEST
    document = np.arange(min(64, chosen.target_length))
    assert np.diff(draw_windows([document], chosen, 0)[0].position_ids).min(initial=1) >= 1
    assert parse_settings(chosen.model_dump(mode="json")) == chosen.model_copy(update={"evaluate": None})


def flat(features, **kwargs):
    """As TRL's padding-free collator: one row of all documents."""
    return {key: torch.tensor([[t for each in features for t in each[key]]]) for key in ("input_ids", "labels")}


LENGTHS = st.lists(st.integers(-2, 12) | st.just(10**18), max_size=5) | st.lists(st.integers(1, 6), max_size=9)


@fuzz
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(0, 3), settings())
def test_lengths_of_packed_rows_are_refused_or_kept(lengths, more, chosen):
    collate = PositionCollator(flat, chosen.model_copy(update={"sampler": "pose", "mask_seam": False}))
    sizes = [
        max(1, sum(each) + (more if row == 0 else 0)) if max([0, *each]) < 99 else 9 for row, each in enumerate(lengths)
    ]
    rows = [[*range(100 * row, 100 * row + size)] for row, size in enumerate(sizes)]
    features = [{"input_ids": ids, "labels": ids, "seq_lengths": each} for ids, each in zip(rows, lengths, strict=True)]
    if any(sum(each) != len(ids) or min([0, *each]) < 0 or 0 in each for ids, each in zip(rows, lengths, strict=True)):
        try:
            collate(features)
        except PoSEError as error:
            assert "seq_lengths=" in str(error)
            return
        raise AssertionError("lengths that do not add up were taken")
    kept = [min(length, chosen.train_length) for each in lengths for length in each]
    batch = collate(features)
    positions = np.split(batch["position_ids"][0].numpy(), np.cumsum(kept)[:-1])
    assert all(each[0] == 0 and (np.diff(each) > 0).all() for each in positions)
    assert collate.trained()["documents"] == len(kept) and collate.trained()["tokens"] == sum(kept)
