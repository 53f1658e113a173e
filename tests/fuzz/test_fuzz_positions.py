"""Positions of any documents under any settings: what must hold of every window that is drawn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pose_plugin.config import PoSESettings
from pose_plugin.positions import SAMPLERS, draw_windows
from tests.fuzz.settings import fuzz

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), min_size=1, max_size=4)


@st.composite
def settings(draw) -> PoSESettings:
    """Any settings that the model accepts, with lengths around those of the documents."""
    kind = SAMPLERS[draw(st.sampled_from(sorted(SAMPLERS)))]
    contents = [each for each in ("contiguous", "window", "skip", "aligned") if each not in kind.refused_contents]
    train = draw(st.integers(1, 30))
    chunks = draw(st.integers(2, 40))
    options = {"chunks": chunks, "variant": draw(st.sampled_from(["paper", "reference"]))}
    return PoSESettings(
        target_length=train + draw(st.integers(0, 50)),
        train_length=train,
        sampler=kind.name,
        content=draw(st.sampled_from(contents)),
        unskipped_ratio=draw(st.sampled_from([0.0, 0.3, 1.0])),
        target_margin=draw(st.sampled_from([0, 7])),
        seed=draw(st.integers(-(2**70), 2**70)),
        **{name: value for name, value in options.items() if name in kind.options()},
    )


@fuzz
@given(DOCUMENTS, settings(), st.integers(0, 3), st.data())
def test_windows_are_positions_below_the_target(documents, chosen, epoch, data):
    borders = None
    if SAMPLERS[chosen.sampler].border_finder is not None:
        offered = [st.none() | st.sets(st.integers(1, max(1, len(each) - 1))) for each in documents]
        borders = [
            each if each is None else np.array(sorted(each), dtype=np.int64) for each in data.draw(st.tuples(*offered))
        ]
    windows = draw_windows(documents, chosen, epoch, borders)
    for document, window in zip(documents, windows, strict=True):
        size = min(len(document), chosen.train_length)
        assert len(window.content) == len(window.position_ids) == size
        assert (np.diff(window.position_ids) > 0).all() and window.position_ids[0] >= 0
        assert window.position_ids[-1] < chosen.target_length + chosen.target_margin
        assert (np.diff(window.content) > 0).all()
        assert window.content[0] >= 0 and window.content[-1] < len(document)
        assert window.seams.tolist() == (np.flatnonzero(np.diff(window.content) != 1) + 1).tolist()
