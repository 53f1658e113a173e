"""The commands and snippets of docs/evaluation.md, run on tiny models."""

import importlib.util
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from pose_plugin.cli import main as cli
from pose_plugin.config import parse_settings
from pose_plugin.evaluation.settings import parse_block
from tests.evaluation.model_server import ModelServer
from tests.pages import ROOT, benchmark, blocks, commands, committed

PAGE = ROOT / "docs" / "evaluation.md"


@pytest.fixture
def folders(tmp_path, tokenizer, make_llama, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("base", "outputs/model", "outputs/model/checkpoint-100")):
        make_llama(seed=number).save_pretrained(name)
        tokenizer.save_pretrained(name)
    Path("book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)


HERE = [words for words in commands("pose-plugin evaluate", [PAGE]) if "--url" not in words]


@pytest.mark.parametrize("words", HERE, ids=lambda words: " ".join(words)[:60])
def test_commands(folders, words, capsys, monkeypatch):
    if "--harness" in words:
        # Minutes of prompts: every argument is accepted, up to a package that is missing.
        pytest.importorskip("lm_eval")
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == "wonderwords" else find(name, *a)
        )
        assert cli.main(words[1:]) == 2
        assert 'pip install "lm-eval[ruler]"' in capsys.readouterr().err
        return
    # A random model finds no key token, which leaves LongPPL out and is said by exit code 1.
    assert cli.main([*words[1:], "--quiet"]) == (1 if "all" in words else 0)
    out = capsys.readouterr().out
    assert "2048 tokens ×" in out
    if "all" in words:
        assert "Best over all measures" in out and {p.name for p in Path("judged").glob("*.png")} >= {
            "needle_single.png", "needle_multi.png", "needle_kv.png", "passkey.png", "topics.png", "gap.png"
        }  # fmt: skip


def test_the_command_for_a_served_model(folders, capsys):
    pytest.importorskip("openai")
    (words,) = [words for words in commands("pose-plugin evaluate", [PAGE]) if "--url" in words]
    model = AutoModelForCausalLM.from_pretrained("outputs/model").eval()
    with ModelServer(model, AutoTokenizer.from_pretrained("outputs/model")) as server:
        words = [server.url if word.startswith("http") else word for word in words]
        assert cli.main([*words[1:], "--trials", "2", "--quiet"]) == 0
    assert "requests" in capsys.readouterr().out


def test_the_table_of_served_models_is_the_committed_one():
    rows = committed("served")["rows"]
    assert benchmark("served").table(committed("served")) in PAGE.read_text(encoding="utf-8")
    assert all(row["equal_answers"] == row["prompts"] for row in rows if row["server"] != "llama.cpp")
    assert all(row["equal_scores"] == row["scored"] for row in rows)
    assert all(row["cached"] > 0 for row in rows if row["measure"] == "haystack" and row["form"] == "ids")


def test_the_blocks_are_valid():
    first, second = (
        parse_block(parse_settings({**yaml.safe_load(text)["pose"], "train_length": 2048}))
        for text in blocks(PAGE, "yaml")
    )
    assert first.schedule.every == 100
    assert [measure.name for measure in second.chosen] == ["longppl", "short"]


def test_snippets(tokenizer, make_llama, tmp_path):
    callback, functions = blocks(PAGE, "python")
    rows = [{"input_ids": list(range(12)), "labels": list(range(12))}] * 4
    args = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(make_llama(), args, train_dataset=rows, processing_class=tokenizer)
    names = {"trainer": trainer}
    exec(callback, names)
    trainer.train()
    assert any({"passkey/512", "parameters/1024"} <= row.keys() for row in trainer.state.log_history)
    text = "The quick brown fox jumps over the lazy dog. " * 400
    exec(functions, {"model": make_llama(), "tokenizer": tokenizer, "texts": [text]})
