"""Every key of `evaluate:` reaches the measure it is for; what is not given is as documented."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from pose_plugin.config import parse_settings
from pose_plugin.evaluation import block, callback
from pose_plugin.evaluation.block import from_settings

TEXT = "The quick brown fox jumps over the lazy dog. " * 80


@dataclass(frozen=True)
class Figure:
    by_length: dict
    left_out: int = 0

    def metrics(self):
        return {"figure/1": 1.0}


@pytest.fixture
def calls(monkeypatch):
    """(lengths, options) by measure, in place of measuring."""
    found = {}

    def stands_for(name, own, texts):
        @functools.wraps(own)
        def measure(model, tokenizer, *given, **options):
            found[name] = (list(given[texts]), options)
            return Figure({})

        return measure

    for module, name, texts, called in (
        (callback, "passkey", 0, "passkey"), (callback, "perplexity", 1, "perplexity"), (block, "needle", 0, "needle"),
        (block, "topics", 0, "topics"), (block, "gap_probe", 1, "gap"), (block, "perplexity", 1, "short"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, stands_for(called, getattr(module, name), texts))
    return found


def made(tmp_path, train_length=128, **asked):
    (tmp_path / "text.txt").write_text(TEXT)
    if asked.pop("with_texts", True):
        asked["texts"] = [str(tmp_path / "text.txt")]
    return from_settings(parse_settings({"target_length": 1000, "train_length": train_length, "evaluate": asked}))


def test_every_key_reaches_its_measure(tmp_path, calls, make_llama, tokenizer):
    tasks = ["passkey", "perplexity", "needle", "topics", "gap", "short"]
    keys = {"every": 7, "at_start": True, "at_end": False, "tasks": tasks, "lengths": [700], "trials": 9, "seed": 4,
            "max_windows": 3, "batch_size": 2, "short_length": 99}  # fmt: skip
    watch, model = made(tmp_path, **keys), make_llama()
    assert (watch.every, watch.at_start, watch.at_end) == (7, True, False)
    watch.check(model, tokenizer)
    for measure in (watch._passkey, watch._perplexity, *watch.more.values()):
        measure(model, tokenizer)
    shared = {"batch_size": 2, "progress": False}
    prompts, windows = {"trials": 9, "seed": 4, **shared}, {"max_windows": 3, **shared}
    assert calls == {
        "passkey": ([700], prompts), "needle": ([700], prompts), "topics": ([700], prompts),
        "perplexity": ([700], windows), "gap": ([700], windows), "short": ([99], windows),
    }  # fmt: skip


def test_fewer_trials_than_depths_are_as_many_needles(tmp_path, calls, make_llama, tokenizer):
    made(tmp_path, tasks=["needle"], lengths=[500], trials=2).more["needle"](make_llama(), tokenizer)
    assert calls["needle"][1]["trials"] == 5


@pytest.mark.parametrize(
    ("asked", "train_length", "passkeys", "perplexities"),
    [
        ({}, 128, [128, 256, 512, 1000], [128, 256, 512, 1000]),
        ({"with_texts": False}, 128, [128, 256, 512, 1000], []),
        ({"lengths": [300, 200]}, 128, [300, 200], [300, 200]),
        ({"tasks": ["perplexity"]}, 500, [], [500, 1000]),
        ({"tasks": ["passkey"]}, 600, [600, 1000], []),
    ],
)
def test_what_is_measured_where(tmp_path, asked, train_length, passkeys, perplexities):
    watch = made(tmp_path, train_length, **asked)
    assert (watch.passkey_lengths, watch.perplexity_lengths) == (passkeys, perplexities)
    assert (watch.every, watch.at_start, watch.at_end, watch.more) == (None, False, True, {})


@pytest.mark.parametrize(
    ("asked", "lengths", "short"),
    [({}, [256, 512, 1000], 128), ({"short_context": 300}, [512, 1000], 300), ({"lengths": [99, 200]}, [200], 128)],
)
def test_the_lengths_of_longppl(tmp_path, asked, lengths, short):
    task = made(tmp_path, tasks=["longppl"], evaluator="judge", **asked).more["longppl"]
    assert (task.lengths, task.short, task.evaluator) == (lengths, short, "judge")
