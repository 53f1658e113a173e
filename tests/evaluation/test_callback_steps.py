"""When the callback measures, and on which texts: no training."""

from types import SimpleNamespace

import pytest

from pose_plugin.evaluation.callback import EvaluationCallback

TEXT = "The quick brown fox jumps over the lazy dog. " * 30


def steps(monkeypatch, first, last, most, best=False, **when):
    """The steps at which a run that goes on from `first`, ends at `last` and was to end at `most` is measured."""
    watch = EvaluationCallback(passkey_lengths=[200], **when)
    seen = []

    def measure(args, state, *rest):
        seen.append(state.global_step)
        watch.results.append((state.global_step, None, None))

    monkeypatch.setattr(watch, "_measure", measure)
    monkeypatch.setattr(watch, "_check", lambda given: None)
    args = SimpleNamespace(load_best_model_at_end=best)
    state = SimpleNamespace(global_step=first, max_steps=most)
    watch.on_train_begin(args, state, None)
    for step in range(first + 1, last + 1):
        state.global_step = step
        watch.on_step_end(args, state, None)
    watch.on_train_end(args, state, None)
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


def test_the_texts_that_fill_the_longest_length_at_every_length(make_llama, tokenizer):
    texts = [TEXT, TEXT[:400]]
    watch = EvaluationCallback(
        perplexity_lengths=[64, 300], texts=texts, perplexity_options={"max_windows": 1, "batch_size": 1}
    )
    assert 64 < len(tokenizer(texts[1])["input_ids"]) < 300
    found = watch._perplexity(make_llama(max_position_embeddings=512), tokenizer)
    assert list(found.by_length) == [64, 300] and (found.texts, found.left_out) == (1, 1)
