"""Keys of a YAML that Axolotl drops without a word are named before the run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pose_plugin.cli.main import main
from pose_plugin.plan import config_reader as keys
from pose_plugin.plan.config_reader import from_yaml, known_keys, unknown_keys
from pose_plugin.utils.errors import PoSEError
from tests.forked import LIMIT
from tests.plan.test_plan import EXAMPLES, ROOT, base, values  # noqa: F401 - base is a fixture

AXOLOTL = importlib.util.find_spec("axolotl") is not None
needs_axolotl = pytest.mark.skipif(not AXOLOTL, reason="Axolotl is not installed: pip install axolotl")


@needs_axolotl
def test_a_key_that_nothing_reads_is_named_with_the_closest():
    (said,) = unknown_keys({"base_model": "x", "learning_rat": 1e-5, "plugins": ["pose_plugin"], "pose": {}})
    assert said == (
        "learning_rat=1e-05: Axolotl knows no such key and will drop it without a word. Is learning_rate meant?"
    )
    (said,) = unknown_keys({"zzzzqqqq": "a" * 90})
    assert said.endswith("without a word") and "aaa…" in said
    assert len(unknown_keys({"sample_pack": True, "seq_len": 5})) == 2


@needs_axolotl
@pytest.mark.parametrize(
    "values",
    [
        {"x-anchors": {}, "_defaults": {}, ".hidden": 1},
        {"learning_rat": 1, "plugins": ["someone.else.Plugin"]},  # may bring any key
        {"liger_rope": True, "plugins": ["pose_plugin", "axolotl.integrations.liger.LigerPlugin"]},
        {"pose": {}, "beacon": {}, "adapter": "beacon", "gptq": False, "flash_attention": True},
        {"noisy_embedding_alpha": 1, "dpo_beta": 0.1},  # old names
    ],
)
def test_no_noise(values):
    assert unknown_keys(values) == []


@needs_axolotl
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_example_has_one(path):
    assert unknown_keys(yaml.safe_load(path.read_text())) == []


def test_without_axolotl_nothing_is_said(monkeypatch):
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: None)
    assert known_keys() == frozenset() and unknown_keys({"learning_rat": 1}) == []


def test_a_schema_of_another_shape_says_nothing(monkeypatch, tmp_path):
    (tmp_path / "utils" / "schemas").mkdir(parents=True)
    (tmp_path / "utils" / "schemas" / "config.py").write_text("class AxolotlInputConfig(: pass")
    spec = importlib.util.spec_from_loader("axolotl", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: spec)
    assert unknown_keys({"learning_rat": 1}) == []


@pytest.mark.axolotl
def test_no_field_of_the_real_schema_is_missed():
    """Read from the files without importing them; here they are imported after all."""
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
                continue  # it needs a package that is not here
            found += 1
            assert set(model.model_fields) - known == set(), name
    assert found >= 5


def test_the_command_warns_and_imports_no_schema(base, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**values(base), "learning_rat": 1e-5, "plugins": ["pose_plugin"]}))
    assert main(["plan", str(path), "--draws", "50"]) == 0
    assert ("Is learning_rate meant?" in capsys.readouterr().out) is AXOLOTL
    code = (
        "import sys; from pose_plugin.plan.config_reader import known_keys; known_keys(); "
        "sys.exit(int('torch' in sys.modules or any(name.startswith('axolotl.') for name in sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=LIMIT).returncode == 0


def test_a_plugin_that_is_not_named(base, tmp_path):  # noqa: F811
    path = tmp_path / "run.yaml"
    for plugins, said in ((["pose_plugin"], 0), (["pose_plugin.PosePlugin"], 0), ([], 1), (None, 1)):
        path.write_text(yaml.safe_dump({**values(base), "plugins": plugins}))
        assert sum("does not name the plugin" in each for each in from_yaml(path).warnings) == said
    path.write_text(yaml.safe_dump({**values(base), "plugins": "pose_plugin"}))
    with pytest.raises(PoSEError, match="plugins='pose_plugin' is no list"):
        from_yaml(path)


def test_anchors_and_numbers_as_text(base, tmp_path):  # noqa: F811
    """YAML merges what an anchor names, and reads 1e-5 as text."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 32)
    text = "x-data: &data {ds_type: json, type: completion}\ndatasets:\n  - {<<: *data, path: ROWS}\n"
    text = text.replace("ROWS", str(tmp_path / "rows.jsonl"))
    small = {**values(base), "max_steps": None, "sequence_len": "8192", "plugins": ["pose_plugin"]}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small) + "learning_rate: 1e-5\n" + text)
    found = from_yaml(path)
    assert (found.run.window, found.learning_rate, found.steps, found.warnings) == (8192, 1e-5, 4, [])
