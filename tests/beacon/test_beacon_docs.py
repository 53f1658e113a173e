"""What docs/beacon.md says is what happens, and what was measured."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.forked import LIMIT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "beacon.md").read_text(encoding="utf-8")
SCRIPTS = {"beacon_cost": "beacon", "beacon_learning": "beacon_learning"}


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(SCRIPTS[name])
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def committed(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def tables(name: str) -> list[str]:
    made, result = [script(name).table], committed(name)
    if name == "beacon_learning":
        made += [script(name).far_table, *([script(name).ablation_table] if result["ablation"] else [])]
    return [make(result) for make in made]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_quotes_the_results(name):
    for table in tables(name):
        assert table in PAGE
    assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_table_of_numbers_is_a_result():
    rest = PAGE
    for name in SCRIPTS:
        for table in tables(name):
            rest = rest.replace(table, "")
    assert not re.search(r"^\|.*\d+\.\d", rest, re.M)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_has_the_committed_form(name, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{SCRIPTS[name]}.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result.keys() == committed(name).keys()
    assert script(name).table(result) in done.stdout
    assert (tmp_path / f"{name}.png").exists()
    if name == "beacon_learning":
        assert all(each["short_inputs_identical"] for each in result["about"]["beacons"])


@pytest.mark.parametrize("model", ["tiny", "SmolLM2-135M"])
def test_committed_cost_memory_is_flat_and_time_linear(model):
    cases = {(c["method"], c["factor"]): c for c in committed("beacon_cost")["cases"] if c["model"] == model}
    beacon, full = ([cases[method, f] for f in (4, 8, 16, 32, 64)] for method in ("beacon", "full"))
    assert max(c["cache_megabytes"] for c in beacon) < 1.5 * min(c["cache_megabytes"] for c in beacon)
    assert full[-1]["cache_megabytes"] > 15 * full[0]["cache_megabytes"]
    assert beacon[-1]["seconds"] < 1.5 * 16 * beacon[0]["seconds"]
    assert full[-1]["seconds"] > 2 * 16 * full[0]["seconds"]


def test_committed_learning_beats_a_sliding_window():
    """From 4 to 32 times the window, for each seed."""
    result = committed("beacon_learning")
    assert [n // result["window"] for n in result["lengths"]] == [4, 8, 16, 32]
    told, readers = result["about"]["beacons"], result["readers"]
    assert len({each["seed"] for each in told}) >= 3
    assert all(each["seed"] >= 10 and each["short_inputs_identical"] for each in told)
    for ours, plain, half in zip(readers["beacons"], readers["sliding"], readers["half"], strict=True):
        for length in map(str, result["lengths"]):
            assert ours["digit"][length] > plain["digit"][length] + 0.5
            assert ours["facts"][length] < min(plain["facts"][length], half["facts"][length]) - 0.5
    for ours, another in zip(readers["beacons"], readers["another"], strict=True):
        for length in map(str, result["lengths"]):
            assert ours["fact digits"][length] < another["fact digits"][length] - 1


def test_what_the_control_shows():
    """Without memory, all weights trained: documents' form is learned, the digits are guessed."""
    readers = committed("beacon_learning")["readers"]
    for control in readers["unfrozen"]:
        for length, share in control["digit"].items():
            assert share < 0.25
            assert control["fact digits"][length] > 1.5
            for measure in ("facts", "text"):
                assert control[measure][length] < max(ours[measure][length] for ours in readers["beacons"])


def test_what_the_ablation_shows():
    """Stepwise with ratios per interval: best in the mean, and learned with each of three seeds. Others vary."""
    runs = committed("beacon_learning")["ablation"]["runs"]
    (first, ours), *others = runs.items()
    assert first.startswith("stepwise") and all(len(each) == 3 for each in runs.values())
    for length in ours[0]["digit"]:
        assert min(run["digit"][length] for run in ours) > 0.9
        for _, theirs in others:
            assert sum(run["digit"][length] for run in theirs) < sum(run["digit"][length] for run in ours)


def test_committed_learning_through_axolotl():
    import yaml

    result = committed("beacon_learning")
    runs = result["about"]["axolotl"]
    assert len({told["seed"] for told in runs}) == len(runs) == len(result["readers"]["axolotl"]) == 3
    for told, ours in zip(runs, result["readers"]["axolotl"], strict=True):
        assert told["short_inputs_identical"] and told["axolotl"]
        assert yaml.safe_load((ROOT / told["config"]).read_text())["max_steps"] == told["steps"]
        for length in map(str, result["lengths"]):
            assert ours["digit"][length] > result["readers"]["sliding"][0]["digit"][length] + 0.3


def test_far_tokens_are_worth_little_in_library_texts():
    """What the page says of why plain texts are not where memory shows."""
    found = committed("beacon_learning")["far"]["long texts"]
    assert abs(found["128"] - found["2048"]) < 0.1


def test_the_reading_snippet(tmp_path, monkeypatch):
    import torch

    from pose_plugin import BeaconCache
    from tests.beacon.tiny import make_base, make_beacon, make_ids

    monkeypatch.chdir(tmp_path)
    make_base().save_pretrained("base")
    make_beacon().save_pretrained("outputs/beacon")
    names: dict[str, Any] = {
        "base": "base",
        "document_ids": make_ids(60),
        "question_ids": make_ids(5),
        "long_prompt_ids": make_ids(90),
    }
    (snippet,) = (text for text in blocks("python") if "condense" in text)
    with torch.no_grad():
        exec(snippet, names)
    assert isinstance(names["context"], BeaconCache) and names["context"].tokens == 60
    assert names["answer"].shape[1] > 90


def test_the_training_snippet_names_what_there_is():
    (snippet,) = (text for text in blocks("python") if "SFTTrainer" in text)
    pytest.importorskip("trl")
    names: dict[str, Any] = {}
    exec(snippet.partition("trainer =")[0], names)
    assert names["beacon"].interval == 1024


def test_the_yaml_is_a_valid_block():
    import yaml

    from pose_plugin.frameworks.axolotl_beacon import beacon_config, prepare

    values = yaml.safe_load(blocks("yaml")[0])
    prepare(values)
    assert beacon_config(values["beacon"]).ratios == [2, 4, 8, 16, 32]


def test_the_capacity_that_the_page_names():
    from pose_plugin.beacon.ratios import Window

    assert "394,240" in PAGE and Window(4096, 1024).capacity(128) == 394240
