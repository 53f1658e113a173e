"""What vLLM and SGLang make of a config, in our own words, from their sources.

vLLM (https://github.com/vllm-project/vllm), vllm/config/model.py at 18ec6629253632af0a384f2ffbb8c6b28af322e7 and
vllm/model_executor/layers/rotary_embedding at 07b12f1b16d5568eeb29a52fd8c9296a51f478ed (yarn_scaling_rope.py at
0cd5784803d83f81fac0794b82cb592d4317d4bf). SGLang (https://github.com/sgl-project/sglang),
python/sglang/srt/configs/model_config.py at 001adf564fd332c285397a46a034ee2f93ba7515, `get_context_length` in
python/sglang/srt/utils/hf_transformers, and python/sglang/srt/layers/rotary_embedding at
108c36c008291c3a1ea524342837056c503c5724 (yarn.py at 0b1fd02d56f010c589968aa6e05534e10c2d4bf3).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Row = tuple[np.ndarray, float]
"""Angles of one position, [d/2], and the scale of cos and sin."""


def vllm_maxima(config: dict[str, Any], tokenizer_maximum: int) -> tuple[int, int]:
    """(what it takes by itself, the most that --max-model-len may say)."""
    rope = config["rope_parameters"]
    most = min(config["max_position_embeddings"], tokenizer_maximum)
    if rope["rope_type"] not in ("su", "longrope", "llama3"):
        if rope["rope_type"] == "yarn":
            most = rope["original_max_position_embeddings"]
        most = most * rope.get("factor", 1.0)
    by_itself = most
    if rope["rope_type"] == "longrope":
        by_itself = config.get("original_max_position_embeddings", most)
    return int(by_itself), int(most)


def sglang_maxima(config: dict[str, Any]) -> tuple[int, int]:
    """The same of SGLang, for --context-length."""
    rope = config["rope_parameters"]
    factor = rope.get("factor", 1)
    if "original_max_position_embeddings" in rope or rope["rope_type"] == "llama3":
        factor = 1
    most = int(config["max_position_embeddings"] * factor)
    return most, most


def vllm_row(rope: dict[str, Any], dim: int, position: int, maximum: int) -> Row:
    """The row of vLLM's table of cos and sin that a position looks up."""
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind == "linear":
        # The table has maximum · factor rows; row p holds the angle p / factor.
        assert position < maximum * rope["factor"]
        return position / rope["factor"] * _plain(base, dim), 1.0
    if kind == "yarn":
        assert position < max(math.ceil(rope["original_max_position_embeddings"] * rope["factor"]), maximum)
        scale = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0
        return position * _yarn(rope, dim), scale
    return _shared(rope, dim, position, maximum)


def sglang_row(rope: dict[str, Any], dim: int, position: int, maximum: int) -> Row:
    """The same of SGLang, which does not read attention_factor."""
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind == "linear":
        return position / rope["factor"] * _plain(base, dim), 1.0
    if kind == "yarn":
        assert position < rope["original_max_position_embeddings"] * rope["factor"]
        return position * _yarn(rope, dim), (0.1 * math.log(rope["factor"]) + 1.0) * rope.get("attn_factor", 1.0)
    return _shared(rope, dim, position, maximum)


def _shared(rope: dict[str, Any], dim: int, position: int, maximum: int) -> Row:
    """What both engines do alike."""
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind == "default":
        assert position < maximum
        return position * _plain(base, dim), 1.0
    if kind == "llama3":
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        plain = _plain(base, dim)
        result = []
        for frequency in plain:
            wave = 2 * math.pi / frequency
            if wave < high:
                result.append(frequency)
            elif wave > low:
                result.append(frequency / rope["factor"])
            else:
                share = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                    rope["high_freq_factor"] - rope["low_freq_factor"]
                )
                result.append((1 - share) * frequency / rope["factor"] + share * frequency)
        return position * np.array(result), 1.0
    assert kind == "longrope"
    # The long list throughout, as the engine's maximum is beyond the original one.
    original = rope["original_max_position_embeddings"]
    own = math.sqrt(1 + math.log(maximum / original) / math.log(original))
    return position * _plain(base, dim) / np.array(rope["long_factor"]), rope.get("long_mscale", own)


def _plain(base: float, dim: int) -> np.ndarray:
    return 1.0 / base ** (np.arange(0, dim, 2) / dim)


def _yarn(rope: dict[str, Any], dim: int) -> np.ndarray:
    def index(turns: float) -> float:
        length = rope["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = index(rope.get("beta_fast", 32)), index(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    keep = 1 - np.clip((np.arange(dim // 2) - low) / (high - low + (0.001 if low == high else 0)), 0, 1)
    plain = _plain(rope["rope_theta"], dim)
    return plain / rope["factor"] * (1 - keep) + plain * keep
