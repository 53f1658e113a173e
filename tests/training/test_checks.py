"""Adapters that leave frozen what a large stretch needs trained are told, and how to mend it."""

from __future__ import annotations

import pytest

from pose_plugin import extend_context
from pose_plugin.training.checks import frozen_parts, warning_of_frozen_parts
from tests.conftest import make_llama

peft = pytest.importorskip("peft")


def model(target: int, **lora):
    plain = make_llama()
    built = type(plain)(extend_context(plain.config, target, "yarn"))
    if not lora:
        return built
    return peft.get_peft_model(built, peft.LoraConfig(target_modules=["q_proj"], r=2, **lora))


NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


@pytest.mark.parametrize(
    ("lora", "frozen"),
    [
        ({}, []),
        ({"lora_dropout": 0.0}, ["embeddings", "norms"]),
        ({"modules_to_save": ["embed_tokens"]}, ["norms"]),
        ({"modules_to_save": NORMS}, ["embeddings"]),
        ({"modules_to_save": ["embed_tokens", *NORMS]}, []),
    ],
    ids=["full", "lora", "embeddings", "norms", "both"],
)
def test_frozen_parts(lora, frozen):
    assert frozen_parts(model(512, **lora)) == frozen


def test_the_warning_names_the_modules_of_this_model():
    text = warning_of_frozen_parts(model(512, lora_dropout=0.0), 512)
    assert text is not None and "64 → 512" in text and "stretch by 8" in text
    names = text.split("modules_to_save=[")[1].split("]")[0].split(", ")
    assert names == ["embed_tokens", *sorted(NORMS)]
    # As the advice says, nothing is left to warn of.
    assert frozen_parts(model(512, modules_to_save=names)) == []


@pytest.mark.parametrize(("target", "lora"), [(256, {"lora_dropout": 0.0}), (512, {})], ids=["small stretch", "full"])
def test_no_warning_where_none_is_due(target, lora):
    assert warning_of_frozen_parts(model(target, **lora), target) is None
