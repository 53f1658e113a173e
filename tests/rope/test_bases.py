"""Published bases are read as their own class reads them, and an extension never makes them reach less far."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, Ministral3Config

from pose_plugin.rope import extend_context, plan_rope, rope_overrides, verify_rope
from pose_plugin.rope.live import live_rope
from pose_plugin.rope.source import read_rope
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log
from tests.models import CONFIGS, SMALL, WINDOW, build, logits
from tests.rope.plans import words

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL |= {"llama_4_scaling_beta": 0.1}
HUNYUAN = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
LLAMA_32 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(model_type, maximum, **values):
    return CONFIG_MAPPING[model_type](**{**SMALL, "max_position_embeddings": maximum, **values})


BASES = {
    "ministral3": lambda: Ministral3Config(**SMALL | {"max_position_embeddings": 262144}, rope_parameters=MINISTRAL),
    "hunyuan_v1_dense": lambda: config(
        "hunyuan_v1_dense", 262144, head_dim=32, rope_theta=1e4, rope_scaling=dict(HUNYUAN)
    ),
    "llama 3.2": lambda: config("llama", 131072, rope_parameters=dict(LLAMA_32)),
    "yarn": lambda: config("qwen3", 40960, head_dim=32, rope_parameters=YARN | {"factor": 4.0}),
    "longrope": lambda: config(
        "phi3",
        131072,
        rope_parameters={"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [64.8] * 16},
        original_max_position_embeddings=4096,
    ),
}


def slowest(model):
    return float(model.model.rotary_emb.inv_freq.double()[-1])


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "yarn-revised", "llama3", "auto"])
@pytest.mark.parametrize("name", BASES)
def test_the_slowest_pair_is_stretched_as_far_as_the_window(name, kind):
    """Twice the base's window makes the slowest pair at least twice as slow as the class itself computes it."""
    base = BASES[name]()
    source = read_rope(base)
    model = build(extend_context(base, 2 * source.window, kind))
    verify_rope(model)
    assert slowest(model) <= source.frequencies[-1] / 2 * 1.0001
    assert torch.isfinite(logits(model, [0, 1, 900])).all()


@pytest.mark.parametrize("name", BASES)
def test_the_source_holds_what_the_class_computes(name):
    base = BASES[name]()
    source = read_rope(base)
    live = live_rope(base)[None]
    if name != "longrope":  # its class is built with the list for short batches
        np.testing.assert_allclose(source.frequencies, live.frequencies, rtol=1e-5)
    assert source.attention == pytest.approx(build(base).model.rotary_emb.attention_scaling)


def test_hunyuans_base_is_fixed():
    source = read_rope(BASES["hunyuan_v1_dense"]())
    assert source.original_theta == pytest.approx(1e4 * 1000 ** (32 / 30), rel=1e-5)
    assert (source.original_length, source.window) == (262144, 262144)
    plan = plan_rope(BASES["hunyuan_v1_dense"](), 524288, "none")
    assert plan.rope_parameters["alpha"] == 1000.0
    assert "alpha" not in plan_rope(BASES["hunyuan_v1_dense"](), 524288).rope_parameters


@pytest.mark.parametrize("kind", ["yarn", "linear", "ntk"])
def test_keys_that_the_class_reads_are_kept(kind):
    parameters = plan_rope(BASES["ministral3"](), 524288, kind).rope_parameters
    assert parameters["llama_4_scaling_beta"] == 0.1
    assert parameters["original_max_position_embeddings"] == 16384
    if kind == "yarn":
        assert (parameters["mscale"], parameters["mscale_all_dim"]) == (1.0, 1.0)
        assert "attention_factor" not in parameters


@pytest.mark.parametrize(("published", "wanted"), [(1.0, 1.0), (1.25, 1.25), (None, 0.1 * np.log(32) + 1)])
def test_the_attention_factor_follows_the_base(published, wanted):
    rope = YARN | ({"attention_factor": published} if published else {})
    base = config("llama", 262144, rope_parameters=rope)
    assert plan_rope(base, 524288).rope_parameters["attention_factor"] == pytest.approx(wanted)


def test_a_dropped_attention_factor_is_reported():
    base = config("llama", 262144, rope_parameters=dict(YARN))
    assert f"attention_factor={0.1 * np.log(16) + 1:g}" in words(plan_rope(base, 524288, "ntk"), "warning")


@pytest.mark.parametrize(("target", "factor"), [(65536, 32), (131072, 32), (196608, 48), (262144, 64)])
def test_llama_32_is_stretched_from_what_it_has(target, factor):
    """32 of 8192 for a window of 131072: 1.5 times that window needs 48, not 196608 / 8192 = 24."""
    plan = plan_rope(BASES["llama 3.2"](), target, "llama3")
    assert plan.factor == pytest.approx(factor, rel=1e-4)
    between = extend_context(BASES["llama 3.2"](), 196608, "llama3")
    assert plan_rope(between, target, "llama3").factor == pytest.approx(factor, rel=1e-4)


def test_a_stretch_of_nothing_is_reported():
    plan = plan_rope(BASES["llama 3.2"](), 65536, "llama3")
    assert "target_length=65536" in words(plan, "warning") and "nothing is stretched" in words(plan, "warning")
    forced = plan_rope(BASES["llama 3.2"](), 262144, {"type": "llama3", "factor": 16})
    assert "2 times faster" in words(forced, "warning")


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"beta_fast": 4.0, "beta_slow": 4.0},
        LLAMA_32 | {"low_freq_factor": 4.0},
    ],
)
def test_equal_bounds_are_taken_as_published(rope):
    base = config("llama", 262144, rope_parameters=dict(rope))
    model = build(extend_context(base, 524288, rope["rope_type"]))
    verify_rope(model)
    assert "both are kept" in words(plan_rope(base, 524288, rope["rope_type"]), "info")


def test_unknown_keys_are_kept_and_reported():
    base = config("llama", WINDOW, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "surprise": 7})
    plan = plan_rope(base, 1024)
    assert plan.rope_parameters["surprise"] == 7
    assert "'surprise': 7" in words(plan, "info")


@pytest.mark.parametrize(("theta", "wanted"), [("500000.0", 5e5), ([5e5, 5e5], 5e5)])
def test_a_base_that_is_no_number(theta, wanted):
    raw = {**SMALL, "model_type": "unheard-of", "rope_theta": theta}
    assert plan_rope(raw, 1024).rope_parameters["rope_theta"] == wanted


def test_a_base_per_layer_is_refused():
    raw = {**SMALL, "model_type": "unheard-of", "rope_theta": [1e4, 1e6]}
    for rope in ("yarn", "none"):
        with pytest.raises(
            PoSEError, match=r"rope_theta=\[10000.0, 1000000.0\] has one value per layer.* another base"
        ):
            plan_rope(raw, 1024, rope)


def test_an_unscaled_maximum_is_found_by_the_longer_one():
    """Vicuna's config keeps 4096 and has max_sequence_length 16384."""
    linear = {"type": "linear", "factor": 4.0}
    raw = {**SMALL, "model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": linear}
    assert plan_rope(raw, 32768, "linear").factor == 32.0
    plan = plan_rope({**raw, "max_sequence_length": 16384}, 32768, "linear")
    assert (plan.original_length, plan.factor) == (4096, 8.0)


def test_command_r_states_its_window_in_another_key():
    """Its maximum of 8192 saves memory; the model was trained up to model_max_length."""
    raw = {**SMALL, "model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072}
    source = read_rope(raw)
    assert (source.original_length, source.window, source.factor(262144)) == (131072, 131072, 2.0)
    written = extend_context(raw, 262144)
    assert written["max_position_embeddings"] == written["model_max_length"] == 262144
    assert read_rope(written).original_length == 131072


@pytest.mark.parametrize("rope", ["yarn", {"rope_type": ["yarn"], "factor": 4.0}])
def test_a_rope_of_another_type_is_an_error(rope):
    raw = {**SMALL, "model_type": "unknown to transformers", "max_position_embeddings": 64}
    with pytest.raises(PoSEError, match="yarn"):
        read_rope({**raw, "rope_scaling": rope})


def test_other_lengths_of_a_config_are_raised():
    """Engines take the smallest, or another one than max_position_embeddings."""
    raw = {**SMALL, "model_type": "llama", "max_position_embeddings": 4096, "max_sequence_length": 4096}
    raw |= {"seq_length": 2048, "model_max_length": 2**40}
    for written in (extend_context(raw, 32768), rope_overrides(raw, 32768)):
        assert written["max_sequence_length"] == written["seq_length"] == 32768
        assert written.get("model_max_length", 2**40) == 2**40


def test_a_plain_rope_with_axes_keeps_them_for_older_readers():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
    base = config(
        "qwen3_5_text", WINDOW, num_hidden_layers=4, head_dim=32, rope_parameters=rope | {"mrope_interleaved": True}
    )
    written = extend_context(base, 1024, "ntk")
    for found in (written.rope_parameters, vars(written)["rope_scaling"]):
        assert found["mrope_section"] == [4, 2, 2] and found["mrope_interleaved"] is True


def test_reading_a_class_draws_no_random_numbers():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    read_rope(config("llama", WINDOW, intermediate_size=65))
    assert torch.equal(torch.get_rng_state(), before)


# --- reach -------------------------------------------------------------------------------------------


def rows(base):
    return [(kind.name, kind.layers, kind.rotates, kind.sees) for kind in read_rope(base).reach]


FOUR = SMALL | {"num_hidden_layers": 4}
REACH = {
    "llama": (lambda: CONFIGS["llama"](), [("full_attention", 2, True, None)]),
    "gemma3": (
        lambda: CONFIGS["gemma3"](),
        [("sliding_attention", 1, True, 16), ("full_attention", 1, True, None)],
    ),
    "smollm3": (
        lambda: CONFIG_MAPPING["smollm3"](**FOUR),
        [("full_attention", 3, True, None), ("full_attention", 1, False, None)],
    ),
    "qwen3_next": (
        lambda: CONFIG_MAPPING["qwen3_next"](**FOUR),
        [("linear_attention", 3, False, None), ("full_attention", 1, True, None)],
    ),
    "exaone4": (
        lambda: CONFIG_MAPPING["exaone4"](**FOUR, sliding_window=None, layer_types=["full_attention"] * 4),
        [("full_attention", 4, True, None)],
    ),
    "lfm2": (
        lambda: CONFIG_MAPPING["lfm2"](**FOUR, layer_types=["conv", "conv", "full_attention", "conv"]),
        [("conv", 3, False, None), ("full_attention", 1, True, None)],
    ),
}


@pytest.mark.parametrize("name", REACH)
def test_reach_table(name):
    make, wanted = REACH[name]
    assert rows(make()) == wanted


NOTHING = {
    "sliding_window=32": lambda: CONFIG_MAPPING["exaone4"](**FOUR, sliding_window=32),
    "attention_chunk_size=32": lambda: CONFIG_MAPPING["llama4_text"](**FOUR, head_dim=32, attention_chunk_size=32),
    "position_embedding_type='nope'": lambda: CONFIG_MAPPING["granitemoehybrid"](
        **FOUR,
        position_embedding_type="nope",
        shared_intermediate_size=32,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
    ),
}


@pytest.mark.parametrize("reason", NOTHING)
def test_a_base_that_frequencies_cannot_change_is_refused_with_the_reason(reason):
    with pytest.raises(PoSEError, match=reason):
        plan_rope(NOTHING[reason](), 1024)


# --- one list through every door ---------------------------------------------------------------------


def test_extend_context_reports_what_the_list_holds(caplog, monkeypatch):
    """rope: {} is yarn, which replaces the scaling of Llama 3.2."""
    base = BASES["llama 3.2"]()
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, logger="pose_plugin"):
        extend_context(base, 262144)
    found = plan_rope(base, 262144).findings
    assert "replaces the model's own scaling (llama3" in found[0].happens and found[0].severity == "warning"
    assert all(str(each) in caplog.text for each in found)
