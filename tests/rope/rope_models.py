"""Tiny random models, one row each: a config with an original window of 64 tokens, built in milliseconds."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen3Config,
)

WINDOW = 64
SMALL = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=48, rope_theta=1e6),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, **LAYERS, head_dim=32),
    "phi3": lambda: Phi3Config(**SMALL, partial_rotary_factor=0.5),
    "olmo3": lambda: Olmo3Config(**SMALL, **LAYERS),
    "gpt_neox": lambda: GPTNeoXConfig(**{**SMALL, "num_key_value_heads": 2}, rotary_pct=0.5),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL,
        **LAYERS,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 2},
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
    ),
}
# The dimensions of a head that turn, as each family defines them.
ROTARY_DIM = {
    "llama": 32,
    "qwen3": 48,
    "mistral": 32,
    "gemma2": 32,
    "gemma3": 32,
    "phi3": 16,
    "olmo3": 32,
    "gpt_neox": 16,
    "gpt_oss": 32,
    "deepseek_v3": 16,
}


def words(plan, *severities):
    """The findings of a plan in one text, of all severities or of those given."""
    return " | ".join(str(each) for each in plan.findings if not severities or each.severity in severities)


def build(config, **kwargs):
    """A model with reproducible random weights, in eval mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **kwargs).eval()


def logits(model, positions):
    """Logits of a fixed row of tokens at the given positions, shape [1, len(positions), vocabulary]."""
    position_ids = torch.tensor([positions])
    tokens = torch.arange(len(positions)).unsqueeze(0) % 40 + 3
    # With a mask: without one transformers takes a jump in the positions for the start of another document.
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        return model(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits.float()
