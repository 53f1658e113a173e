"""What a real TRL run leaves behind: embeddings and norms of an adapter, record, probe, card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pose_plugin.checkpoints import check, read_record, reload_worker
from pose_plugin.cli.main import main
from tests.forked import Outcome, forked

pytest.importorskip("trl")
pytest.importorskip("peft")

WHOLE = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]


def run_lora(folder: Path, whole: list[str] | None) -> dict[str, Any]:
    from peft import LoraConfig

    from tests.integration import trl_runs

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=whole)
    trainer = trl_runs.sft(
        folder, peft=adapter, num_train_epochs=1, eval_strategy="no", save_strategy="steps", save_steps=2
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    trainer.save_model()
    moved = [name for name, p in trainer.model.named_parameters() if name in before and not p.equal(before[name])]
    # As an upload would, which writes the card again.
    trainer.create_model_card(model_name="mine")
    return {"moved": moved, "trainable": list(before)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("trl")
    return folder, forked(run_lora, folder, WHOLE)


@pytest.fixture
def here(monkeypatch) -> None:
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))


def test_embeddings_and_norms_are_trained_and_saved(ran):
    folder, outcome = ran
    result = outcome.value
    for part in ("embed_tokens", "input_layernorm", "post_attention_layernorm", ".norm.", "lora_"):
        names = [name for name in result["trainable"] if part in name]
        assert names and set(names) <= set(result["moved"]), part
    saved = load_file(folder / "out" / "adapter_model.safetensors")
    base = load_file(folder / "base" / "model.safetensors")
    for part in WHOLE:
        mine = {name: tensor for name, tensor in saved.items() if f"{part}.weight" in name}
        assert mine
        for name, tensor in mine.items():
            (original,) = [base[key] for key in base if name.endswith(f".{key}")]
            assert tensor.shape == original.shape and not tensor.equal(original)
    assert "leaves" not in outcome.output


def test_frozen_embeddings_and_norms_are_logged_and_an_existing_card_keeps_its_text(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\nWords of mine.\n")
    output = forked(run_lora, tmp_path, None).output
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# Mine\n\nWords of mine." in text and "license: mit" in text and text.count("pose-plugin: begin") == 1
    assert "a context window of 512 tokens" in text and "was trained with SFT" not in text
    assert output.count("its text stays, and our section is put into it") == 1
    assert output.count("the adapter leaves embeddings and norms frozen, and 64 → 512 tokens is a stretch by 8") == 1


@pytest.mark.parametrize("part", ["", "checkpoint-2"])
def test_it_passes_the_check(ran, here, part, capsys):
    assert main(["check", str(ran[0] / "out" / part)]) == 0, capsys.readouterr().out
    # A checkpoint lacks the older form on purpose, and the report notes it.
    assert ("on purpose" in capsys.readouterr().out) is bool(part)


def test_checkpoint_and_end_are_different_models(ran, here):
    folder = ran[0] / "out"
    report = check.check_folder(folder / "checkpoint-2", like=folder)
    assert report.differing() == ["logits"]


def test_record(ran):
    record = read_record(ran[0] / "out")
    assert record["method"] == "lora"
    assert (record["adapter"]["r"], sorted(record["adapter"]["modules_to_save"])) == (4, sorted(WHOLE))
    assert record["trained"]["steps"] == 4 and record["trained"]["first_process"]["tokens"] > 0
    assert record["model"]["original_length"] == 64 and record["model"]["max_position_embeddings"] == 512
    assert record["versions"].keys() >= {"pose_plugin", "torch", "transformers", "trl", "peft"}
    assert record["hardware"].startswith("1 × ")


def test_card_beside_trls_own(ran):
    text = (ran[0] / "out" / "README.md").read_text()
    assert text.count("<!-- pose-plugin: begin -->") == text.count("<!-- pose-plugin: end -->") == 1
    assert "a context window of 512 tokens" in text and "| window, tokens | 64 → 512 (8×) |" in text
    # TRL's text stays, after the section.
    assert "was trained with SFT" in text
    assert text.index("pose-plugin: end") < text.index("TRL")
    assert json.loads((ran[0] / "out" / "pose.json").read_text())["target_length"] == 512
