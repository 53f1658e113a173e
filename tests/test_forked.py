"""The tests' own children: a fault of one is told with its reason, at once, and leaves no process behind."""

from __future__ import annotations

import os
import time

import pytest

from tests import forked as module
from tests.forked import CaseError, forked, good_ranks, made_once, ranks


def forever():
    time.sleep(3600)


def test_how_a_case_can_fail():
    def wrong():
        print("before")
        raise KeyError("x")

    with pytest.raises(CaseError, match=r"(?s)^KeyError: 'x'.*--- output ---\nbefore\n$"):
        forked(wrong)
    with pytest.raises(CaseError, match=r"^the child died"):
        forked(lambda: os._exit(3))
    with pytest.raises(CaseError, match=r"^no answer within 0 s"):
        forked(forever, timeout=0.1)


def test_a_rank_that_waits_for_one_that_failed_is_not_waited_for():
    def case():
        if os.environ["RANK"] == "1":
            raise KeyError("x")
        forever()

    first, second = ranks(case, grace=0.1)
    assert str(first).startswith("no answer within 0 s after another rank had failed")
    assert str(second).startswith("KeyError: 'x'")
    with pytest.raises(CaseError, match=r"(?s)rank 0: no answer.*rank 1: KeyError"):
        good_ranks(case, grace=0.1)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_leaves_no_child(tmp_path, monkeypatch):
    def case():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        forever()

    def interrupted(*args):
        while len(list(tmp_path.glob("[01]"))) < 2 or not all(file.read_text() for file in tmp_path.iterdir()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks(case)
    assert not any(_is_alive(int(file.read_text())) for file in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_ranks_make_at_once_is_there_once_and_whole(tmp_path, kind):
    def write(path):
        file = path if kind == "file" else path / "inside"
        file.parent.mkdir(exist_ok=True)
        # Both are here before either has written.
        (tmp_path / f"rank{os.environ['RANK']}").touch()
        while len(list(tmp_path.glob("rank*"))) < 2:
            time.sleep(0.01)
        file.write_text(os.environ["RANK"])

    def case():
        path = made_once(tmp_path / "made", write)
        return (path if kind == "file" else path / "inside").read_text()

    first, second = (one.value for one in good_ranks(case))
    assert first == second and first in ("0", "1")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made", "rank0", "rank1"]
