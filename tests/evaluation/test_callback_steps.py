"""When the callback measures: no training."""

from types import SimpleNamespace

import pytest

from pose_plugin.evaluation.callback import EvaluationCallback
from pose_plugin.evaluation.measures.passkey import Passkey
from pose_plugin.utils.errors import PoSEError


def steps(monkeypatch, first, last, most, best=False, **when):
    """The steps at which a run that goes on from `first`, ends at `last` and was to end at `most` is measured."""
    watch = EvaluationCallback([Passkey()], [200], **when)
    seen = []

    def measure(args, state, *rest):
        seen.append(state.global_step)
        watch.results.append((state.global_step, {}))

    monkeypatch.setattr(watch, "_measure", measure)
    monkeypatch.setattr(watch, "_prepare", lambda model: None)
    watch.bind_trainer(object())
    args = SimpleNamespace(load_best_model_at_end=best)
    state = SimpleNamespace(global_step=first, max_steps=most)
    watch.on_train_begin(args, state, None, model=None)
    for step in range(first + 1, last + 1):
        state.global_step = step
        watch.on_step_end(args, state, None, model=None)
    watch.on_train_end(args, state, None, model=None)
    return seen


@pytest.mark.parametrize(
    ("first", "last", "most", "when", "expected"),
    [
        (0, 5, 5, {"every": 2, "at_start": True}, [0, 2, 4, 5]),
        (0, 5, 5, {}, [5]),
        (0, 6, 6, {"every": 3}, [3, 6]),
        (0, 5, 5, {"every": 2, "at_end": False}, [2, 4]),
        (0, 5, 5, {"every": 9, "at_start": True}, [0, 5]),
        # Resumed: what the first run has measured is in its history.
        (3, 5, 5, {"every": 2, "at_start": True}, [4, 5]),
        # Stopped early, once measured already at that step.
        (0, 3, 5, {"every": 2}, [2, 3]),
        (0, 4, 5, {"every": 2}, [2, 4]),
        (0, 3, 5, {"every": 2, "at_end": False}, [2]),
        # The best checkpoint is another model than that of the last step.
        (0, 4, 4, {"best": True}, [4]),
        (0, 4, 4, {"best": True, "every": 2}, [2, 4, 4]),
    ],
)
def test_when(monkeypatch, first, last, most, when, expected):
    assert steps(monkeypatch, first, last, most, **when) == expected


@pytest.mark.parametrize(
    ("lengths", "when", "message"),
    [
        ([200], {"every": 0}, "every=0"),
        ([200], {"every": -5}, "every=-5"),
        ([200], {"at_end": False}, "never measures"),
        (["2x"], {}, "'2x' is not a number of tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_the_training(lengths, when, message):
    with pytest.raises(PoSEError, match=message):
        EvaluationCallback([Passkey()], lengths, **when)


def test_lengths_as_in_a_yaml():
    assert EvaluationCallback([Passkey()], ["2k", 512]).lengths == [2048, 512]
