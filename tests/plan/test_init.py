"""`pose-plugin init` writes a YAML that `plan` and Axolotl take as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pose_plugin.cli.main import main
from tests.models import make_llama, save
from tests.plan.test_architecture import LLAMA3_8B

ROWS = {
    "text": {"text": "w30 w31 w32 " * 60},
    "messages": {"messages": [{"role": "user", "content": "w30"}, {"role": "assistant", "content": "w31"}]},
    "conversations": {"conversations": [{"from": "human", "value": "w30"}, {"from": "gpt", "value": "w31"}]},
    "instruction": {"instruction": "w30", "output": "w31"},
    "input_ids": {"input_ids": list(range(3, 60)), "attention_mask": [1] * 57, "labels": list(range(3, 60))},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(make_llama(), "base")
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3" / "config.json").write_text(json.dumps(LLAMA3_8B))
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    return tmp_path


@pytest.mark.parametrize("row", ROWS)
def test_plan_takes_what_init_writes(folder, row, capsys):
    line = ["init", "base", "--target-length", "512", "--data", f"{row}.jsonl", "--gpus", "1"]
    for _ in range(2):  # the second time, the same text is there
        assert main([*line, "--output", "c.yaml"]) == 0
    values = yaml.safe_load((folder / "c.yaml").read_text())
    assert values["pose"]["target_length"] == 512
    assert values["pose"].get("train_length", values["sequence_len"]) == 64
    assert main(["plan", "c.yaml", "--draws", "50"]) == 0
    shown = capsys.readouterr().out
    assert "Axolotl does not know" not in shown and "MEMORY" not in (folder / "c.yaml").read_text()


@pytest.mark.parametrize(
    "gpus, memory, method",
    [("1", "80", "full"), ("8", "80", "full"), ("1", "24", "qlora"), ("1", "40", "lora")],
)
def test_the_first_method_that_fits_is_taken(folder, gpus, memory, method):
    line = ["init", "meta-llama/Meta-Llama-3-8B", "--base", "llama3", "--target-length", "80k", "--data", "text.jsonl"]
    assert main([*line, "--gpus", gpus, "--gpu-memory", memory, "--output", "c.yaml"]) == 0
    values = yaml.safe_load((folder / "c.yaml").read_text())
    assert values.get("adapter", "full") == method
    assert values["base_model"] == "meta-llama/Meta-Llama-3-8B" and values["pose"]["target_length"] == 81920
    if gpus != "1":
        assert values["fsdp_config"]["transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"


@pytest.mark.parametrize(
    "change, message",
    [
        (["--target-length", "64"], "64"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--data", "base/config.json"], "base/config.json"),
        (["--gpu-memory", "0.000001"], "--gpu-memory"),
        (["--output", "text.jsonl"], "--output text.jsonl"),
    ],
)
def test_wrong_input(folder, change, message, capsys):
    line = ["init", "base", "--target-length", "512", "--data", "text.jsonl", "--output", "c.yaml", *change]
    assert main(line) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "c.yaml").exists()


def test_the_command_of_the_page(folder, monkeypatch):
    page = (Path(__file__).parent.parent.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^pose-plugin (init .*)$", page, re.M)
    (folder / "rows.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    assert main([*line.split(), "--base", "base"]) == 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["pose"]["target_length"] == 32768
