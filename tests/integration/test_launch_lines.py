"""Two machines of two ranks each on loopback, by the launch lines of docs/distributed.md."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.forked import forked
from tests.integration import distributed, launched, trl_runs
from tests.pages import benchmark, committed

pytestmark = pytest.mark.distributed

ROOT = distributed.ROOT
PAGE = ROOT / "docs" / "distributed.md"


def two_machines(folder, name, what):
    """Run a documented line with other things to train; return the output of both launchers."""
    module = benchmark("launchers")
    for before, _ in what:
        assert before in module.LINES[name].launch
    line = module.LINES[name]
    for before, after in what:
        line = line._replace(launch=line.launch.replace(before, after))
    for _ in range(3):
        code, output = module.run(folder, line)
        # Between the choice of a port and the launcher, another process may have taken it.
        if not module.port_was_taken(output):
            break
    assert code == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    """The folder, what each of the four ranks saw, the output, and what one process saw."""
    folder = tmp_path_factory.mktemp("machines")
    trl_runs.make_model(folder)
    output = two_machines(folder, "trl-nodes", [("SCRIPT", f"-m tests.integration.launched {folder}")])
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    alone = forked(launched.four_rows, folder, distributed.Case("trl", "single", "full")).value
    return folder, ranks, output, alone


def test_four_ranks_train_what_one_process_trains(trl):
    _, ranks, output, alone = trl
    for name in launched.RUNS:
        for rank in ranks:
            assert rank[name]["world"] == 4
            assert rank[name]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for step in range(4):
            seen = [document for rank in ranks for document in rank[name]["steps"][step]]
            expected = json.loads(json.dumps(alone["steps"][step]))
            assert sorted(seen) == sorted(expected)
            assert max(places[-1] for _, places in seen) > trl_runs.WINDOW
    assert output.count("[pose_plugin] self-test passed") == len(launched.RUNS)
    assert output.count("[pose_plugin] this run: 4 processes on cpu, DDP") == len(launched.RUNS) + 1


def test_if_one_rank_fails_all_stop_with_its_reason(trl):
    folder, ranks, _, _ = trl
    texts = [rank["faulty"] for rank in ranks]
    assert texts[1].startswith("RopeMismatchError: ")
    for rank in (0, 2, 3):
        assert texts[rank].startswith("PoSEError: rank 1 of 4 failed, so this rank stops too: RopeMismatchError: ")
    assert not (folder / "faulty" / "checkpoint-2").exists()


@pytest.mark.parametrize("place", ["shared", "machine0/own", "machine0/each", "machine1/each"])
def test_saved_folders_are_complete(trl, place):
    for folder in (trl[0] / place, trl[0] / place / "checkpoint-2", trl[0] / place / "checkpoint-4"):
        record = json.loads((folder / "pose.json").read_text())
        assert record["target_length"] == trl_runs.TARGET and record["trained"]["processes"] == 4
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == trl_runs.TARGET
        assert all(distributed.saved_tensors(folder).values())


def test_another_machines_disk_gets_only_random_states(trl):
    others = {path.name for path in (trl[0] / "machine1" / "own").rglob("*") if path.is_file()}
    assert others and all(name.startswith("rng_state") for name in others)


def test_one_process_resumes_what_four_ranks_began(trl):
    folder, _, _, alone = trl
    single = distributed.Case("trl", "single", "full")
    resumed = forked(launched.four_rows, folder, single, str(folder / "shared" / "checkpoint-2"), "one").value
    assert resumed["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert [sorted(step) for step in resumed["steps"]] == [sorted(step) for step in alone["steps"][2:]]


def test_axolotl_on_two_machines_with_separate_disks(tmp_path):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import base_yaml, run

    plugins = ["pose_plugin", "tests.integration.recorder.Recorder"]
    given = {"max_steps": 4, "save_steps": 2, "dataloader_num_workers": 0}
    for machine in range(2):
        disk = tmp_path / f"machine{machine}"
        values = base_yaml(tmp_path, plugins=plugins, micro_batch_size=1, **given)
        values |= {"output_dir": str(disk / "out"), "dataset_prepared_path": str(disk / "prepared")}
        (tmp_path / f"config{machine}.yaml").write_text(yaml.safe_dump(values))
    os.environ["POSE_TEST_RECORD"] = str(tmp_path / "record")
    try:
        output = two_machines(tmp_path, "axolotl-nodes", [("config.yaml", "config{rank}.yaml")])
    finally:
        del os.environ["POSE_TEST_RECORD"]
    assert output.count("[pose_plugin] self-test passed") == 1
    assert output.count("[pose_plugin] this run: 4 processes on cpu, DDP") == 1

    alone = forked(run, base_yaml(tmp_path, micro_batch_size=4, **given, output_dir=str(tmp_path / "alone"))).value
    documents = dict(alone.documents())
    lines = [line for rank in range(4) for line in Path(f"{tmp_path}/record.{rank}").read_text().splitlines()]
    batches = [json.loads(line) for line in lines]
    seen = {tuple(tokens): tuple(positions) for batch in batches for tokens, positions in batch}
    assert seen == documents and len(seen) == 16
    first, second = tmp_path / "machine0" / "out", tmp_path / "machine1" / "out"
    for folder in (first, first / "checkpoint-2", first / "checkpoint-4"):
        assert json.loads((folder / "pose.json").read_text())["trained"]["processes"] == 4
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 512
    assert not list(second.rglob("*.safetensors")) and not list(second.rglob("pose.json"))


# --- docs/distributed.md --------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_the_committed_one():
    module = benchmark("launchers")
    assert module.table(committed("launchers")) in PAGE.read_text(encoding="utf-8")
    assert [line.launch for line in module.LINES.values()] == [
        committed("launchers")["lines"][name]["command"] for name in module.LINES
    ]


def test_measured_lines_train_what_one_process_trains():
    """Or a warning names what ran instead. Only FSDP fails: it needs a GPU."""
    module, found = benchmark("launchers"), committed("launchers")["lines"]
    for name, line in module.LINES.items():
        result, alone = found[name], found[name.partition("-")[0]]
        if name == "axolotl-fsdp2":
            assert result["code"] and "fsdp_config needs a GPU" in result["error"]
            continue
        assert result["code"] == 0
        assert result["run"].startswith(f"{result['ranks']} process") and result["self_tests"] == 1
        assert result["processes_recorded"] == result["ranks"] and result["maximum"] == module.TARGET
        if result["ranks"] < line.processes:
            assert "this run has 1 process on cpu" in result["warning"]
            continue
        assert result["ranks"] == line.processes
        assert result["losses"] == alone["losses"] and result["distance"] < 1e-6
