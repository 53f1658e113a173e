"""Any published base with changed fields and any kind of RoPE: a sentence, or a config that is right and reloads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pose_plugin.rope import extend_context
from pose_plugin.rope.read import RECORD_KEY, text_config
from pose_plugin.rope.source import read_rope
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.errors import PoSEError
from tests.fuzz.settings import fuzz

BASES = [
    {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    | {"intermediate_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 8192, "rope_theta": 5e5},
    {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    | {"intermediate_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 4096, "head_dim": 32}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
]
CONFIGS = Path(__file__).parent.parent / "data" / "published_configs" / "models.jsonl"
BASES += [json.loads(line)["config"] for line in CONFIGS.read_text(encoding="utf-8").splitlines()]
ROPES = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["default", "linear", "yarn", "llama3", "dynamic", "longrope", "su", "odd", 3])},
        optional={
            "rope_theta": st.sampled_from([1e4, 5e5, "1e6", [1e4], [1e4, 1e5], -1.0, None]),
            "factor": st.sampled_from([1.0, 2, 8.0, 0.5, "4", None, float("inf")]),
            "original_max_position_embeddings": st.sampled_from([1024, 4096, 4096.0, 0, "2048", None]),
            "attention_factor": st.sampled_from([1.0, 1.2, -1.0, None]),
            "low_freq_factor": st.sampled_from([1.0, 4.0]),
            "high_freq_factor": st.sampled_from([1.0, 4.0]),
            "mscale": st.sampled_from([1.0, 0.7]),
            "long_factor": st.sampled_from([[2.0] * 16, [2.0] * 3, "x"]),
            "short_factor": st.sampled_from([[1.0] * 16, []]),
            "unheard_of": st.just(1),
        },
    ),
)
LENGTHS = st.sampled_from([1, 1024, 8192, 16384, 131072, 2**31 - 1, 0, -5, 8192.0, "8192", None])


@fuzz(cost=10)
@given(st.sampled_from(BASES), ROPES, LENGTHS, st.sampled_from(sorted(KINDS)), st.sampled_from([2, 8, 1.5]))
def test_any_base_and_kind(base, rope, maximum, kind, times):
    config = copy.deepcopy(base)
    text = config.get("text_config", config)
    if rope is not None:
        text[("rope_scaling", "rope_parameters")["rope_parameters" in text]] = rope
    if maximum != 1:
        text["max_position_embeddings"] = maximum
    before = copy.deepcopy(config)
    try:
        source = read_rope(config)
        target = int(source.window * times)
        extended = extend_context(config, target_length=target, rope=kind)
    except PoSEError as error:
        assert str(error)
        return
    assert config == before, "the base's config is not modified"
    again = read_rope(extended)
    if kind != "none":
        assert text_config(extended)["max_position_embeddings"] == target
        assert text_config(extended)[RECORD_KEY]["target_length"] == target
        slowest = np.flatnonzero(source.frequencies)[-1]
        assert again.frequencies[slowest] <= source.frequencies[slowest] * (1 + 1e-4), "never faster than the base"
