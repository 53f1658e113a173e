"""The `evaluate:` block: every key reaches the measures that have it; what is not given is as documented."""

from __future__ import annotations

import pytest

from pose_plugin.config import parse_settings
from pose_plugin.evaluation.callback import from_settings
from pose_plugin.evaluation.measures import MEASURES, by_task, options_of
from pose_plugin.evaluation.settings import EvaluateSettings, Schedule, checked, parse_block
from pose_plugin.utils.errors import PoSEError

TEXT = "The quick brown fox jumps over the lazy dog. " * 80


@pytest.fixture
def block(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "filler.txt").write_text("Some filler. ")
    (tmp_path / "empty.txt").write_text(" \n")

    def made(train_length=128, with_texts=True, **asked):
        files = {"texts": [str(tmp_path / "text.txt")]} if with_texts else {}
        settings = {"target_length": 1000, "train_length": train_length, "evaluate": {**files, **asked}}
        return parse_settings({name: value for name, value in settings.items() if value is not None})

    return made


def test_every_option_reaches_the_measures_that_have_it(block, tmp_path):
    given = {"trials": 9, "seed": 4, "depths": [0.5], "filler": str(tmp_path / "filler.txt"), "kinds": ["kv"],
             "ruler_tasks": ["vt"], "ruler_data": "data", "facts": 7,
             "stride": 7, "max_windows": 3, "max_tokens": 900, "evaluator": "judge", "short_context": 64,
             "short_length": 99, "batch_size": 2}  # fmt: skip
    # A new option is a row here.
    assert given.keys() == options_of(by_task(while_training=True).values()).keys()
    when = {"every": 7, "at_start": True, "at_end": False, "lengths": [700]}
    callback = from_settings(block(tasks=[*by_task(while_training=True)], **when, **given))
    assert (callback.every, callback.at_start, callback.at_end, callback.lengths) == (7, True, False, [700])
    given["filler"] = "Some filler. "
    assert [measure.name for measure in callback.measures] == [*by_task(while_training=True)]
    for measure in callback.measures:
        own = {name: getattr(measure, name) for name in given if name in type(measure).model_fields}
        assert own == {name: given[name] for name in own} and "batch_size" in own
        assert measure.texts == ([TEXT] if measure.needs_texts else []) and not measure.progress


def test_a_measurement_while_training_is_small(block):
    callback = from_settings(block(tasks=["passkey", "perplexity", "gap", "short"]))
    passkey, *others = callback.measures
    assert passkey.trials == 10 and [measure.max_windows for measure in others] == [10, 10, 10]
    assert (callback.every, callback.at_start, callback.at_end) == (None, False, True)


@pytest.mark.parametrize(
    ("asked", "train_length", "names", "lengths"),
    [
        ({}, 128, ["passkey", "perplexity"], [125, 250, 500, 1000, 2000]),
        ({"with_texts": False}, None, ["passkey"], [125, 250, 500, 1000, 2000]),
        ({"lengths": [300, 200]}, None, ["passkey", "perplexity"], [300, 200]),
        ({"tasks": ["passkey"], "lengths": "2k"}, 600, ["passkey"], [2048]),
    ],
)
def test_what_is_measured_where(block, asked, train_length, names, lengths):
    callback = from_settings(block(train_length, **asked))
    assert ([measure.name for measure in callback.measures], callback.lengths) == (names, lengths)
    assert callback.where_possible == ("lengths" not in asked)


def test_several_complaints_come_together(block):
    with pytest.raises(PoSEError, match=r"(?s)evaluate.tasks=passkeys.*did you mean passkey.*evaluate.tasks=nedle"):
        checked(block(tasks=["passkeys", "nedle"]))
    with pytest.raises(PoSEError, match=r"(?s)evaluate.trials=5.*evaluate.stride=7"):
        checked(block(tasks="gap", trials=5, stride=7))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"evry": 5}, "evaluate.evry=5"),
        ({"every": 0}, "evaluate.every=0"),
        ({"at_end": "no"}, "evaluate.at_end='no'"),
        ({"at_end": False}, "never measures"),
        ({"tasks": []}, "evaluate.tasks"),
        ({"tasks": ["passkeys"]}, "evaluate.tasks=passkeys"),
        ({"tasks": ["harness"]}, "evaluate.tasks=harness"),
        ({"tasks": ["gap"], "texts": []}, "evaluate.tasks=gap needs texts"),
        ({"lengths": []}, "evaluate.lengths"),
        ({"lengths": [2048.5]}, r"evaluate\.lengths\.0=2048\.5"),
        ({"trials": 0}, "evaluate.trials=0"),
        ({"trials": "5"}, "evaluate.trials='5'"),
        ({"evaluator": "judge"}, "evaluate.evaluator=judge has no effect without longppl"),
        ({"tasks": "gap", "trials": 5}, "evaluate.trials=5 has no effect without passkey or needle or topics"),
        ({"tasks": "longppl"}, "evaluate.evaluator"),
    ],
)
def test_what_cannot_work_is_refused_when_the_settings_are_read(block, asked, message):
    with pytest.raises(PoSEError, match=message):
        checked(block(**asked))


def test_files_are_read_where_the_run_is_not_where_it_is_planned(block):
    assert checked(block(tasks="gap", texts="no.txt"))


@pytest.mark.parametrize(("key", "name"), [("texts", "no.txt"), ("texts", "empty.txt"), ("filler", "no.txt")])
def test_a_file_that_cannot_be_read(block, tmp_path, key, name):
    with pytest.raises(PoSEError, match=rf"evaluate\.{key}: .*{name}"):
        parse_block(block(**{key: str(tmp_path / name)})).measures()


def test_a_text_that_is_named_twice_would_count_twice(block, tmp_path):
    texts = [str(tmp_path / "text.txt"), f"{tmp_path}/./text.txt"]
    with pytest.raises(PoSEError, match=r"evaluate\.texts .*text\.txt names a file twice"):
        parse_block(block(texts=texts)).measures()


def test_the_documented_keys_are_those_of_the_schedule_and_the_measures():
    options = {name for measure in by_task(while_training=True).values() for name in options_of([measure])}
    assert set(EvaluateSettings.model_fields) == {*Schedule.model_fields, *options}
    assert all(field.description for field in EvaluateSettings.model_fields.values())
    assert "harness_limit" in options_of(MEASURES.values()) and "harness_limit" not in options
