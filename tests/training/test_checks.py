"""Checks of a trainer, its model and its settings before the first step."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from transformers import Seq2SeqTrainer, Trainer

from pose_plugin import extend_context
from pose_plugin.config import parse_settings
from pose_plugin.training.checks import (
    check_row_length,
    frozen_parts,
    refuse_settings,
    require_positions_pass,
    require_rows_fit,
    require_same_rope,
    require_supervised,
    require_undivided,
    require_unsloth_fits,
    warn_of_other_settings,
    warning_of_frozen_parts,
    warning_of_tied_embeddings,
)
from pose_plugin.utils.errors import PoSEError
from tests.models import make_llama

peft = pytest.importorskip("peft")


def model(target: int, tied: bool = False, **lora):
    plain = make_llama(tie_word_embeddings=tied)
    built = type(plain)(extend_context(plain.config, target, "yarn"))
    if not lora:
        return built
    return peft.get_peft_model(built, peft.LoraConfig(target_modules=["q_proj"], r=2, **lora))


def test_only_trainers_of_texts():
    """Of all trainers of TRL, a class of the user's on top of one, and Unsloth's copies, SFTTrainer's alone."""
    trl = pytest.importorskip("trl")
    kinds = [getattr(trl, name) for name in dir(trl) if name.endswith("Trainer")]
    kinds += [type(f"My{kind.__name__}", (kind,), {"__module__": "mine"}) for kind in kinds]
    kinds.append(type("DerivedTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.derived"}))
    copies = [
        type(name, (Trainer,), {}) for name in ("_UnslothSFTTrainer", "_UnslothDPOTrainer", "_UnslothGRPOTrainer")
    ]
    kinds += [type(copy.__name__[1:], (copy,), {}) for copy in copies]
    works = set()
    for kind in (*kinds, Trainer, Seq2SeqTrainer, type("Mine", (Trainer,), {})):
        try:
            require_supervised(kind, "PoSECollator", "Do this.")
            works.add(kind.__name__)
        except PoSEError as error:
            assert str(error).startswith(f"{kind.__name__} cannot be combined with PoSECollator")
    assert works == {"SFTTrainer", "MySFTTrainer", "UnslothSFTTrainer", "Trainer", "Seq2SeqTrainer", "Mine"}
    assert len(kinds) > 12


NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


@pytest.mark.parametrize(
    ("lora", "frozen"),
    [
        ({}, []),
        ({"lora_dropout": 0.0}, ["embeddings", "norms"]),
        ({"modules_to_save": ["embed_tokens"]}, ["norms"]),
        ({"modules_to_save": NORMS}, ["embeddings"]),
        ({"modules_to_save": ["embed_tokens", *NORMS]}, []),
    ],
    ids=["full", "lora", "embeddings", "norms", "both"],
)
def test_frozen_parts(lora, frozen):
    assert frozen_parts(model(512, **lora)) == frozen


def test_the_warning_names_the_modules_of_this_model():
    text = warning_of_frozen_parts(model(512, lora_dropout=0.0), 512)
    assert text is not None and "64 → 512" in text and "stretch by 8" in text
    names = text.split("modules_to_save=[")[1].split("]")[0].split(", ")
    assert names == ["embed_tokens", *sorted(NORMS)]
    # As the advice says, nothing is left to warn of.
    assert frozen_parts(model(512, modules_to_save=names)) == []


def test_tied_embeddings_are_not_asked_for():
    """One of them would be trained apart from the other, which has a warning of its own."""
    text = warning_of_frozen_parts(model(512, tied=True, lora_dropout=0.0), 512)
    assert text is not None and "leaves norms frozen" in text and "embed_tokens" not in text
    assert warning_of_frozen_parts(model(512, tied=True, modules_to_save=NORMS), 512) is None


def test_weights_that_are_frozen_without_an_adapter():
    """As Axolotl's unfrozen_parameters and Spectrum leave a model that is otherwise trained in full."""
    one = model(512)
    for name, weight in one.named_parameters():
        weight.requires_grad = "self_attn" in name
    text = warning_of_frozen_parts(one, 512)
    assert text is not None and "64 → 512" in text and "unfrozen_parameters" in text
    for name in ("embed_tokens", *NORMS):
        assert name in text


@pytest.mark.parametrize(("target", "lora"), [(256, {"lora_dropout": 0.0}), (512, {})], ids=["small stretch", "full"])
def test_no_warning_where_none_is_due(target, lora):
    assert warning_of_frozen_parts(model(target, **lora), target) is None


@pytest.mark.parametrize(
    ("tied", "lora", "warned"),
    [
        (True, {"modules_to_save": ["embed_tokens"]}, True),
        (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
        (True, {"modules_to_save": NORMS}, False),
        (False, {"modules_to_save": ["embed_tokens"]}, False),
    ],
)
def test_one_of_two_tied_embeddings(tied, lora, warned):
    plain = make_llama(tie_word_embeddings=tied)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"], r=2, **lora))
    text = warning_of_tied_embeddings(adapted)
    assert (text is not None) is warned
    assert not warned or ("embed_tokens" in text and "merge_method: legacy" in text)


@pytest.mark.parametrize("value", [True, "dpo", [1], 2])
def test_a_setting_that_is_on_is_refused(value):
    with pytest.raises(PoSEError) as error:
        refuse_settings({"other": 1, "rl": value}.get, {"gptq": "no.", "rl": "it differs. Remove it"}, "`pose:`")
    assert str(error.value) == f"rl={value!r} cannot be combined with `pose:`: it differs. Remove it"


@pytest.mark.parametrize("value", [None, False, 0, [], ""])
def test_a_setting_that_is_off_is_not(value):
    refuse_settings({"rl": value}.get, {"rl": "it differs", "gptq": "it differs"}, "`pose:`")


@pytest.mark.parametrize("size", [2, 8, "many"])
def test_rows_split_over_devices_are_refused(size):
    with pytest.raises(PoSEError, match=f"sp_size={size} .*Set sp_size: 1"):
        require_undivided({"cp_size": 1, "sp_size": size})


@pytest.mark.parametrize("size", [None, 0, 1])
def test_whole_rows_are_not(size):
    require_undivided({"cp_size": size, "sp_size": size})


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "LoraConfig"])
def test_adapters_that_lose_positions(kind):
    given = {} if kind == "LoraConfig" else {"num_virtual_tokens": 4}
    adapted = peft.get_peft_model(make_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **given))
    with nullcontext() if kind == "LoraConfig" else pytest.raises(PoSEError, match=r"peft_type=P.*drops position_ids"):
        require_positions_pass(adapted)


def test_rows_with_plain_positions_may_be_split():
    plain = {"target_length": 512, "sampler": "none"}
    require_rows_fit({"cp_size": 2}, parse_settings(plain))
    with pytest.raises(PoSEError, match=r"cp_size=2 .*evaluate"):
        require_rows_fit({"cp_size": 2}, parse_settings({**plain, "evaluate": {"every": 1}}))
    with pytest.raises(PoSEError, match=r"cp_size=2 .*`sampler: none`"):
        require_rows_fit({"cp_size": 2}, parse_settings({"target_length": 512}))
    require_rows_fit({"cp_size": 1}, parse_settings({"target_length": 512, "evaluate": {"every": 1}}))


# -- Unsloth -------------------------------------------------------------------------------------------------------

TARGET, WINDOW = 512, 64


def loaded(max_seq_length, extended=True, **rope):
    """What Unsloth's loader leaves: a model that carries the longest row."""
    config = make_llama().config
    if extended:
        config = extend_context(config, TARGET, **rope)
    model = make_llama(**{k: v for k, v in config.to_dict().items() if k in ("max_position_embeddings",)})
    model.config = config
    model.max_seq_length = max_seq_length
    return model


UNSLOTH = {
    "not extended": (
        lambda: loaded(TARGET, extended=False),
        {},
        "max_seq_length=512.*extended_base",
    ),
    "longer than the target": (
        lambda: loaded(2 * TARGET),
        {},
        "max_seq_length=1024 is above target_length=512.*rope=yarn.*Load with max_seq_length=64",
    ),
    "rows would be cut": (
        lambda: loaded(32),
        {},
        "max_seq_length=32 is below train_length=64.*Load with max_seq_length=64",
    ),
    "margin beyond the table": (
        lambda: loaded(WINDOW),
        {"target_margin": 64},
        "target_margin=64 reaches position 575.*max_position_embeddings=512.*Set target_margin: 0",
    ),
}


@pytest.mark.parametrize("name", UNSLOTH)
def test_unsloth_models_that_do_not_fit(name):
    make, changes, words = UNSLOTH[name]
    settings = parse_settings({"target_length": TARGET, "train_length": WINDOW, **changes})
    with pytest.raises(PoSEError, match=words):
        require_unsloth_fits(make(), settings)


@pytest.mark.parametrize("longest", [WINDOW, TARGET])
def test_unsloth_models_that_fit(longest):
    require_unsloth_fits(loaded(longest), parse_settings({"target_length": TARGET, "train_length": WINDOW}))


def rows_of(max_length, caplog, dataset_kwargs=None, **changes):
    """Check a window of 2048 and return what was logged."""
    settings = parse_settings({"target_length": 8192, "train_length": 2048, **changes})
    check_row_length(SimpleNamespace(max_length=max_length, dataset_kwargs=dataset_kwargs), settings)
    return caplog.text


def test_rows_that_trl_cuts_below_the_window_are_refused(caplog):
    with pytest.raises(PoSEError, match=r"max_length=1024 .* train_length=2048"):
        rows_of(1024, caplog)
    assert rows_of(1024, caplog, dataset_kwargs={"skip_prepare_dataset": True}) == ""


def test_text_behind_the_window_that_would_be_dropped_is_logged(caplog):
    for quiet in ({"max_length": 2048}, {"max_length": None}, {"max_length": 8192, "content": "window"}):
        assert rows_of(caplog=caplog, **quiet) == ""
    text = rows_of(8192, caplog)
    assert "max_length=8192" in text and "train_length=2048" in text


# -- the rope that a collator names --------------------------------------------------------------------------------

THETA = {"type": "base", "theta": 2e6}
BY_HAND = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def built(rope=None, parameters=None):
    """A config of extend_context, or one that somebody wrote by hand."""
    config = make_llama(max_position_embeddings=512 if rope is None else 64).config
    if parameters:
        config.rope_parameters = parameters
    return config if rope is None else extend_context(config, 512, rope)


@pytest.mark.parametrize(
    ("config", "rope", "words"),
    [
        (built("yarn"), "linear", "rope=linear, but the model was built with rope=yarn"),
        (built("yarn"), "auto", "rope=auto, but the model was built with rope=yarn"),
        (
            built(THETA),
            {**THETA, "theta": 3e6},
            "rope.theta=3000000.0, but the model was built with rope.theta=2000000",
        ),
        (built("yarn"), {"type": "yarn", "factor": 16}, "rope.factor=16.0, but the model was built with rope.factor=8"),
        (built("yarn"), {"type": "yarn", "beta_fast": 64}, "rope.beta_fast=64.0, but"),
        (built("yarn"), {"type": "yarn", "original_length": 32}, "rope.original_length=32, but"),
        # Nobody extended it: the collator's rope would be ignored.
        (built(), "yarn", "rope=yarn, but the model was built with rope=default"),
        (built(), "auto", "rope=auto, but the model was built with rope=default"),
        (built(), THETA, "rope.theta=2000000.0, but the model was built with rope.theta=10000"),
        (built(parameters=BY_HAND), {"type": "yarn", "factor": 4}, "rope.factor=4.0, but"),
    ],
)
def test_a_rope_that_the_model_does_not_have(config, rope, words):
    with pytest.raises(PoSEError, match=words) as error:
        require_same_rope(config, parse_settings({"target_length": 512, "rope": rope}))
    assert "extend_context(config, target_length=512, rope={'type': " in str(error.value)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        (built("yarn"), {"type": "yarn", "factor": 8, "beta_fast": 32, "original_length": 64}),
        (built("yarn-revised"), {"type": "yarn-revised", "factor": 8, "beta_slow": 1}),
        (built(THETA), THETA),
        (built("auto"), "auto"),
        (built("llama3"), {"type": "llama3", "low_freq_factor": 1}),
        (built("yarn"), "none"),
        (built(), "none"),
        (built(parameters=BY_HAND), "yarn"),
        (built(parameters={"rope_type": "default", "rope_theta": 2e6}), THETA),
    ],
)
def test_a_rope_that_the_model_has(config, rope):
    require_same_rope(config, parse_settings({"target_length": 512, "rope": rope}))
    require_same_rope(config, parse_settings({"target_length": 512}))


@pytest.mark.parametrize(
    ("rope", "told"), [("yarn", ""), ("linear", "rope_parameters.rope_type='yarn' → 'linear'")], ids=["same", "other"]
)
def test_resuming_with_another_rope_is_told(tmp_path, caplog, rope, told):
    """A checkpoint holds weights only, so its frequencies are not loaded."""
    record = {"target_length": 512, "model": {"rope_parameters": dict(built("yarn").rope_parameters)}}
    (tmp_path / "pose.json").write_text(json.dumps(record))
    caplog.set_level(logging.WARNING)
    warn_of_other_settings(str(tmp_path), parse_settings({"target_length": 512}), built(rope))
    assert told in caplog.text and bool(caplog.text) == bool(told)
