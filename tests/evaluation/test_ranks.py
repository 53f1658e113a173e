"""Several processes share an evaluation; their report is that of one process, and a rank that dies is resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pose_plugin.cli.main import main
from pose_plugin.evaluation.fingerprints import FINISHED
from pose_plugin.evaluation.questions import Answers
from pose_plugin.evaluation.ranks import Ranks
from tests.forked import LIMIT, CaseError, forked, good_ranks, ranks

BASE = Path(__file__).parents[2] / "example_configs" / "quickstart" / "base"
TEXT = "".join(f"Line {i} tells of the sea and the wind.\n" for i in range(120))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    return ["evaluate", str(BASE), "--extend", "target_length=512,rope=linear", 
            "--tasks", "passkey,haystack,perplexity,gap", "--texts", str(text),
            "--lengths", "200,400", "--trials", "5", "--facts", "2", "--max-windows", "2", "--no-figures",
            "--quiet"]  # fmt: skip


def evaluate(words, output):
    """Return the exit code of the command."""
    return main([*words, "--output", str(output)])


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    assert forked(evaluate, words, output).value == 0
    return output


def journal(output):
    return [json.loads(line) for line in (output / FINISHED).read_text().splitlines() if line]


def same_report(one, other):
    names = {path.name for path in one.iterdir()} - {FINISHED}
    assert names == {path.name for path in other.iterdir()} - {FINISHED}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_two_processes_write_the_report_of_one(words, alone, tmp_path):
    """By the line that a user types; no variable of another launch reaches it."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "pose_plugin", *words, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    same_report(alone, tmp_path)
    rows, single = journal(tmp_path), journal(alone)
    # Each prompt and each length was measured once, by one of them.
    assert sorted(row["key"] for row in rows) == sorted(row["key"] for row in single)
    # Only the first process prints.
    assert done.stdout.count("[1/2] base") == 2 and done.stdout.count("Written to") == 1
    # Its models are not loaded again to judge what both have asked.
    assert done.stdout.count("nothing is missing") == 2


def dying(words, output):
    """Rank 1 dies after two answers, as a process does that the system kills for its memory."""
    keep, kept = Answers.keep, []

    def counted(self, *given, **more):
        keep(self, *given, **more)
        kept.append(1)
        if os.environ["RANK"] == "1" and len(kept) == 2:
            os._exit(1)

    Answers.keep = counted
    return evaluate(words, output)


def test_a_rank_that_dies_is_resumed_by_the_same_command(words, alone, tmp_path):
    # The other rank waits for it until torchrun, or `grace`, ends it.
    first, second = ranks(dying, words, tmp_path, grace=5.0)
    assert isinstance(first, CaseError) and isinstance(second, CaseError)
    assert not (tmp_path / "results.json").exists()
    before = journal(tmp_path)
    assert len(before) >= 2
    assert [rank.value for rank in good_ranks(evaluate, words, tmp_path)] == [0, 0]
    same_report(alone, tmp_path)
    rows = journal(tmp_path)
    assert rows[: len(before)] == before and len({row["key"] for row in rows}) == len(rows)


def test_work_is_divided_the_same_way_by_all():
    for world in (1, 2, 3):
        workers = [Ranks(rank, world) for rank in range(world)]
        owners = [each.owners([5, 1, 3, 3, 8]) for each in workers]
        assert all(found == owners[0] for found in owners) and set(owners[0]) == set(range(world))
        for number in range(3):
            parts = [each.mine(range(7), number) for each in workers]
            assert sorted(i for part in parts for i in part) == list(range(7))
    # The most expensive piece goes to one process, the others to the other one.
    assert Ranks(0, 2).owners([1, 10, 1, 1]) == [1, 0, 1, 1]
    # A piece with one question is not always the first process's.
    assert [Ranks(0, 2).mine(["only"], number) for number in (0, 1)] == [["only"], []]
