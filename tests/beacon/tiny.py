"""Random models of two layers for each tested architecture and kind of RoPE."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model

from pose_plugin.beacon import BeaconConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_base(architecture: str = "llama", attention: str = "sdpa", rope: str = "default", **changes: Any) -> Any:
    """Return a base with the same weights at every call: vocabulary 64, window 128, 4 query and 2 key-value heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_parameters": dict(ROPES[rope]),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **changes,
    }
    if architecture in ("llama", "qwen2"):
        values.pop("head_dim")
    config = AutoConfig.for_model(architecture, **values)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():  # larger than usual, so that attention is not flat
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
            elif parameter.abs().max() == 0:
                parameter.data.normal_(std=0.1)  # biases
    return model.eval()


def make_config(**changes: Any) -> BeaconConfig:
    """Return a config with interval 8, ratio 4, no headroom."""
    return BeaconConfig(**{"interval": 8, "ratio": 4, "headroom": 0, **changes})


def make_beacon(architecture: str = "llama", attention: str = "sdpa", rope: str = "default", **changes: Any) -> Any:
    """Return a PEFT model whose beacon weights differ from the base's, as after training."""
    model = get_peft_model(make_base(architecture, attention, rope), make_config(**changes))
    unlike_base(model)
    return model.eval()


def unlike_base(model: Any, seed: int = 1) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=rng) * 0.1
            parameter.data += noise.to(parameter.dtype)


def make_ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))
