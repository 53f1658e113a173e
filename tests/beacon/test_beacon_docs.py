"""docs/beacon.md: its snippets run, and its tables are the committed results."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.forked import LIMIT
from tests.pages import ROOT, benchmark, blocks, committed

pytestmark = pytest.mark.usefixtures("forks")
PAGE = ROOT / "docs" / "beacon.md"
SCRIPTS = {"beacon_cost": "beacon", "beacon_learning": "beacon_learning"}


def tables(name: str) -> list[str]:
    made, result = [benchmark(SCRIPTS[name]).table], committed(name)
    if name == "beacon_learning":
        module = benchmark(SCRIPTS[name])
        made += [module.text_table, module.offset_table, module.far_table]
        made += [module.ablation_table] if result["ablation"] else []
    return [make(result) for make in made]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_tables_are_the_committed_results(name):
    for table in tables(name):
        assert table in PAGE.read_text(encoding="utf-8")
    assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_writes_the_committed_keys(name, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{SCRIPTS[name]}.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result.keys() == committed(name).keys()
    assert benchmark(SCRIPTS[name]).table(result) in done.stdout
    assert (tmp_path / f"{name}.png").exists()
    if name == "beacon_learning":
        assert all(each["short_inputs_identical"] for each in result["about"]["mixed"])


@pytest.mark.parametrize("name", ["beacon_overlap", "beacon_smollm2", "beacon_rivals"])
def test_other_tables_are_the_committed_results(name):
    assert benchmark(name).table(committed(name)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["beacon_overlap", "beacon_rivals"])
def test_other_benchmarks_run(name, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert benchmark(name).table(json.loads((tmp_path / f"{name}.json").read_text())) in done.stdout


def test_the_pretrained_run_in_small(tmp_path):
    """Training resumes from its checkpoint, and judging reads what it saved."""
    for part in ("pilot", "train", "train", "judge"):
        command = [sys.executable, str(ROOT / "benchmarks" / "beacon_smollm2.py"), part, "--quick"]
        done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "beacon_smollm2.json").read_text())
    assert benchmark("beacon_smollm2").table(result) in done.stdout
    assert (result["judge"]["rows"], list(result["judge"]["readers"])) == (2, ["own memory", "another text's memory"])


def test_each_row_has_three_seeds():
    learning = committed("beacon_learning")
    runs = [*learning["readers"].values(), *learning["far"].values(), *learning["ablation"]["runs"].values()]
    assert {len(each) for each in [*runs, *committed("beacon_overlap")["readers"].values()]} == {3}


def test_the_cost_that_the_page_names():
    """Faster than full attention from 8 windows on and by 4 at 64, while the cache grows by at most 5 %."""
    cases = {
        (each["method"], each["factor"]): each
        for each in committed("beacon_cost")["cases"]
        if each["model"] == "SmolLM2-135M"
    }
    gains = {n: cases["full", n]["seconds"] / cases["beacon", n]["seconds"] for n in (4, 8, 16, 32, 64)}
    assert all(gains[n] > 1 for n in (8, 16, 32, 64)) and gains[64] >= 4
    assert cases["beacon", 64]["cache_megabytes"] <= 1.05 * cases["beacon", 4]["cache_megabytes"]


@pytest.mark.parametrize("part, gain, low, high", [("judge", 74, 38, 110), ("judge, kept", 87, 55, 123)])
def test_the_memory_of_a_pretrained_model(part, gain, low, high):
    """The criterion that was set before training, and the thousandths of a nat that the page names."""
    found = committed("beacon_smollm2")[part]
    assert found["wanted"] == 0.02 and found["gain"] >= found["wanted"] and found["low"] > 0
    assert [round(1000 * found[key]) for key in ("gain", "low", "high")] == [gain, low, high]
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{gain / 1000:.3f}" in page and f"{low / 1000:.3f} to {high / 1000:.3f}" in page


def test_the_reading_snippet(tmp_path, monkeypatch):
    import torch

    from pose_plugin import BeaconCache
    from tests.models import make_base, make_beacon, make_ids

    monkeypatch.chdir(tmp_path)
    make_base().save_pretrained("base")
    make_beacon().save_pretrained("outputs/beacon")
    names: dict[str, Any] = {
        "base": "base",
        "document_ids": make_ids(60),
        "question_ids": make_ids(5),
        "long_prompt_ids": make_ids(90),
    }
    reading, leaving = (text for text in blocks(PAGE, "python") if "condense" in text)
    with torch.no_grad():
        exec(reading, names)
        assert isinstance(names["context"], BeaconCache) and names["context"].tokens == 60
        assert names["answer"].shape[1] > 90
        exec(leaving, names)
        assert names["answer"].shape[1] > 5
    assert (tmp_path / "document" / "adapter_config.json").exists()


def test_the_training_snippet():
    (snippet,) = (text for text in blocks(PAGE, "python") if "SFTTrainer" in text)
    pytest.importorskip("trl")
    names: dict[str, Any] = {}
    exec(snippet.partition("trainer =")[0], names)
    assert names["beacon"].interval == 1024


def test_the_yaml_is_a_valid_block():
    import yaml

    from pose_plugin.frameworks.axolotl_beacon import beacon_config, prepare

    values = yaml.safe_load(blocks(PAGE, "yaml")[0])
    prepare(values)
    assert beacon_config(values["beacon"]).ratios == [2, 4, 8, 16, 32]
