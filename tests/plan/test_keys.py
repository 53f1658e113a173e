"""Keys of a YAML that Axolotl would silently drop get a warning before the run."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from pose_plugin.cli.main import main
from pose_plugin.plan import keys
from pose_plugin.plan.config_reader import from_yaml
from pose_plugin.plan.keys import known_keys, unknown_keys
from pose_plugin.utils.errors import PoSEError
from tests.plan.test_plan import EXAMPLES, base, values  # noqa: F401 - base is a fixture

needs_axolotl = pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None, reason="Axolotl is not installed: pip install axolotl"
)


@needs_axolotl
def test_a_misspelt_key_is_named_with_the_closest():
    (warning,) = unknown_keys({"base_model": "x", "learning_rat": 1e-5, "plugins": ["pose_plugin"], "pose": {}})
    assert "learning_rat:" in warning and "learning_rate" in warning
    warnings = unknown_keys({"target_lenght": 5, "sampler": "turns"})
    assert [each.partition("Did you mean ")[2] for each in warnings] == [
        "target_length in the `pose:` block?",
        "sampler in the `pose:` block?",
    ]
    assert len(unknown_keys({"sample_pack": True, "seq_len": 5, "zzzzqqqq": 1})) == 3


@needs_axolotl
@pytest.mark.parametrize(
    "values",
    [
        {"x-anchors": {}, "_defaults": {}, ".hidden": 1},
        {"learning_rat": 1, "plugins": ["someone.else.Plugin"]},  # may add any key
        {"liger_rope": True, "plugins": ["pose_plugin", "axolotl.integrations.liger.LigerPlugin"]},
        {"pose": {}, "beacon": {}, "adapter": "beacon", "gptq": False, "flash_attention": True},
        {"noisy_embedding_alpha": 1, "dpo_beta": 0.1},  # old names
    ],
)
def test_no_false_warnings(values):
    assert unknown_keys(values) == []


@needs_axolotl
def test_examples_have_no_unknown_key():
    # Kubernetes' file is no config of Axolotl.
    configs = [path for path in EXAMPLES if path.parent.name != "cluster"]
    assert [unknown_keys(yaml.safe_load(path.read_text())) for path in configs] == [[]] * len(configs)


def test_nothing_is_reported_without_axolotl(monkeypatch):
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: None)
    assert known_keys() == set() and unknown_keys({"learning_rat": 1}) == []


@pytest.mark.axolotl
def test_no_field_of_the_real_schema_is_missed():
    """The sources are searched without importing them; here the real schema is the judge."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities

    known = known_keys()
    fields = AxolotlConfigWCapabilities.model_fields
    assert set(fields) - known == set()
    assert {field.alias for field in fields.values() if field.alias} - known == set()
    root = Path(importlib.import_module("axolotl.integrations").__path__[0])
    found = 0
    for path in root.glob("*/__init__.py"):
        for name in re.findall(r"def get_input_args.{,600}?[\"'](axolotl\.[\w.]+)[\"']", path.read_text(), re.S):
            owner, _, args = name.rpartition(".")
            try:
                model = getattr(importlib.import_module(owner), args)
            except ImportError:
                continue  # it needs a package that is not installed
            found += 1
            assert set(model.model_fields) - known == set(), name
    assert found >= 5


@needs_axolotl
def test_the_command_warns(base, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**values(base), "learning_rat": 1e-5, "plugins": ["pose_plugin"]}))
    assert main(["plan", str(path), "--draws", "50"]) == 0
    assert "learning_rat:" in capsys.readouterr().out


def test_a_plugin_that_is_not_named(base, tmp_path):  # noqa: F811
    path = tmp_path / "run.yaml"
    for plugins, count in ((["pose_plugin"], 0), (["pose_plugin.PosePlugin"], 0), ([], 1), (None, 1)):
        path.write_text(yaml.safe_dump({**values(base), "plugins": plugins}))
        assert sum("plugins: [pose_plugin]" in each for each in from_yaml(path).warnings) == count
    path.write_text(yaml.safe_dump({**values(base), "plugins": "pose_plugin"}))
    with pytest.raises(PoSEError, match="plugins='pose_plugin'"):
        from_yaml(path)


def test_anchors_and_numbers_as_text(base, tmp_path):  # noqa: F811
    """YAML merges anchors, and reads 1e-5 as text."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 32)
    text = "x-data: &data {ds_type: json, type: completion}\ndatasets:\n  - {<<: *data, path: ROWS}\n"
    text = text.replace("ROWS", str(tmp_path / "rows.jsonl"))
    small = {**values(base), "max_steps": None, "sequence_len": "8192", "plugins": ["pose_plugin"]}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small) + "learning_rate: 1e-5\n" + text)
    found = from_yaml(path)
    assert (found.run.window, found.learning_rate, found.steps, found.warnings) == (8192, 1e-5, 4, [])
