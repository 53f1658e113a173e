"""The closed forms against published values and against transformers' own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pose_plugin.rope import kinds
from pose_plugin.utils.errors import PoSEError

DIM = 64
MAXIMUM = 4096
LISTS = {
    "long_factor": [1.0 + 0.25 * i for i in range(DIM // 2)],
    "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
}
FROM_512 = {"original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, **FROM_512}

TYPES = {
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
    "yarn": YARN,
    "yarn, large base and factor": {**YARN, "rope_theta": 1e6, "factor": 64.0},
    "yarn, own betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, own attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, DeepSeek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, one mscale alone is ignored": {**YARN, "mscale": 2.0},
    "yarn, null betas": {**YARN, "beta_fast": None, "beta_slow": None},
    "yarn, ramp of zero width": {**YARN, "beta_fast": 90.0, "beta_slow": 90.0, "truncate": False},
    "yarn, factor from the maximum": {**YARN, "factor": None},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **FROM_512,
    },
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **FROM_512, **LISTS},
    "longrope, factor from the maximum": {"rope_type": "longrope", "rope_theta": 1e4, **FROM_512, **LISTS},
    "longrope, own attention factor": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "attention_factor": 1.25,
        **FROM_512,
        **LISTS,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "factor": 2.0,
    },
}


def upstream(parameters, length=None):
    """What transformers computes, through a config object that is not validated."""
    config = LlamaConfig(hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=MAXIMUM, rope_theta=1e4)
    config.rope_parameters = dict(parameters)
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, attention = function(config, "cpu", seq_len=length)
    return frequencies.double().numpy(), attention


@pytest.mark.parametrize("length", [100, 8192])
@pytest.mark.parametrize("name", TYPES)
def test_closed_form_equals_transformers(name, length):
    got, attention = kinds.inverse_frequencies(TYPES[name], DIM, max_position_embeddings=MAXIMUM, length=length)
    want, want_attention = upstream(TYPES[name], length)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=0)
    assert attention == pytest.approx(want_attention, rel=1e-12)


@pytest.mark.parametrize("base", [1e4, 5e5, 2e8])
def test_plain_rope_equals_a_llama_module(base):
    config = LlamaConfig(hidden_size=4 * DIM, num_attention_heads=4, rope_theta=base)
    got, attention = kinds.inverse_frequencies({"rope_type": "default", "rope_theta": base}, DIM)
    np.testing.assert_allclose(got, LlamaRotaryEmbedding(config).inv_freq.double().numpy(), rtol=3e-6)
    assert attention == 1.0


def test_every_upstream_type_has_a_closed_form():
    assert set(ROPE_INIT_FUNCTIONS) <= {row["rope_type"] for row in TYPES.values()}


def test_longrope_takes_the_long_list_beyond_the_original_window_only():
    parameters = TYPES["longrope"]
    plain = kinds.plain_frequencies(1e4, DIM)
    for length, name in [(None, "long_factor"), (513, "long_factor"), (512, "short_factor")]:
        got, _ = kinds.inverse_frequencies(parameters, DIM, length=length)
        np.testing.assert_allclose(got, plain / np.array(LISTS[name]), rtol=1e-15)


def test_ntk_base():
    assert round(kinds.ntk_base(1e4, 8, 128)) == 82685
    # The slowest pair is stretched by exactly s, the fastest stays.
    ratio = kinds.plain_frequencies(1e4, 128) / kinds.plain_frequencies(kinds.ntk_base(1e4, 8, 128), 128)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)


def test_ntk_stretches_the_slowest_pair_that_turns():
    """Gemma 4 leaves three quarters of each head at frequency 0."""
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    before, _ = kinds.inverse_frequencies(rope, 512)
    after, _ = kinds.inverse_frequencies(rope | {"rope_theta": kinds.ntk_base(1e6, 8, 512, 64)}, 512)
    assert before[63] / after[63] == pytest.approx(8) and before[0] == after[0] and not after[64:].any()


@pytest.mark.parametrize(
    ("base", "length", "low", "high"),
    [(1e4, 2048, 16, 41), (1e4, 4096, 20, 46), (5e5, 8192, 18, 35), (1e6, 32768, 23, 40)],
)
def test_yarn_ramp(base, length, low, high):
    ramp = kinds.yarn_ramp(base, 128, length)
    assert ramp[low] == 0.0 and ramp[low + 1] > 0.0
    assert ramp[high] == 1.0 and ramp[high - 1] < 1.0


def test_attention_factors_and_the_inner_term():
    assert kinds.yarn_attention_factor(8) == pytest.approx(1.2079, abs=5e-5)
    assert kinds.yarn_attention_factor(1) == 1.0
    assert kinds.longrope_attention_factor(32, 4096) == pytest.approx(math.sqrt(1 + 5 / 12))
    assert kinds.dynamic_inner_term(8, 16384, 2048) == 57
    assert kinds.dynamic_inner_term(8, 2048, 2048) == 1


@pytest.mark.parametrize(("factor", "apart"), [(4, 1.56), (64, 16.5)])
def test_revised_yarn_departs_from_yarn_in_the_middle_of_the_ramp(factor, apart):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor}
    parameters["original_max_position_embeddings"] = 2048
    yarn, _ = kinds.inverse_frequencies(parameters, 128)
    revised = kinds.plain_frequencies(1e4, 128) / kinds.revised_yarn_factors(1e4, 128, factor, 2048)
    np.testing.assert_allclose(yarn[:17], revised[:17], rtol=1e-12)
    np.testing.assert_allclose(yarn[41:], revised[41:], rtol=1e-12)
    assert (yarn / revised).max() == pytest.approx(apart, rel=0.01)


def test_old_spelling_is_normalised_and_the_argument_kept():
    given = {"type": "su", "original_max_position_embeddings": 4096.0}
    assert kinds.normalise(given) == {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert given == {"type": "su", "original_max_position_embeddings": 4096.0}
    old = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
    np.testing.assert_array_equal(kinds.inverse_frequencies(old, DIM)[0], kinds.inverse_frequencies(YARN, DIM)[0])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "mystery", "rope_theta": 1e4}, ["mystery", "yarn"]),
        ({"rope_type": "linear", "factor": 2.0}, ["rope_theta"]),
        ({"rope_type": "linear", "rope_theta": 1e4}, ["linear", "factor"]),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, ["original_max_position_embeddings"]),
        ({**TYPES["longrope"], "long_factor": [1.0]}, ["long_factor", "1 entries", "32"]),
    ],
)
def test_incomplete_parameters_are_named(parameters, words):
    with pytest.raises(PoSEError) as error:
        kinds.inverse_frequencies(parameters, DIM)
    assert all(word in str(error.value) for word in words)
