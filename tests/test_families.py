"""Model families, one row each: the rope is live, the self-test passes packed or not, a training step trains.

The models are tiny and random, of the real classes. Families that cannot work raise an error that names them.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers as t

from pose_plugin.attention import attention_function, restart_boundaries
from pose_plugin.collator import PositionCollator
from pose_plugin.rope import extend_context, verify_rope
from pose_plugin.selftest import self_test
from pose_plugin.utils.errors import PoSEError, SelfTestError
from tests.models import CONFIGS, SMALL, WINDOW, build, small_config
from tests.reference_kernels import flash_attention
from tests.test_attention import stack_single
from tests.test_collator import stack_packs

TARGET = 8 * WINDOW
ROUNDING = 1e-5
TWO_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
# Families that mix attention with linear layers, as published: three of four layers.
FOUR = {"num_hidden_layers": 4}
LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True}
QWEN35 = {**FOUR, **LINEAR, "head_dim": 32, "rope_parameters": MROPE | {"mrope_section": [3, 3, 2]}}
GPTJ = {"vocab_size": 48, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": WINDOW, "rotary_dim": 16}

PUBLISHED_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
HUNYUAN = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
ALL_FULL = ["full_attention"] * 2
# family: (rope, what its config has beside the sizes of SMALL)
CHANGES = {
    "qwen2": ("yarn", {}),
    "olmo2": ("linear", {}),
    "mixtral": ("ntk", TWO_EXPERTS),
    "qwen3_moe": ("yarn", EXPERTS),
    "smollm3": ("yarn", {}),
    "granite": ("yarn", {}),
    "phi": ("linear", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "starcoder2": ("yarn", {}),
    "cohere": ("linear", {}),
    "stablelm": ("linear", {}),
    "glm4": ("linear", {"head_dim": 32}),
    "qwen3_5_text": ("yarn", QWEN35),
    "qwen3_5_moe_text": ("yarn", {**QWEN35, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_next": ("yarn", {**FOUR, **LINEAR, **EXPERTS, "head_dim": 32, "shared_expert_intermediate_size": 32}),
    "ministral3": ("yarn", {"sliding_window": None, "rope_parameters": PUBLISHED_YARN}),
    "hunyuan_v1_dense": ("yarn", {"head_dim": 32, "rope_theta": 1e4, "rope_scaling": HUNYUAN}),
    "glm4_moe": ("yarn", {"head_dim": 32, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
                          "topk_group": 1, "moe_intermediate_size": 16}),
    "lfm2": ("yarn", {**FOUR, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "ernie4_5": ("yarn", {}),
    "seed_oss": ("yarn", {"head_dim": 32}),
    "exaone4": ("llama3", {"sliding_window": None, "layer_types": ALL_FULL}),
    "nanochat": ("yarn", {}),
    "ministral": ("yarn", {"layer_types": ALL_FULL}),
    "llama4_text": ("yarn", {**FOUR, **TWO_EXPERTS, "head_dim": 32, "intermediate_size_mlp": 64}),
    "arcee": ("yarn", {}),
    "nemotron": ("linear", {}),
    "minimax_m2": ("yarn", {**TWO_EXPERTS, "head_dim": 32}),
}  # fmt: skip
FALCON = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "max_position_embeddings": WINDOW, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# family: (config, rope)
FAMILIES = {
    **{name: (make, "longrope" if name == "phi3" else "yarn") for name, make in CONFIGS.items()},
    **{name: (partial(small_config, name, **changes), rope) for name, (rope, changes) in CHANGES.items()},
    "qwen3_5": (lambda: t.CONFIG_MAPPING["qwen3_5"](text_config={**SMALL, **QWEN35}), "yarn"),
    "gptj": (lambda: t.GPTJConfig(**GPTJ, bos_token_id=1, eos_token_id=2), "none"),
    "falcon": (lambda: t.FalconConfig(**FALCON), "ntk"),
}
REFUSED = {
    "gpt2": (lambda: t.GPT2Config(vocab_size=48, n_embd=64, n_layer=2, n_head=2), "'gpt2' has no RoPE"),
    "opt": (lambda: t.OPTConfig(vocab_size=48, hidden_size=64), "'opt' has no RoPE"),
    "gpt_bigcode": (lambda: t.GPTBigCodeConfig(vocab_size=48, n_embd=64), "'gpt_bigcode' has no RoPE"),
    "bloom": (lambda: t.BloomConfig(vocab_size=48, hidden_size=64), "'bloom' has no RoPE"),
    "mpt": (lambda: t.MptConfig(vocab_size=48, d_model=64), "'mpt' has no RoPE"),
    "falcon with ALiBi": (lambda: t.FalconConfig(vocab_size=48, alibi=True), "'falcon' has no RoPE"),
    "mamba": (lambda: t.MambaConfig(vocab_size=48), "'mamba' has no RoPE"),
    "qwen2_vl": (lambda: t.Qwen2VLConfig(), "'qwen2_vl_text' has no text model that can be trained alone"),
    "qwen3_vl": (lambda: t.Qwen3VLConfig(), "'qwen3_vl_text' has no text model that can be trained alone"),
    "gptj": (lambda: t.GPTJConfig(**GPTJ), "'gptj' computes its rotary table with base 10000"),
}


# Ordinary packed rows of these families mix too: transformers builds the masks of the first two without positions,
# unless FlashAttention runs, and the linear layers of the others carry their state from document to document, unless
# their kernels get the borders. The self-test stops such a run.
LINEAR_LAYERS = ("lfm2", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
MIXES = ("falcon", "gpt_oss", *LINEAR_LAYERS)


def tells_documents_apart(model):
    """Whether transformers itself keeps two documents with plain positions apart."""
    ids = torch.arange(3, 15)[None]
    changed = ids.clone()
    changed[0, 2] += 20
    positions = torch.tensor([[0, 1, 2, 3, 4, 5] * 2])
    with torch.no_grad():
        both = [model(each, position_ids=positions).logits[0, 6:] for each in (ids, changed)]
    # Not bit-equal: a changed token may go to another expert, and a matrix of another size rounds differently.
    return torch.allclose(*both, atol=1e-5)


@pytest.fixture
def extended(tmp_path):
    def make(name):
        config, rope = FAMILIES[name][0](), FAMILIES[name][1]
        options = {}
        if rope == "longrope":
            options["factors_file"] = str(tmp_path / "factors.json")
            lists = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0] * 8}
            (tmp_path / "factors.json").write_text(json.dumps(lists))
        model = build(extend_context(config, TARGET, rope, **options))
        model.config.use_cache = False
        return model

    return make


def collator(packed=False, seed=0):
    settings = {"target_length": TARGET, "train_length": WINDOW, "seed": seed}
    return PositionCollator(stack_packs if packed else stack_single, settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rope_is_live(extended, name):
    verify_rope(extended(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_self_test(extended, name):
    model = extended(name)
    report = self_test(model, collator())
    assert report.after_jump > 1e-3 and report.neighbour < ROUNDING and report.other_row < ROUNDING
    if not tells_documents_apart(model):
        with restart_boundaries(), pytest.raises(SelfTestError, match="packed documents see each other"):
            self_test(model, collator(packed=True), pack="lists")
        assert name in MIXES
        return
    with restart_boundaries():
        packed = self_test(model, collator(packed=True), pack="lists")
    assert packed.after_jump > 1e-3 and packed.neighbour < ROUNDING
    assert packed.attention == attention_function(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_trains_every_layer_and_leaves_the_frequencies(extended, name):
    model = extended(name).train()
    tokens = torch.arange(40) % 40 + 3
    batch = collator(seed=1)([{"input_ids": tokens.tolist(), "labels": tokens.tolist()}] * 2)
    assert batch["position_ids"].max() > WINDOW
    with torch.no_grad():
        model(**batch)  # LongRoPE takes its list for long inputs
    before = {key: value.clone() for key, value in model.named_parameters()}
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = [key for key, value in model.named_parameters() if torch.equal(value, before[key])]
    # An expert that got no token learns nothing.
    assert not [key for key in still if "expert" not in key], still
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers() if "freq" in key)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, words = REFUSED[name]
    config = make()
    with pytest.raises(PoSEError) as error:
        extend_context(config, 1 << 20, rope="yarn")
    assert words in str(error.value)


@pytest.mark.parametrize("name, attention", [("gpt_oss", "flash_attention_3"), ("falcon", "flash_attention_2")])
def test_flash_attention_tells_them_apart(monkeypatch, name, attention):
    """With a kernel of plain PyTorch: gpt-oss would load its own from the hub, and Falcon's may not be installed."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.models.falcon import modeling_falcon

    monkeypatch.setattr(modeling_falcon, "_flash_attention_forward", utils._flash_attention_forward, raising=False)
    make, rope = FAMILIES[name]
    with flash_attention():
        config = extend_context(make(), TARGET, rope)
        build_with = "eager" if name == "gpt_oss" else attention
        model = t.AutoModelForCausalLM.from_config(config, attn_implementation=build_with)
        model.config._attn_implementation = attention
        model.config.use_cache = False
        one_row = collator(packed=True)
        one_row.one_row = True
        report = self_test(model, one_row, pack="lists")
    assert report.after_jump > 0.0 and report.neighbour == 0.0 and report.attention == attention
