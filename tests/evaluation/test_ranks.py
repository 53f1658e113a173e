"""Several processes share an evaluation; their report is that of one process, and a rank that dies is resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pose_plugin.evaluation.fingerprints import FINISHED
from pose_plugin.evaluation.ranks import Ranks

BASE = Path(__file__).parents[2] / "example_configs" / "quickstart" / "base"
TEXT = "".join(f"Line {i} tells of the sea and the wind.\n" for i in range(120))
# Rank 1 dies after two answers, as a process does that the system kills for its memory.
DIES = """
import os, sys
from pose_plugin.evaluation.questions import Answers
keep, kept = Answers.keep, []
def dying(self, *given, **more):
    keep(self, *given, **more)
    kept.append(1)
    if os.environ["RANK"] == "1" and len(kept) == 2:
        os._exit(1)
Answers.keep = dying
from pose_plugin.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    return ["evaluate", str(BASE), "--extend", "target_length=512,rope=linear", 
            "--tasks", "passkey,haystack,perplexity,gap", "--texts", str(text),
            "--lengths", "200,400", "--trials", "5", "--facts", "2", "--max-windows", "2", "--no-figures",
            "--quiet"]  # fmt: skip


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    done = launch([sys.executable, "-m", "pose_plugin"], words, output)
    assert done.returncode == 0, done.stderr
    return output


def launch(start, words, output):
    """Run the command of a user; no variable of another launch reaches it."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    return subprocess.run(
        [*start, *words, "--output", str(output)], capture_output=True, text=True, env=environment, timeout=1200
    )


def torchrun(*module):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *module]


def journal(output):
    return [json.loads(line) for line in (output / FINISHED).read_text().splitlines() if line]


def same_report(one, other):
    names = {path.name for path in one.iterdir()} - {FINISHED}
    assert names == {path.name for path in other.iterdir()} - {FINISHED}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_two_processes_write_the_report_of_one(words, alone, tmp_path):
    done = launch(torchrun("-m", "pose_plugin"), words, tmp_path)
    assert done.returncode == 0, done.stderr
    same_report(alone, tmp_path)
    rows, single = journal(tmp_path), journal(alone)
    # Each prompt and each length was measured once, by one of them.
    assert sorted(row["key"] for row in rows) == sorted(row["key"] for row in single)
    # Only the first process prints.
    assert done.stdout.count("[1/2] base") == 2 and done.stdout.count("Written to") == 1
    # Its models are not loaded again to judge what both have asked.
    assert done.stdout.count("nothing is missing") == 2


def test_a_rank_that_dies_is_resumed_by_the_same_command(words, alone, tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    output = tmp_path / "out"
    done = launch(torchrun(str(tmp_path / "dies.py")), words, output)
    assert done.returncode != 0 and not (output / "results.json").exists()
    before = journal(output)
    assert len(before) >= 2
    done = launch(torchrun("-m", "pose_plugin"), words, output)
    assert done.returncode == 0, done.stderr
    same_report(alone, output)
    rows = journal(output)
    assert rows[: len(before)] == before and len({row["key"] for row in rows}) == len(rows)


def test_work_is_divided_the_same_way_by_all():
    for world in (1, 2, 3):
        ranks = [Ranks(rank, world) for rank in range(world)]
        owners = [each.owners([5, 1, 3, 3, 8]) for each in ranks]
        assert all(found == owners[0] for found in owners) and set(owners[0]) == set(range(world))
        for number in range(3):
            parts = [each.mine(range(7), number) for each in ranks]
            assert sorted(i for part in parts for i in part) == list(range(7))
    # The most expensive piece goes to one process, the others to the other one.
    assert Ranks(0, 2).owners([1, 10, 1, 1]) == [1, 0, 1, 1]
    # A piece with one question is not always the first process's.
    assert [Ranks(0, 2).mine(["only"], number) for number in (0, 1)] == [["only"], []]
