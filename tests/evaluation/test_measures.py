"""One row per measure: what it finds in the command and in the block. A new measure is a new row of ROWS."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from pydantic import Field
from transformers import Trainer, TrainingArguments

from pose_plugin.cli import main as cli
from pose_plugin.config import PositiveInt, parse_settings
from pose_plugin.evaluation.callback import from_settings
from pose_plugin.evaluation.measure import Measure, Work
from pose_plugin.evaluation.measures import MEASURES, by_task, choose
from pose_plugin.evaluation.results import Result, Row
from pose_plugin.utils.errors import PoSEError

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


@dataclass(frozen=True)
class Expected:
    """What a measure finds of a random model at 600 and 700 tokens.

    Attributes:
        scores: names of its figures.
        logged: names that are only logged while training.
        files: CSV files and pictures.
        options: what it is given, in the command and in the block.
    """

    scores: list[str]
    files: list[str]
    logged: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "passkey": Expected(
        ["passkey/600", "passkey/700"],
        ["passkey.csv", "passkey_depth.csv", "passkey.png", "passkey_depth.png"],
        ["passkey/k_max"],
        {"trials": 2},
    ),
    "haystack": Expected(
        [f"haystack/{n}/{n >> k}" for n in (600, 700) for k in (3, 1, 0)],
        ["haystack.csv", "haystack_600.png", "haystack_700.png"],
        ["haystack/k_max"],
        {"facts": 3},
    ),
    "perplexity": Expected(
        ["perplexity/600", "perplexity/700"],
        ["perplexity.csv", "perplexity_position.csv", "perplexity.png"],
        options={"max_windows": 2},
    ),
    "needle": Expected(
        [f"needle/{kind}/{n}" for kind in ("single", "kv") for n in (600, 700)],
        ["needle.csv", "needle_depth.csv", "needle_single.png", "needle_kv.png"],
        options={"kinds": ["single", "kv"], "trials": 2},
    ),
    "topics": Expected(["topics/first/600", "topics/first/700"], ["topics.csv", "topics.png"], options={"trials": 2}),
    "association": Expected(
        [f"association/{kind}/{n}" for kind in ("literal", "associated") for n in (600, 700)],
        ["association.csv", "association_depth.csv", "association_literal.png", "association_associated.png"],
        options={"trials": 5},
    ),
    "ruler": Expected(
        [f"ruler/{kind}/{n}" for kind in ("vt", "niah_single_1", "average") for n in (600, 700)],
        ["ruler.csv", "ruler_vt.png", "ruler_niah_single_1.png", "ruler_average.png"],
        options={"ruler_tasks": ["vt", "niah_single_1"], "trials": 1},
    ),
    "gap": Expected(["gap_loss/600", "gap_loss/700"], ["gap.csv", "gap.png"], options={"max_windows": 2}),
    "short": Expected(["short_perplexity/99"], ["short.csv"], options={"short_length": 99, "max_windows": 2}),
    "length": Expected(["length/600", "length/700"], ["length.csv", "length.png"], options={"most": 7}),
}
# LongPPL needs an evaluator with key tokens, lm-eval its tasks: they have tests of their own.
ELSEWHERE = {"longppl", "harness"}


class Length(Measure):
    """A new measure: one class, and the rows of MEASURES and ROWS."""

    name: ClassVar[str] = "length"
    title: ClassVar[str] = "Length by prompt"
    label: ClassVar[str] = "tokens"

    most: PositiveInt = Field(100, description="tokens at most", json_schema_extra={"training": 10})

    def work(self, length):
        return Work(length, 1)

    def run(self, model, length):
        return Result(self.name, "Tokens of nothing.", (Row(length, float(min(self.most, length))),))


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(MEASURES, "length", Length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizers_by_name, make_llama):
    place = tmp_path_factory.mktemp("model")
    make_llama().save_pretrained(place / "base")
    tokenizers_by_name["single digits"].save_pretrained(place / "base")
    (place / "text.txt").write_text(TEXT)
    return place


def test_every_measure_has_a_row():
    assert set(ROWS) | ELSEWHERE == set(MEASURES)


@pytest.mark.parametrize("name", ROWS)
def test_in_the_command_with_its_report_and_figures(name, folder, tmp_path, capsys):
    expected, command = ROWS[name], ["evaluate", str(folder / "base"), "--tasks", name, "--lengths", "600,700"]
    for option, value in expected.options.items():
        command += [f"--{option.replace('_', '-')}", ",".join(value) if isinstance(value, list) else str(value)]
    command += ["--texts", str(folder / "text.txt"), "--output", str(tmp_path), "--quiet"]
    assert cli.main(command) == 0
    result = Result.from_dict(json.loads((tmp_path / "results.json").read_text())["models"][0][name])
    assert list(result.metrics()) == expected.scores
    general = {"finished.jsonl", "report.html", "report.md", "results.json"}
    vectors = {name.replace(".png", ".svg") for name in expected.files if name.endswith(".png")}
    assert {path.name for path in tmp_path.iterdir()} - general == {*expected.files, *vectors}
    out = capsys.readouterr().out
    assert MEASURES[name].place(result.rows[0])[0] in out and result.definition in out
    # Nothing is measured twice.
    assert cli.main(command) == 0
    assert "nothing is missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", ROWS)
def test_in_the_block(name, folder, tmp_path, make_llama, tokenizer):
    expected = ROWS[name]
    asked = {"tasks": name, "lengths": [600, 700], "texts": str(folder / "text.txt"), **expected.options}
    callback = from_settings(parse_settings({"target_length": 700, "train_length": 128, "evaluate": asked}))
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=1, disable_tqdm=True)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    trainer = Trainer(make_llama(), args, train_dataset=rows, processing_class=tokenizer, callbacks=[callback])
    callback.bind_trainer(trainer)
    trainer.train()
    logged = {key for row in trainer.state.log_history for key in row if "/" in key}
    assert logged == {*expected.scores, *expected.logged}


def test_a_new_measure_is_named_by_help_and_errors(capsys):
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "short, length" in text and "--most MOST length: tokens at most (default 100)" in text
    assert "length" in by_task() and Length.model_fields["most"].default == 100


@pytest.mark.parametrize("has_texts", [True, False])
def test_all_stands_for_every_task_that_can_run_and_others_may_stand_next_to_it(has_texts):
    def named(*tasks):
        return [measure.name for measure in choose(tasks, has_texts, "tasks")]

    free = [
        name for name, measure in by_task().items() if not measure.costly and (has_texts or not measure.needs_texts)
    ]
    assert named("all") == named("all", "passkey") == free and "ruler" not in free
    assert named("all", "ruler") == [*free, "ruler"] and named("ruler", "all") == ["ruler", *free]
    with pytest.raises(PoSEError, match="tasks=nedle is unknown"):
        named("all", "nedle")
