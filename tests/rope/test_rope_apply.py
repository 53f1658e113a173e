"""Writing: configs, saved files, older readers, and Axolotl's overrides."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from transformers import AutoConfig, Gemma3Config, GPTJConfig, LlamaConfig, MixtralConfig, ModernBertConfig

from pose_plugin.rope import (
    apply_plan,
    extend_context,
    inverse_frequencies,
    legacy_copies,
    merge_overrides,
    plan_rope,
    rope_overrides,
    verify_rope,
)
from pose_plugin.utils.errors import PoSEError
from tests.models import CONFIGS, ROTARY_DIM, SMALL, build

KINDS = ["linear", "ntk", "yarn", "yarn-revised", "llama3"]


def saved(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_reloaded_config_says_the_same(name, kind, tmp_path):
    plan = plan_rope(CONFIGS[name](), 1024, kind)
    saved(apply_plan(CONFIGS[name](), plan), tmp_path)
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert reloaded.rope_parameters == plan.rope_parameters
    assert reloaded.max_position_embeddings == 1024
    assert reloaded.pose_plugin == plan.record
    # A second save, as a trainer makes it without knowing of us.
    reloaded.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert again.rope_parameters == plan.rope_parameters
    assert plan_rope(again, 4096, "yarn").original_length == plan.original_length


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "phi3", "gemma3", "olmo3", "deepseek_v3"])
def test_a_reader_of_the_old_keys_gets_the_same_frequencies(name, kind, tmp_path):
    """transformers 4 and llama.cpp read rope_theta and rope_scaling, and nothing else about the rope."""
    plan = plan_rope(CONFIGS[name](), 1024, kind)
    file = saved(apply_plan(CONFIGS[name](), plan), tmp_path)
    if name == "olmo3" and kind == "ntk":
        # One theta for all layers is all the old form knows; the plan has two.
        assert "rope_theta" not in file and "rope_scaling" not in file
        return
    assert file["rope_theta"] == plan.current["rope_theta"]
    old = {"rope_type": "default"} if file["rope_scaling"] is None else file["rope_scaling"]
    got = inverse_frequencies({**old, "rope_theta": file["rope_theta"]}, ROTARY_DIM[name])
    want = inverse_frequencies(plan.current, ROTARY_DIM[name])
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1] == want[1]
    if name == "gpt_neox":
        assert (file["rotary_emb_base"], file["rotary_pct"]) == (plan.current["rope_theta"], 0.5)
    if name == "gemma3":
        assert file["rope_local_base_freq"] == plan.rope_parameters["sliding_attention"]["rope_theta"]
    if plan.current["rope_type"] == "longrope":
        assert file["original_max_position_embeddings"] == 64


def test_no_old_keys_where_they_would_reach_the_sliding_layers():
    parameters = ModernBertConfig().rope_parameters
    parameters["full_attention"] = {"rope_type": "linear", "rope_theta": 1.6e5, "factor": 4.0}
    assert legacy_copies(parameters, "modernbert") == {}


def test_extending_again_leaves_no_stale_copy(tmp_path):
    twice = extend_context(extend_context(LlamaConfig(**SMALL), 256, "yarn"), 1024, "ntk")
    file = saved(twice, tmp_path)
    assert file["rope_scaling"] is None
    assert file["rope_theta"] == file["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_dict_is_written_like_a_config_object(kind, tmp_path):
    config = LlamaConfig(**SMALL)
    plain = saved(config, tmp_path / "plain")
    before = copy.deepcopy(plain)
    written = extend_context(plain, 1024, kind)
    assert plain == before
    assert written == saved(extend_context(config, 1024, kind), tmp_path / "extended")


def test_multimodal_config_changes_inside_its_text_part(tmp_path):
    config = Gemma3Config(text_config={**SMALL, "layer_types": ["sliding_attention", "full_attention"]})
    extended = extend_context(config, 1024)
    assert extended.text_config.max_position_embeddings == 1024
    assert config.text_config.max_position_embeddings == 64
    file = saved(extended, tmp_path)
    assert "rope_parameters" not in file
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert reloaded.text_config.rope_parameters == extended.text_config.rope_parameters
    as_dict = extend_context(config.to_dict(), 1024)
    assert as_dict["text_config"]["rope_parameters"] == extended.text_config.rope_parameters


def test_a_null_head_dim_is_filled_because_yarn_multiplies_it():
    config = MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    assert config.head_dim is None
    extended = extend_context(config, 1024, "yarn")
    assert extended.head_dim == 32
    verify_rope(build(extended))
    assert rope_overrides(config, 1024, "yarn")["head_dim"] == 32
    assert extend_context(config, 1024, "ntk").head_dim is None


def test_gptj_can_only_be_raised():
    config = extend_context(GPTJConfig(n_positions=64), 128, "none")
    assert config.n_positions == config.max_position_embeddings == 128
    assert "rope_parameters" not in config.to_dict() and "rope_theta" not in config.to_dict()


def test_keyword_settings():
    config = extend_context(LlamaConfig(**SMALL), 1024, "base", theta=2e8)
    assert config.rope_parameters["rope_theta"] == 2e8
    config = extend_context(LlamaConfig(**SMALL), 1024, {"type": "yarn"}, beta_fast=16)
    assert config.rope_parameters["beta_fast"] == 16.0
    with pytest.raises(PoSEError, match=r"rope\.theta is given both"):
        extend_context(LlamaConfig(**SMALL), 1024, {"type": "base", "theta": 1e6}, theta=2e8)


# --- Axolotl -----------------------------------------------------------------------------------------


def axolotl_load(folder, overrides):
    """What Axolotl does with overrides_of_model_config: setattr, key by key, on the loaded config."""
    config = AutoConfig.from_pretrained(folder)
    for key, value in overrides.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("name", CONFIGS)
def test_overrides_by_setattr_build_the_planned_model(name, kind, tmp_path):
    base = CONFIGS[name]()
    base.save_pretrained(tmp_path)
    overrides = rope_overrides(base, 1024, kind)
    assert next(iter(overrides)) == "rope_parameters"  # before the maximum
    assert "rope_scaling" not in overrides
    config = axolotl_load(tmp_path, json.loads(json.dumps(overrides)))  # as through a YAML file
    plan = plan_rope(base, 1024, kind)
    verify_rope(build(config), plan)
    file = saved(config, tmp_path / "trained")
    assert file.get("rope_theta", plan.current["rope_theta"]) == plan.current["rope_theta"]
    assert AutoConfig.from_pretrained(tmp_path / "trained").rope_parameters == plan.rope_parameters


def test_rope_theta_alone_is_ignored_by_transformers_and_seen_by_us(tmp_path):
    base = LlamaConfig(**SMALL)
    base.save_pretrained(tmp_path)
    model = build(axolotl_load(tmp_path, {"rope_theta": 2e8}))
    with pytest.raises(PoSEError, match=r"inv_freq\[1\]"):
        verify_rope(model, {"rope_type": "default", "rope_theta": 2e8})


def test_overrides_survive_axolotls_own_dict(tmp_path):
    DictDefault = pytest.importorskip("axolotl.utils.dict").DictDefault
    base = LlamaConfig(**SMALL)
    base.save_pretrained(tmp_path)
    overrides = DictDefault({"overrides_of_model_config": rope_overrides(base, 1024)})
    config = axolotl_load(tmp_path, overrides.overrides_of_model_config)
    verify_rope(build(config), plan_rope(base, 1024))
    saved(config, tmp_path / "trained")
    verify_rope(build(AutoConfig.from_pretrained(tmp_path / "trained")), plan_rope(base, 1024))


def test_overrides_cannot_reach_into_a_text_config():
    config = Gemma3Config(text_config={**SMALL, "layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(PoSEError, match="base_model_config"):
        rope_overrides(config, 1024)


OURS = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0},
    "max_position_embeddings": 1024,
    "rope_theta": 1e4,
}
NESTED = {"rope_parameters": {"full_attention": OURS["rope_parameters"]}, "max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("ours", "theirs", "extra"),
    [
        (OURS, None, {}),
        (OURS, {}, {}),
        (OURS, {"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
        (OURS, {"max_position_embeddings": 1024.0}, {}),
        (OURS, {"rope_theta": 10000}, {}),
        (OURS, {"rope_parameters": {"rope_type": "yarn", "factor": 16}}, {}),
        (OURS, {"rope_scaling": {"type": "yarn", "factor": 16}}, {}),
        (NESTED, {"rope_parameters": {"full_attention": {"factor": 16}}}, {}),
    ],
)
def test_overrides_that_agree_are_merged(ours, theirs, extra):
    before = copy.deepcopy((ours, theirs))
    assert merge_overrides(ours, theirs) == {**ours, **extra}
    assert (ours, theirs) == before


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (OURS, {"max_position_embeddings": 2048}, ["max_position_embeddings=2048", "1024"]),
        (OURS, {"rope_theta": 5e5}, ["rope_theta=500000.0", "10000.0"]),
        (OURS, {"rope_parameters": {"factor": 8}}, ["rope_parameters.factor=8", "16.0"]),
        (OURS, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.rope_type='linear'", "'yarn'"]),
        (OURS, {"rope_parameters": {"low_freq_factor": 1}}, ["low_freq_factor=1", "None"]),
        (OURS, {"rope_parameters": None}, ["rope_parameters=None"]),
        (NESTED, {"rope_parameters": {"full_attention": {"factor": 2}}}, ["full_attention.factor=2"]),
        (NESTED, {"rope_parameters": {"rope_type": "yarn"}}, ["rope_type='yarn'"]),
    ],
)
def test_overrides_that_contradict_are_refused(ours, theirs, words):
    with pytest.raises(PoSEError) as error:
        merge_overrides(ours, theirs)
    assert all(word in str(error.value) for word in ["overrides_of_model_config.", "pose.rope", *words])
