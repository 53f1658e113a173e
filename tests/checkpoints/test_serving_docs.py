"""The commands and snippets of docs/serving.md and the README run; its table is what was measured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pose_plugin.checkpoints import check, reload_worker
from pose_plugin.cli.main import main
from tests.models import extended, make_tokenizer, save_adapter, save_full
from tests.pages import ROOT, benchmark, blocks, commands, committed

pytest.importorskip("peft")

PAGE = ROOT / "docs" / "serving.md"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))
    save_full(Path("outputs/model"), base=Path("base"))
    save_adapter(Path("outputs/adapter"), base=Path("base"))
    return tmp_path


def test_commands(home, capsys):
    # Merged as the page says.
    (merge,) = [line for line in commands("python -c") if "merge_and_unload" in line[2]]
    exec(merge[2], {})
    lines = commands("pose-plugin check") + commands("pose-plugin export") + commands("pose-plugin card")
    # Those of the tutorial and of the page on TRL are run on their models, by the tests of these pages.
    lines = [line for line in lines if not any(own in shlex.join(line) for own in ("llama3-80k", "outputs/long"))]
    assert {line[1] for line in lines} == {"check", "export", "card"} and len(lines) >= 7
    for line in lines:
        assert main(line[1:]) == 0, (shlex.join(line), capsys.readouterr())
    assert json.loads(Path("outputs/older/config.json").read_text())["rope_scaling"]["factor"] == 8.0


def test_snippets(home):
    load, own = blocks(PAGE, "python")
    names: dict = {"model": extended(Path("base"), "yarn"), "tokenizer": make_tokenizer()}
    exec(own, names)
    assert main(["check", "outputs/own"]) == 0
    exec(load, names)
    assert names["model"].config.max_position_embeddings == 512


def test_the_table_is_what_was_measured():
    results = committed("engines")
    assert benchmark("engines").table(results) in PAGE.read_text(encoding="utf-8")


def test_a_quick_run_without_engines(tmp_path):
    """The part that needs nothing installed: models are made, the table is printed."""
    module = benchmark("engines")
    module.save_model(tmp_path / "model", "yarn")
    assert main(["check", str(tmp_path / "model")]) == 0
    assert "| yarn | – | – | – | – |" in module.table({"ropes": {"yarn": {}}, "passkey": None})
