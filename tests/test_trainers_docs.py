"""docs/by_hand.md and docs/other_trainers.md: snippets and commands run, and `doctor` reports what the pages show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import pose_plugin
from pose_plugin.cli.main import main
from pose_plugin.rope import inverse_frequencies
from tests.doctor.broken import QWEN2, yarn
from tests.forked import forked
from tests.models import make_llama, make_tokenizer
from tests.pages import ROOT, blocks, commands

BY_HAND, OTHERS = ROOT / "docs" / "by_hand.md", ROOT / "docs" / "other_trainers.md"
WINDOW, TARGET = 8192, 32768


def shown(page: Path) -> list[str]:
    """Return the lines of output that a page shows."""
    return [
        line
        for text in re.findall(r"^```\n(  .*?)^```", page.read_text("utf-8"), re.M | re.S)
        for line in text.splitlines()
    ]


def make_base() -> Any:
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    make_llama(max_position_embeddings=WINDOW, rope_parameters=rope).save_pretrained("base")
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = WINDOW
    tokenizer.save_pretrained("base")
    return tokenizer


def test_trl_by_hand_and_with_one_number(tmp_path, monkeypatch, capfd):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)

    def train(*snippets: str) -> np.ndarray:
        import transformers
        import trl
        from datasets import Dataset

        tokenizer = make_base()
        values: dict[str, Any] = {
            "base": "base",
            "tokenizer": tokenizer,
            "args": trl.SFTConfig("out", max_length=2048, max_steps=1, use_cpu=True, bf16=False, report_to=[]),
            "dataset": Dataset.from_list([{"text": "w9 w10 w11 w12 " * 10}] * 4),
            "SFTTrainer": trl.SFTTrainer,
            "AutoConfig": transformers.AutoConfig,
            "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
            "PoSECollator": pose_plugin.PoSECollator,
            "extend_context": pose_plugin.extend_context,
        }
        for snippet in snippets:
            exec(snippet, values)
        trainer = values["trainer"]
        trainer.train()
        trainer.save_model()
        return next(buffer for name, buffer in trainer.model.named_buffers() if name.endswith("inv_freq")).numpy()

    by_hand, one_number, with_pose = blocks(BY_HAND, "python")
    first = forked(train, by_hand).value
    assert main(["doctor", "out"]) == 1
    assert shown(BY_HAND) == [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert np.allclose(forked(train, one_number).value, first)
    assert json.loads(Path("out/config.json").read_text())["max_position_embeddings"] == TARGET
    forked(train, one_number, with_pose)
    assert main(["doctor", "out"]) == 0
    assert {"pose.json", "README.md"} <= {file.name for file in Path("out").iterdir()}


def test_axolotl_by_hand_and_with_one_number():
    from pose_plugin.config import parse_settings

    by_hand, with_plugin = (yaml.safe_load(text) for text in blocks(BY_HAND, "yaml"))
    base = make_llama(
        max_position_embeddings=WINDOW, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    ).config
    settings = parse_settings({**with_plugin["pose"], "train_length": 2048})
    extended = pose_plugin.extend_context(base, settings.target_length, settings.rope.type)
    written = by_hand["overrides_of_model_config"]
    assert extended.max_position_embeddings == written["max_position_embeddings"] == TARGET
    ours, by_hands = (inverse_frequencies(rope, 16) for rope in (extended.rope_parameters, written["rope_parameters"]))
    assert ours[1] == by_hands[1] and np.array_equal(ours[0], by_hands[0])


def test_commands_for_other_trainers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_base()
    (snippet,) = blocks(OTHERS, "python")
    exec(snippet, {"base": "base"})
    # What LLaMA-Factory 0.9.5, ms-swift 4.5.2 and Unsloth 2026.10 write; none of them is installed here.
    swift = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    folders: dict[str, tuple[dict[str, Any], int]] = {
        "llamafactory": ({"max_position_embeddings": 131072.0, "rope_scaling": yarn(4.0, 32768)}, 131072),
        "swift": ({"max_position_embeddings": 131072, "rope_scaling": swift}, 32768),
        "unsloth": ({"max_position_embeddings": 65536, "rope_scaling": {"type": "linear", "factor": 2.0}}, 32768),
    }
    for name, (config, limit) in folders.items():
        folder = Path("outputs", name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**QWEN2, **config}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    lines = commands("pose-plugin", [OTHERS])
    codes = {"extended": 0, "outputs/llamafactory": 2, "outputs/swift": 1, "outputs/unsloth": 1}
    assert len(lines) == 7
    for line in lines:
        code = codes[line[2]] if line[1] == "doctor" else 0
        assert main(line[1:]) == code, line
    printed = capsys.readouterr().out
    assert len(shown(OTHERS)) == 6
    for line in shown(OTHERS):
        assert line in printed
    assert "vllm serve extended --max-model-len 32768" in printed
    assert "vllm serve outputs/mended --max-model-len 131072" in printed
