"""The configs of published models in tests/data/published_configs, and tiny models with the same positions.

`models.jsonl` holds one model per line: the fields of its config.json that bear on positions and shape, the file where
they were read, and what is expected of it:

- `original`: L_0, the window before any scaling, tokens.
- `window`: tokens, if max_position_embeddings does not say it.
- `refused`: a key of `REFUSALS`, if no kind of RoPE can extend the model.
- `except`: kind → key of `REFUSALS`, for single kinds that cannot.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pose_plugin.rope.read import as_config, text_config
from pose_plugin.rope.stretch import KINDS

# By how much the window of each base is multiplied.
FACTORS = (2, 8)
# `auto` searches a base; for more tokens that takes seconds.
AUTO_SEARCHES = 140_000
# Why a model or a kind raises an error: what the page says, and the words of the message.
REFUSALS = {
    "dynamic": "for inference only",
    "far layers": "the layers with RoPE see a short window only",
    "groups of layers": "its rope does not say which layers see far",
    "no rope": "it has no RoPE",
    "proportional": "part of each head is not rotated",
    "table": "its modelling code reads no RoPE parameters",
    "three positions": "its text model cannot be trained alone",
}
MESSAGES = {
    "dynamic": "dynamic NTK is for inference only",
    "far layers": "both rotates and sees beyond",
    "groups of layers": "keeps its rope under",
    "no rope": "has no RoPE",
    "proportional": "proportional rope",
    "table": "computes its rotary table with base 10000",
    "three positions": "no text model that can be trained alone",
}

FILE = Path(__file__).parent / "data" / "published_configs" / "models.jsonl"


@dataclass(frozen=True)
class Published:
    """One line of models.jsonl."""

    model: str
    read_in: str
    config: dict[str, Any]
    original: int | None = None
    window: int = 0
    refused: str | None = None
    unlike: dict[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @cached_property
    def full(self) -> Any:
        """Return the config object, with the defaults of its class."""
        return as_config(self.config)


def published() -> list[Published]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return [Published(unlike=row.pop("except", {}), **({"window": _maximum(row["config"])} | row)) for row in rows]


def extensions(base: Published) -> list[tuple[str, int]]:
    """Return the kinds and factors that extend a base. `dynamic` never does: it is for inference only."""
    if base.refused:
        return []
    pairs = [(kind, factor) for kind in KINDS if kind not in (*base.unlike, "dynamic") for factor in FACTORS]
    return [(kind, factor) for kind, factor in pairs if kind != "auto" or factor * base.window <= AUTO_SEARCHES]


def _maximum(config: dict[str, Any]) -> int:
    return int(config.get("text_config", config).get("max_position_embeddings", 0))


# Sizes on which no rotary embedding depends. A key is changed only if the config has it.
_SMALL = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_attention_heads": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_topk": 1,
    "top_k_experts": 1,
    "n_routed_experts": 2,
    "num_experts": 2,
    "num_local_experts": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_kv_heads": 2,
    "num_kv_shared_layers": 0,
    "index_n_heads": 2,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
# Lists of layer indices, instead of one entry per layer.
_INDICES = ("moe_layers", "mlp_only_layers", "full_attn_idxs")


def shrunken(config: Any) -> Any:
    """Return the config of a tiny text model with the same head dimensions, RoPE, windows and kinds of layers."""
    text = text_config(config)
    values = copy.deepcopy(text.to_dict())
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    head = values.get("head_dim") or text.hidden_size // heads
    per_layer = values.pop("per_layer_config", {})
    kept = _layers_of_each_kind(values, layers)
    for key, value in values.items():
        if "intermediate_size" in key and isinstance(value, list):
            values[key] = [32] * len(kept)
        elif key in _INDICES and value:
            values[key] = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, list) and len(value) == layers:
            values[key] = [value[layer] for layer in kept]
        elif value and ("intermediate_size" in key or "ffn_hidden_size" in key or "lora_rank" in key):
            values[key] = 32
        elif value and key in ("num_key_value_heads", "num_global_key_value_heads"):
            values[key] = 2 if value == heads else 1
        elif value and key in _SMALL:
            values[key] = _SMALL[key]
    values |= _TOKENS | {"hidden_size": 2 * head, "num_hidden_layers": len(kept)}
    if per_layer:
        chosen = {kept.index(int(layer)): changes for layer, changes in per_layer.items() if int(layer) in kept}
        values["per_layer_config"] = {k: {**v, "num_key_value_heads": 1} for k, v in chosen.items()}
    return type(text).from_dict(values)


def _layers_of_each_kind(values: dict[str, Any], count: int) -> list[int]:
    """Return at least two layers: the first of each combination of the config's entries per layer."""
    lists = [v for k, v in values.items() if isinstance(v, list) and len(v) == count and k not in _INDICES]
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(str([each[layer] for each in lists]), layer)
    return sorted(first.values()) if len(first) > 1 else list(range(min(2, count)))


def build(config: Any) -> Any:
    """Return a model with reproducible random weights, in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
