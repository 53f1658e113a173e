"""`load_extended`, and the warning about a plain base: an adapter runs at its frequencies, or a warning is logged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("peft")

from pose_plugin import PoSECollator, PoSEError, RopeMismatchError, extend_context, load_extended
from pose_plugin.checkpoints.load import require_extension
from pose_plugin.checkpoints.probe import read_probe, take_probe
from tests.forked import forked
from tests.models import TARGET, make_llama, make_tokenizer, save, save_adapter, save_full


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("loading")
    save_full(folder / "full")
    save_adapter(folder / "adapter", modules_to_save=["embed_tokens", "norm"])
    return folder


@pytest.mark.parametrize("name", ["full", "adapter"])
def test_what_was_trained_is_loaded(home, name):
    model = load_extended(home / name)
    assert model.config.max_position_embeddings == TARGET
    np.testing.assert_allclose(take_probe(model, TARGET)["logits"], read_probe(home / name)["logits"], atol=1e-5)


def test_arguments_reach_the_base(home):
    model = load_extended(home / "adapter", dtype=torch.bfloat16, attn_implementation="eager", is_trainable=True)
    assert model.get_base_model().lm_head.weight.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_a_base_that_has_moved(home, tmp_path):
    shutil.copytree(home / "adapter", tmp_path / "adapter")
    shutil.copytree(home / "base", tmp_path / "elsewhere")
    model = load_extended(tmp_path / "adapter", base=str(tmp_path / "elsewhere"))
    np.testing.assert_allclose(take_probe(model, TARGET)["logits"], read_probe(home / "adapter")["logits"], atol=1e-5)


def test_a_base_whose_files_are_quantised(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    make_llama(initializer_range=0.3, hidden_size=64).save_pretrained(tmp_path / "whole")
    halved = BitsAndBytesConfig(load_in_4bit=True)
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=halved), tmp_path / "base")
    config = extend_context(AutoConfig.from_pretrained(tmp_path / "base"), TARGET)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    args = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[])
    collator = PoSECollator(make_tokenizer(), target_length=TARGET)
    Trainer(model, args, train_dataset=[{"input_ids": [3, 4]}], data_collator=collator).save_model()
    loaded = take_probe(load_extended(tmp_path / "out"), TARGET)
    np.testing.assert_allclose(loaded["logits"], read_probe(tmp_path / "out")["logits"], atol=1e-4)


def test_a_base_of_a_full_model_is_refused(home):
    with pytest.raises(PoSEError, match="base='elsewhere' has no effect"):
        load_extended(home / "full", base="elsewhere")


def test_an_adapter_without_its_config_is_refused(home, tmp_path):
    shutil.copytree(home / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").unlink()
    with pytest.raises(PoSEError, match=r"config\.json.*extend_context"):
        load_extended(tmp_path / "adapter")


@pytest.mark.parametrize(("name", "words"), [("", r"config\.json"), ("nothing", "nothing")])
def test_folders_without_a_model(tmp_path, name, words):
    with pytest.raises(PoSEError, match=words):
        load_extended(tmp_path / name)


def test_a_plain_base_is_refused(home):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(home / "base")
    with pytest.raises(RopeMismatchError) as error:
        require_extension(plain, home / "adapter")
    assert "was trained for 512 tokens" in str(error.value) and "load_extended" in str(error.value)
    # A raised maximum alone does not do it.
    plain.config.max_position_embeddings = TARGET
    with pytest.raises(RopeMismatchError, match=r"inv_freq\[1\]"):
        require_extension(plain, home / "adapter")


def test_peft_warns_of_a_plain_base_and_of_nothing_else(home, tmp_path):
    """In a script that does not know this package, as long as it is installed."""

    def case() -> tuple[int, int, int]:
        import peft
        from transformers import AutoConfig, AutoModelForCausalLM

        from pose_plugin import _autoload
        from pose_plugin.utils.log import log

        _autoload._notice_plain_bases(peft.peft_model)
        _autoload._notice_plain_bases(peft.peft_model)
        logged: list[str] = []
        log.warning = lambda text, *args: logged.append(text % args)  # type: ignore[method-assign]

        def load(adapter: Path, extended: bool) -> int:
            config = AutoConfig.from_pretrained(home / ("adapter" if extended else "base"))
            base = AutoModelForCausalLM.from_pretrained(home / "base", config=config)
            logged.clear()
            peft.PeftModel.from_pretrained(base, str(adapter))
            return len([text for text in logged if "was trained for 512 tokens" in text])

        foreign = tmp_path / "foreign"
        shutil.copytree(home / "adapter", foreign)
        (foreign / "pose.json").unlink()
        return load(home / "adapter", False), load(home / "adapter", True), load(foreign, False)

    assert forked(case).value == (1, 0, 0)
