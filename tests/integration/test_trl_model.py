"""A model that TRL builds from its name gets the extended config, and its saved folder the right maximum."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

from pose_plugin import PoSECollator
from pose_plugin.config import PoSESettings
from pose_plugin.frameworks.trl_model import extended_by_name
from pose_plugin.utils.errors import PoSEError
from tests.forked import forked
from tests.integration import trl_runs
from tests.models import make_llama, make_tokenizer

TARGET = trl_runs.TARGET
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("named")
    make_llama().save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    return str(folder / "base")


def config_of(base, settings=None, target_from_model=False, **given):
    """The config that TRL builds the model from; None if it is left to TRL."""
    args = SimpleNamespace(model_init_kwargs=given or None, trust_remote_code=False)
    settings = PoSESettings(target_length=TARGET, **(settings or {}))
    with extended_by_name(base, args, settings, target_from_model):
        inside = dict(args.model_init_kwargs or {})
    assert args.model_init_kwargs == (given or None)
    return inside.pop("config", None), inside


def test_rope_parameters_are_completed(base):
    config, rest = config_of(base, rope_parameters=YARN, dtype="float32", use_cache=False)
    assert config.rope_parameters.items() >= {**YARN, "rope_theta": 10000.0}.items()
    assert config.max_position_embeddings == TARGET and config.use_cache is False
    assert rest == {"dtype": "float32", "trust_remote_code": False}


def test_a_name_alone_gets_the_rope_of_the_collator(base):
    config, _ = config_of(base, {"rope": {"type": "linear"}})
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("linear", 8.0)


def test_one_number_decides_the_target(base):
    config, _ = config_of(base, target_from_model=True, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert config.max_position_embeddings == 256


def test_another_base_of_the_frequencies(base):
    config, _ = config_of(base, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert config.rope_parameters["rope_theta"] == 1e6 and config.max_position_embeddings == TARGET


def test_what_is_left_to_trl(base, tmp_path):
    assert config_of(base, target_from_model=True)[0] is None
    config, _ = config_of(base)
    config.save_pretrained(tmp_path)
    assert config_of(str(tmp_path))[0] is None


@pytest.mark.parametrize(
    "given, match",
    [
        ({"rope_parameters": {**YARN, "rope_theta": 5.0}}, r"rope_parameters\.rope_theta=5\.0 contradicts"),
        ({"max_position_embeddings": 256}, "max_position_embeddings=256 contradicts target_length"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
    ],
)
def test_contradictions(base, given, match):
    with pytest.raises(PoSEError, match=match):
        config_of(base, **given)


def test_a_run_by_name(base, tmp_path):
    """Plain positions over whole rows, as in TRL's guide to a million tokens; the saved maximum is the target."""
    forked(by_name, base, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == TARGET
    assert saved["rope_parameters"]["factor"] == 8.0 and saved["rope_parameters"]["rope_theta"] == 10000.0
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == TARGET
    assert json.loads((tmp_path / "pose.json").read_text())["sampler"] == "none"


def by_name(base, out):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        str(out), max_steps=1, per_device_train_batch_size=1, max_length=TARGET, use_cpu=True, bf16=False,
        report_to=[], save_strategy="no", model_init_kwargs={"rope_parameters": YARN},
    )  # fmt: skip
    tokenizer = make_tokenizer()
    collator = PoSECollator(tokenizer, sampler="none")
    data = Dataset.from_list(trl_runs.texts())
    trainer = SFTTrainer(base, args=args, train_dataset=data, processing_class=tokenizer, data_collator=collator)
    assert collator.settings.target_length == TARGET
    trainer.train()
    trainer.save_model()
