"""Parameters are counted on the model that transformers builds without memory."""

from __future__ import annotations

import pytest

from pose_plugin.plan.memory import architecture
from pose_plugin.utils.errors import PoSEError

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
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_llama_3_8b():
    counted = architecture(LLAMA3_8B)
    # transformers' own count is 8,030,261,248; rank 16 on all linear maps of the layers.
    assert counted.total == 8_030_261_248
    assert counted.lora(16, "all-linear") == counted.lora(16, LINEAR) == 41_943_040
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert counted.quantised() == 32 * layer
    # Two norms per layer, and the last norm.
    assert counted.layer == layer + 2 * 4096 + 4096 // 32
    assert (counted.queries, counted.key_values, counted.intermediate) == (4096, 1024, 14336)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_tied_head_counts_once(family):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    small |= {"n_embd": 64, "n_layer": 2, "n_head": 4} if family == "gpt2" else {}
    tied, untied = (architecture({"model_type": family, **small, "tie_word_embeddings": tie}) for tie in (True, False))
    assert untied.total - tied.total == tied.embeddings == 64_000 and tied.layer == untied.layer


def test_a_mixture_counts_all_experts_and_computes_with_some():
    mixture = {**LLAMA3_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    counted, dense = architecture(mixture), architecture(LLAMA3_8B)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert counted.total == dense.total + experts * 7 // 8 + 32 * 8 * 4096
    assert counted.intermediate == 2 * 14336
    # bitsandbytes quantises linear maps alone, unless Axolotl's quantize_moe_experts is on.
    assert counted.quantised(experts=True) - counted.quantised() == experts


def test_the_text_part_of_a_model_with_images():
    text = {key: value for key, value in LLAMA3_8B.items() if key != "model_type"}
    counted = architecture({"model_type": "gemma3", "text_config": {**text, "num_hidden_layers": 2, "head_dim": 128}})
    assert not any("vision" in name for name in counted.modules)
    whole = architecture({"model_type": "qwen2_5_vl", "text_config": {**text, "num_hidden_layers": 2}})
    assert whole.layers == 2 and any("visual" in name for name in whole.modules)


def test_lora_counts_are_those_of_peft():
    peft = pytest.importorskip("peft")
    from tests.models import make_llama

    counted = architecture(make_llama(num_key_value_heads=1).config)
    for targets, saved in (
        (["q_proj", "v_proj"], ["embed_tokens", "lm_head", "input_layernorm", "post_attention_layernorm", "norm"]),
        ("all-linear", ["norm"]),
        (r".*\.1\..*(q|up)_proj", ["model.embed_tokens"]),
        (["layers.0.mlp.up_proj", "lm_head"], ["input_layernorm"]),
    ):
        config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved)
        adapted = peft.get_peft_model(make_llama(num_key_value_heads=1), config)
        expected = counted.lora(4, targets) + counted.whole(saved)
        assert adapted.get_nb_trainable_parameters()[0] == expected


def test_what_cannot_be_counted_is_named():
    with pytest.raises(PoSEError, match=r"'c_attn'.*q_proj"):
        architecture(LLAMA3_8B).targets(["q_proj", "c_attn"])
    with pytest.raises(PoSEError, match=r"config\.json"):
        architecture({**LLAMA3_8B, "vocab_size": -1})
    with pytest.raises(PoSEError, match=r"model_type='mamba'.*num_attention_heads"):
        architecture({"model_type": "mamba", "num_hidden_layers": 2})


def test_an_unknown_model_type_counts_as_a_llama():
    counted = architecture({**LLAMA3_8B, "model_type": "unheard"})
    assert not counted.known and counted.total == architecture(LLAMA3_8B).total


def test_convolutions_of_linear_attention_are_no_experts():
    from transformers import CONFIG_MAPPING

    from tests.test_families import QWEN35, SMALL

    found = architecture(CONFIG_MAPPING["qwen3_5"](text_config={**SMALL, **QWEN35}))
    assert (found.experts, found.intermediate) == (0, SMALL["intermediate_size"])
