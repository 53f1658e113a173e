"""The files of a saved adapter, written out: folders in this format must stay readable."""

from __future__ import annotations

import json

import pytest

from pose_plugin.checkpoints import read_record
from pose_plugin.checkpoints.probe import read_probe
from pose_plugin.checkpoints.saved import base_of, read_saved
from pose_plugin.export import exporter
from pose_plugin.export.card import write_card
from pose_plugin.rope import plan_rope

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2079441541679836,
}
FILES = {
    "config.json": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": ROPE,
        "rope_theta": 10000.0,
        "rope_scaling": ROPE,
        "pose_plugin": {"rope": "yarn", "target_length": 512, "original_length": 64, "original_theta": 10000.0},
    },
    "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "some/base", "revision": "v1", "r": 4},
    "tokenizer_config.json": {"model_max_length": 512},
    "pose.json": {
        "target_length": 512,
        "train_length": 64,
        "rope": {"type": "yarn", "factor": None, "beta_fast": 32.0, "beta_slow": 1.0},
        "sampler": "pose",
        "chunks": 2,
        "model": {"type": "llama", "original_length": 64, "original_theta": 10000.0},
        "base": {"name": "some/base", "revision": "v1"},
        "method": "lora",
        "adapter": {"r": 4, "lora_alpha": 8, "modules_to_save": None},
    },
    "pose_probe.json": {
        "ids": [40, 41],
        "positions": [0, 511],
        "vocabulary": [0, 127],
        "logits": [[0.5, -0.5], [1.0, 2.0]],
        "logsumexp": [1.0, 2.0],
        "frequencies": {"model.rotary_emb.inv_freq": {"inv_freq": [1.0, 0.1], "scale": 1.2}},
        "dtype": "float32",
        "compute": "float32",
        "quantization": None,
    },
}


@pytest.fixture
def folder(tmp_path):
    for name, values in FILES.items():
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


def test_every_file_is_read(folder):
    saved = read_saved(folder)
    assert (saved.kind, saved.factor, saved.maximum, saved.tokenizer_maximum) == ("yarn", 8.0, 512, 512)
    assert saved.base == base_of(folder) and (saved.base.name, saved.base.revision) == ("some/base", "v1")
    assert read_record(folder) == FILES["pose.json"] and read_probe(folder) == FILES["pose_probe.json"]
    assert "--max-model-len 512" in exporter("vllm")(saved).lines[0]
    card = write_card(folder)
    assert card is not None and "64 → 512" in card.read_text() and "LoRA of rank 4" in card.read_text()


def test_it_can_be_extended_further_from_its_true_original():
    plan = plan_rope(FILES["config.json"], 4096)
    assert (plan.original_length, plan.original_theta, plan.factor) == (64, 10000.0, 64.0)
