"""What a plan decides, notes and refuses; one test per trap."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
)

from pose_plugin.rope import extend_context, kinds, plan_rope, theory
from pose_plugin.utils.errors import PoSEError
from tests.models import CONFIGS, SMALL, WINDOW
from tests.rope.plans import settings, words

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS = ["linear", "ntk", "base", "yarn", "yarn-revised", "llama3", "auto"]


def llama(**values):
    return LlamaConfig(**{**SMALL, "max_position_embeddings": 2048, **values})


# --- what each kind writes -------------------------------------------------------------------------

WRITTEN = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 16.0},
    "ntk": {"rope_type": "default", "rope_theta": 1e4 * 16 ** (32 / 30)},
    "base": {"rope_type": "default", "rope_theta": 2e8},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": kinds.yarn_attention_factor(16),
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written(kind):
    plan = plan_rope(llama(), 32768, settings(kind))
    assert plan.rope_parameters == WRITTEN[kind]
    assert (plan.original_length, plan.factor, plan.max_position_embeddings) == (2048, 16.0, 32768)
    assert type(plan.max_position_embeddings) is int


def test_yarn_revised_is_one_list_for_short_and_long():
    plan = plan_rope(llama(), 32768, "yarn-revised")
    wanted = kinds.revised_yarn_factors(1e4, 32, 16, 2048).tolist()
    assert plan.rope_parameters["long_factor"] == plan.rope_parameters["short_factor"] == wanted
    assert plan.rope_parameters["rope_type"] == "longrope"
    assert plan.rope_parameters["attention_factor"] == kinds.yarn_attention_factor(16)


def test_longrope_reads_its_file(tmp_path):
    path = tmp_path / "factors.json"
    long, short = [1.0 + i for i in range(16)], [1.0] * 16
    path.write_text(json.dumps({"long_factor": long, "short_factor": short}))
    plan = plan_rope(llama(), 32768, {"type": "longrope", "factors_file": str(path)})
    assert plan.rope_parameters["long_factor"] == long
    assert plan.rope_parameters["short_factor"] == short
    assert plan.rope_parameters["attention_factor"] == kinds.longrope_attention_factor(16, 2048)
    assert "whole batch" in words(plan, "warning") and "2048" in words(plan, "warning")
    path.write_text(json.dumps({"long_factor": long, "short_factor": long}))
    same = plan_rope(llama(), 32768, {"type": "longrope", "factors_file": str(path)})
    assert same.findings == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"long_factor": [1.0]}', ["long_factor", "16"]),
        (json.dumps({"long_factor": [1.0] * 15 + [0], "short_factor": [1.0] * 16}), ["long_factor"]),
        (None, []),
    ],
)
def test_a_bad_factors_file_is_named(tmp_path, content, words):
    path = tmp_path / "factors.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PoSEError) as error:
        plan_rope(llama(), 32768, {"type": "longrope", "factors_file": str(path)})
    assert all(word in str(error.value) for word in [*words, "factors.json"])


def test_none_keeps_the_frequencies_and_warns():
    plan = plan_rope(llama(), 32768, "none")
    assert plan.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert plan.max_position_embeddings == 32768
    assert "2048 to 32767" in words(plan, "warning")
    short = plan_rope(llama(), 1024, "none")
    assert (short.max_position_embeddings, short.findings) == (2048, ())


def test_none_pins_a_factor_that_readers_derive_from_the_maximum():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 512}
    config = {**llama().to_dict(), "model_type": "unheard-of", "rope_parameters": yarn}
    assert plan_rope(config, 32768, "none").rope_parameters["factor"] == 4.0


def test_auto_shows_four_candidates_and_takes_the_larger_of_a_and_c():
    plan = plan_rope(llama(), 32768, "auto")
    retrieval, floor = theory.retrieval_base(32768, 32), kinds.ntk_base(1e4, 16, 32)
    assert retrieval > floor
    assert plan.rope_parameters == {"rope_type": "default", "rope_theta": retrieval}
    assert plan.type == "base"
    assert [note[:3] for note in plan.notes[:4]] == ["(a)", "(b)", "(c)", "(d)"]
    assert "auto takes (a)" in plan.notes[4]
    large = plan_rope(llama(rope_theta=1e10), 32768, "auto")
    assert large.rope_parameters["rope_theta"] == kinds.ntk_base(1e10, 16, 32)
    assert "auto takes (c)" in " ".join(large.notes)


def test_a_base_that_is_too_small_raises_a_warning():
    small = plan_rope(llama(), 32768, {"type": "base", "theta": 5e3})
    assert "rope.theta=5000" in words(small, "warning") and "1.92 times faster" in words(small, "warning")
    assert "retrieval bound" in words(plan_rope(llama(), 32768, {"type": "base", "theta": 2e4}), "warning")
    assert plan_rope(llama(), 32768, {"type": "base", "theta": 2e8}).findings == ()


# --- traps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_config_given_is_not_modified(kind, as_dict):
    config = llama().to_dict() if as_dict else llama()
    before = copy.deepcopy(config if as_dict else config.__dict__)
    extend_context(config, 32768, settings(kind))
    assert (config if as_dict else config.__dict__) == before


@pytest.mark.parametrize("kind", ["linear", "yarn", "yarn-revised", "llama3"])
@pytest.mark.parametrize("config", ["object", "dict", "dict of transformers 4"])
def test_theta_is_carried_over(kind, config):
    given = {
        "object": llama(rope_theta=3e5),
        "dict": llama(rope_theta=3e5).to_dict(),
        "dict of transformers 4": {**SMALL, "model_type": "llama", "rope_theta": 3e5},
    }[config]
    assert plan_rope(given, 32768, kind).rope_parameters["rope_theta"] == 3e5


def test_a_rope_dict_without_any_theta_is_refused():
    config = {**SMALL, "model_type": "unheard-of", "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(PoSEError, match="rope_theta"):
        plan_rope(config, 32768)


def test_the_old_spelling_type_is_accepted():
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = {**SMALL, "max_position_embeddings": 2048, "model_type": "llama", "rope_scaling": old}
    plan = plan_rope(config, 4096)
    assert (plan.original_length, plan.factor) == (512, 8.0)
    assert plan.rope_parameters["rope_type"] == "yarn"
    assert "type" not in plan.rope_parameters
    raw = plan_rope({**config, "model_type": "unheard-of", "rope_theta": 1e4}, 4096)
    assert raw.rope_parameters == plan.rope_parameters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox", "deepseek_v3"])
def test_extending_twice_equals_extending_once(name, kind):
    once = extend_context(CONFIGS[name](), 1024, settings(kind))
    reread = extend_context(CONFIGS[name](), 256, settings(kind))
    twice = extend_context(type(reread).from_dict(reread.to_dict()), 1024, settings(kind))
    assert twice.to_dict() == once.to_dict()


@pytest.mark.parametrize("first", KINDS)
def test_extending_with_another_kind_starts_from_the_true_original(first):
    twice = extend_context(extend_context(llama(), 8192, settings(first)), 32768, "yarn")
    assert twice.rope_parameters == WRITTEN["yarn"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_nothing_of_the_first_kind_is_left(first, second, tmp_path):
    """In the config and in its file, 64 → 256 → 1024 is 64 → 1024."""
    once = extend_context(CONFIGS["llama"](), 1024, settings(second))
    between = extend_context(CONFIGS["llama"](), 256, settings(first))
    between.save_pretrained(tmp_path)
    for config in (between, type(between).from_pretrained(tmp_path)):
        twice = extend_context(config, 1024, settings(second))
        assert twice.to_dict() == once.to_dict()


@pytest.mark.parametrize("kind", ["yarn", "llama3", "yarn-revised"])
def test_the_original_length_is_found_without_our_record(kind):
    config = extend_context(llama(), 8192, kind)
    del config.pose_plugin
    assert plan_rope(config, 32768, "yarn").rope_parameters == WRITTEN["yarn"]


def test_linear_without_a_record_divides_the_maximum_with_a_note():
    config = llama(
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    )
    plan = plan_rope(config, 65536, "yarn")
    assert (plan.original_length, plan.factor) == (4096, 16.0)
    assert "rope.original_length: 16384" in words(plan, "warning")
    asked = plan_rope(config, 65536, {"type": "yarn", "original_length": 16384})
    assert (asked.original_length, asked.factor) == (16384, 4.0)


def test_a_replaced_scaling_is_noted():
    config = llama(max_position_embeddings=131072, rope_parameters=dict(LLAMA3))
    plan = plan_rope(config, 262144, "yarn")
    assert (plan.original_length, plan.factor) == (8192, 32.0)
    text = words(plan, "warning")
    assert "replaces" in text and "llama3" in text and "factor 8" in text and "8192" in text
    assert plan.before == "llama3, theta 500000, factor 8, from 8192; window 131072"
    assert plan.after == "yarn, theta 500000, factor 32, from 8192; window 262144"


SCALED_BASES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "llama3": {**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 2048},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "long_factor": [4.0] * 8,
        "short_factor": [1.0] * 8,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", SCALED_BASES)
def test_scaled_bases_of_others(base, kind):
    """The scaling of a checkpoint without a record is replaced, noted, and computed from its original length."""
    config = llama(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=8192,
        rope_parameters={**SCALED_BASES[base], "rope_theta": 5e5},
    )
    plan = plan_rope(config, 32768, settings(kind))
    assert (plan.original_length, plan.factor, plan.original_theta) == (2048, 16.0, 5e5)
    plain = llama(hidden_size=32, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    wanted = plan_rope(plain, 32768, settings(kind)).rope_parameters
    if base == "longrope" and "attention_factor" in wanted:
        # The base was trained with the scale of its own formula, which goes on.
        wanted["attention_factor"] = kinds.longrope_attention_factor(16, 2048)
    assert plan.rope_parameters == wanted
    assert f"replaces the model's own scaling ({base}, theta 500000, factor 4" in words(plan)


def test_a_target_inside_the_present_window_is_noted():
    config = llama(max_position_embeddings=131072, rope_parameters=dict(LLAMA3))
    plan = plan_rope(config, 65536, "yarn")
    assert plan.max_position_embeddings == 65536
    assert "target_length=65536" in words(plan, "warning") and "stay as they are" not in words(plan)


def test_the_base_s_yarn_shape_is_kept_unless_settings_change_it():
    config = GptOssConfig()
    plan = plan_rope(config, 262144, "yarn")
    assert plan.rope_parameters["truncate"] is False
    assert (plan.original_length, plan.factor, plan.rope_parameters["rope_theta"]) == (4096, 64.0, 150000.0)
    config.rope_parameters["beta_fast"] = 24.0
    assert plan_rope(config, 262144, "yarn").rope_parameters["beta_fast"] == 24.0
    asked = plan_rope(config, 262144, {"type": "yarn", "beta_fast": 32.0})
    assert asked.rope_parameters["beta_fast"] == 32.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_only_full_attention_layers_change(name, kind):
    config = CONFIGS[name]()
    plan = plan_rope(config, 1024, settings(kind))
    before = config.rope_parameters
    assert plan.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert plan.rope_parameters["full_attention"] != before["full_attention"]
    assert any("only the full_attention layers change" in note for note in plan.notes)


def test_multimodal_configs_are_read_at_their_text_part():
    config = Gemma3Config(text_config={**SMALL, "layer_types": ["sliding_attention", "full_attention"]})
    plan = plan_rope(config, 1024)
    assert (plan.original_length, plan.layer_type) == (WINDOW, "full_attention")
    assert plan_rope(config.to_dict(), 1024).rope_parameters == plan.rope_parameters


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (Gemma2Config(**SMALL, sliding_window=32), ["sliding_window=32", "1 of 2 layers", "share"]),
        (CONFIGS["gemma3"](), ["sliding_window=16", "1 of 2 layers"]),
        (MistralConfig(**SMALL, sliding_window=256), ["sliding_window=256", "every layer"]),
    ],
)
def test_a_sliding_window_below_the_target_is_warned_about(config, parts):
    text = words(plan_rope(config, 1024), "warning")
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SMALL, sliding_window=None),
        MistralConfig(**SMALL, sliding_window=1024),
        Qwen2Config(**SMALL, sliding_window=32, use_sliding_window=False),
    ],
)
def test_no_warning_where_no_window_is_in_the_way(config):
    assert plan_rope(config, 1024).findings == ()


def test_a_factor_that_does_not_match_the_target_is_warned_about():
    plan = plan_rope(llama(), 32768, {"type": "yarn", "factor": 8})
    assert plan.rope_parameters["factor"] == 8.0
    assert "rope.factor=8" in words(plan, "warning") and "16384" in words(plan, "warning")


def test_deepseek_keeps_its_temperature_in_the_softmax():
    plan = plan_rope(DeepseekV3Config(), 262144)
    assert (plan.rope_parameters["mscale"], plan.rope_parameters["mscale_all_dim"]) == (1.0, 1.0)
    assert "attention_factor" not in plan.rope_parameters
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}
    config = DeepseekV3Config(rope_parameters={**own, "original_max_position_embeddings": 4096})
    assert plan_rope(config, 262144).rope_parameters["mscale_all_dim"] == 0.7
    assert "mscale_all_dim=0.7" in words(plan_rope(config, 262144, "ntk"), "warning")
    assert plan_rope(config, 262144, "linear").rope_parameters["mscale_all_dim"] == 0.7
    asked = plan_rope(config, 262144, {"type": "yarn", "attention_factor": 1.1}).rope_parameters
    assert asked["attention_factor"] == 1.1 and "mscale_all_dim" not in asked


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_phi3_gets_the_same_frequencies_as_a_longrope_list(kind):
    plan = plan_rope(CONFIGS["phi3"](), 1024, kind)
    assert plan.rope_parameters["rope_type"] == "longrope"
    assert any("longrope" in note and kind in note for note in plan.notes)
    twin = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": WINDOW, "rope_theta": 1e4}
    wanted = plan_rope({**twin, "model_type": "unheard-of", "partial_rotary_factor": 0.5}, 1024, kind)
    got, attention = kinds.inverse_frequencies(plan.rope_parameters, 16)
    want, want_attention = kinds.inverse_frequencies(wanted.rope_parameters, 16)
    assert got == pytest.approx(want, rel=1e-12)
    assert attention == want_attention


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [2048, 1024])
def test_nothing_to_stretch(kind, target):
    with pytest.raises(PoSEError) as error:
        plan_rope(llama(), target, settings(kind))
    assert f"target_length={target}" in str(error.value)
    assert "2048" in str(error.value) and "rope: none" in str(error.value)


def test_dynamic_is_for_inference():
    with pytest.raises(PoSEError, match="inference only"):
        plan_rope(llama(), 32768, "dynamic")
    config = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(PoSEError, match="rope: ntk"):
        plan_rope(config, 32768, "none")
    assert plan_rope(config, 32768, "yarn").rope_parameters == WRITTEN["yarn"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(), ["gpt2"]),
        (FalconConfig(alibi=True), ["falcon", "alibi"]),
        (Qwen2VLConfig(), ["qwen2_vl", "three positions"]),
        (MistralConfig(**SMALL, sliding_window=32), ["sliding_window=32", "no layer", "rope: none"]),
        (
            Cohere2Config(**SMALL, layer_types=["sliding_attention", "full_attention"], sliding_window=32),
            ["sliding_window=32", "cohere2", "1 × full_attention: no positions"],
        ),
        (GPTJConfig(), ["gptj", "rope: none"]),
        (
            {"model_type": "unheard-of", "rope_scaling": {"rope_type": "mrope", "rope_theta": 1e6}},
            ["unheard-of", "three positions"],
        ),
        (
            {
                "model_type": "x",
                "rope_parameters": {"main": {"rope_theta": 1.0e4}},
                "max_position_embeddings": 8,
            },
            ["'x'", "main", "full_attention"],
        ),
        (
            {"model_type": "x", "rope_theta": 1e4, "max_position_embeddings": 16384.5},
            ["max_position_embeddings=16384.5"],
        ),
        ({"model_type": "x", "rope_theta": 1e4, "max_position_embeddings": 64}, ["head_dim"]),
    ],
)
def test_models_that_cannot_be_stretched(config, words):
    with pytest.raises(PoSEError) as error:
        plan_rope(config, 1_000_000)
    assert all(word in str(error.value) for word in words)


def test_falcon_without_alibi_is_a_rope_model():
    assert plan_rope(FalconConfig(alibi=False), 32768).rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"type": "yarn", "beta_fast": 1, "beta_slow": 2}, ["beta_fast=1", "beta_slow=2"]),
        ({"type": "llama3", "low_freq_factor": 4}, ["high_freq_factor=4", "low_freq_factor=4"]),
    ],
)
def test_settings_that_contradict_each_other(rope, words):
    with pytest.raises(PoSEError) as error:
        plan_rope(llama(), 32768, rope)
    assert all(word in str(error.value) for word in words)


def test_phi3_default_window_does_not_come_from_its_unused_original_length():
    config = Phi3Config(**SMALL)
    assert config.original_max_position_embeddings == 4096
    assert plan_rope(config, 1024, "ntk").original_length == WINDOW
