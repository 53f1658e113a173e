"""What `complete_folder` writes and what it leaves alone; the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pose_plugin.checkpoints import complete_folder, read_record, take_probe
from pose_plugin.checkpoints.probe import PROBE, read_probe
from pose_plugin.checkpoints.record import model_facts, versions
from pose_plugin.checkpoints.saved import base_of
from pose_plugin.config import parse_settings
from pose_plugin.utils.errors import PoSEError
from tests.models import TARGET, edit, extended, save, save_base

SETTINGS = parse_settings({"target_length": TARGET, "rope": "yarn"})


@pytest.fixture
def folder(tmp_path) -> Path:
    save_base(tmp_path / "base")
    model = extended(tmp_path / "base", "yarn")
    model.config.foreign_key = {"kept": [1, 2]}
    save(model, tmp_path / "out")
    return tmp_path / "out"


def test_foreign_keys_stay(folder):
    before = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    complete_folder(folder, extended(folder.parent / "base", "yarn").config, SETTINGS)
    after = json.loads((folder / "config.json").read_text())
    assert after == before | {key: after[key] for key in ("rope_theta", "rope_scaling")}
    assert after["foreign_key"] == {"kept": [1, 2]}
    again = json.loads((folder / "tokenizer_config.json").read_text())
    assert again == tokenizer | {"model_max_length": TARGET}


def test_a_limit_that_is_larger_stays(folder):
    edit(folder / "tokenizer_config.json", lambda values: values.update(model_max_length=4096))
    complete_folder(folder, extended(folder.parent / "base", "yarn").config, SETTINGS)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 4096


def test_a_folder_without_a_model_is_left_alone(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    complete_folder(tmp_path / "empty", extended(folder.parent / "base", "yarn").config, SETTINGS)
    assert not list((tmp_path / "empty").iterdir())


def test_a_probe_of_an_earlier_model_goes(folder):
    model = extended(folder.parent / "base", "yarn")
    complete_folder(folder, model.config, SETTINGS, probe=take_probe(model, TARGET))
    assert read_probe(folder)["positions"][-1] == TARGET - 1 and (folder / PROBE).stat().st_size < 50_000
    complete_folder(folder, model.config, SETTINGS)
    assert read_probe(folder) is None


def test_every_length_reaches_the_target(folder):
    model = extended(folder.parent / "base", "yarn")
    edit(folder / "config.json", lambda values: values.update(seq_length=64, max_seq_len=4096))
    # transformers writes 10**30 if nobody has set a limit.
    edit(folder / "tokenizer_config.json", lambda values: values.update(model_max_length=10**30))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 64, "eos_token_id": 1}))
    complete_folder(folder, model.config, SETTINGS)
    config = json.loads((folder / "config.json").read_text())
    assert (config["seq_length"], config["max_seq_len"]) == (TARGET, 4096)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == TARGET
    assert json.loads((folder / "generation_config.json").read_text()) == {"max_length": TARGET, "eos_token_id": 1}
    # 20 is transformers' own default, with which generate adds 20 tokens to any prompt.
    (folder / "generation_config.json").write_text('{"max_length": 20}')
    complete_folder(folder, model.config, SETTINGS)
    assert json.loads((folder / "generation_config.json").read_text()) == {"max_length": 20}


def test_the_record(folder):
    model = extended(folder.parent / "base", "yarn")
    complete_folder(folder, model.config, SETTINGS, facts=model_facts(model))
    record = read_record(folder)
    assert record["model"] == {
        "type": "llama",
        "original_length": 64,
        "original_theta": 10000.0,
        "max_position_embeddings": TARGET,
        "rope_parameters": model.config.rope_parameters,
    }
    # The name and not the path: the record is published.
    assert record["base"] == {"name": "base", "revision": None}
    assert record["method"] == "full" and record["seed"] == 0 and record["sampler"] == "pose"


def test_the_revision_of_a_base_from_the_hub(folder):
    model = extended(folder.parent / "base", "yarn")
    model.config._name_or_path, model.config._commit_hash = "some/base", "1234abcd"
    assert model_facts(model)["base"] == {"name": "some/base", "revision": "1234abcd"}


def test_versions_are_of_what_is_loaded():
    found = versions()
    assert found.keys() >= {"pose_plugin", "python", "torch", "transformers"}
    assert all(found.values())


# -- the base of an adapter ------------------------------------------------------------------------------------------


def write_adapter(folder: Path, **values) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_a_base_named_relative_to_where_training_ran(tmp_path):
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "models" / "base" / "config.json").write_text("{}")
    adapter = write_adapter(tmp_path / "outputs" / "run", base_model_name_or_path="models/base")
    assert base_of(adapter).name == str(tmp_path / "models" / "base")


def test_a_base_on_the_hub_keeps_its_revision(tmp_path):
    adapter = write_adapter(tmp_path / "run", base_model_name_or_path="some/base", revision="v2")
    assert (base_of(adapter).name, base_of(adapter).revision) == ("some/base", "v2")
    # Another base is taken as it is.
    assert (base_of(adapter, "mine").name, base_of(adapter, "mine").revision) == ("mine", None)


def test_an_adapter_without_a_base_is_refused(tmp_path):
    with pytest.raises(PoSEError, match="base_model_name_or_path"):
        base_of(write_adapter(tmp_path / "run"))
