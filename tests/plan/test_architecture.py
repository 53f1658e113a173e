"""Parameters counted from config.json alone are those of the model that transformers builds from it."""

from __future__ import annotations

import pytest

from pose_plugin.plan.memory import KNOWN, architecture
from pose_plugin.rope.read import as_config
from pose_plugin.utils.errors import PoSEError

SIZES = {
    "vocab_size": 136,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def built(family: str, **changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Most configs name a pad token of the real vocabulary.
    config = AutoConfig.for_model(family, **{**SIZES, "pad_token_id": 0, **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "family, changes",
    [
        *((family, {}) for family in KNOWN),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mixtral", {"num_local_experts": 3}),
        ("qwen2", {"head_dim": 12}),
    ],
)
def test_counts_are_those_of_the_built_model(family, changes):
    model = built(family, **changes)
    counted = architecture(model.config.to_dict())
    assert counted.known
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.beside(["embed_tokens"]) == model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("family", KNOWN)
def test_a_config_file_that_leaves_the_heads_tie_out(family):
    """As files that older transformers wrote: the family's default stands for it."""
    config = built(family).config.to_dict()
    tied = config.pop("tie_word_embeddings")
    assert (architecture(config).head == 0) == tied
    assert architecture(as_config(config)).total == architecture(config).total


def test_llama_3_8b():
    counted = architecture(LLAMA3_8B)
    assert counted.total == 8_030_261_248
    # Rank 16 on all linear maps of the layers.
    assert counted.lora(16, list(counted.linear)) == 41_943_040


def test_lora_counts_are_those_of_peft():
    peft = pytest.importorskip("peft")
    from tests.conftest import make_llama

    model = make_llama(num_key_value_heads=1)
    counted = architecture(model.config)
    every = list(counted.linear)
    for targets, saved in (
        (["q_proj", "v_proj"], ["embed_tokens", "lm_head", "input_layernorm", "post_attention_layernorm", "norm"]),
        (every, ["norm"]),
        (every, ["input_layernorm", "model.embed_tokens"]),
    ):
        config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved)
        adapted = peft.get_peft_model(make_llama(num_key_value_heads=1), config)
        expected = counted.lora(4, targets) + counted.beside(saved)
        assert adapted.get_nb_trainable_parameters()[0] == expected


def test_beacons_are_counted_as_they_are_made():
    peft = pytest.importorskip("peft")
    from pose_plugin import BeaconConfig
    from pose_plugin.plan.memory import Run, memory
    from tests.conftest import make_llama

    sizes = architecture(make_llama().config)
    for rank, targets in ((0, ["q_proj", "k_proj", "v_proj", "o_proj"]), (4, ["k_proj", "v_proj"])):
        config = BeaconConfig(interval=16, ratios=[2], rank=rank, target_modules=targets)
        made = peft.get_peft_model(make_llama(), config).get_nb_trainable_parameters()[0]
        assert memory(sizes, Run("beacon", rank, targets)).trained_parameters == made


def test_what_cannot_be_counted_is_named():
    with pytest.raises(PoSEError, match="intermediate_size=None"):
        architecture({key: value for key, value in LLAMA3_8B.items() if key != "intermediate_size"})
    with pytest.raises(PoSEError, match="c_attn, which this model does not have; it has q_proj, k_proj"):
        architecture(LLAMA3_8B).lora(8, ["c_attn"])
    assert not architecture({**LLAMA3_8B, "model_type": "unheard"}).known
