"""The tests' own children: a fault of one is told with its reason, at once, and leaves no process behind."""

from __future__ import annotations

import os
import socket
import time

import pytest

from tests import forked as module
from tests.forked import CaseError, Once, forked, good_ranks, made_once, ranks


def forever():
    time.sleep(3600)


def test_what_a_case_returns_and_prints():
    def case(value):
        print("said")
        return value

    found = forked(case, 3)
    assert (found.value, found.output) == (3, "said\n")


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


def test_the_port_of_the_store_is_taken_before_it_is_told():
    """One that was only looked up could be another's by the time that rank 0 listens there."""

    def case():
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        return int(os.environ["RANK"])

    assert [one.value for one in good_ranks(case, world=3)] == [0, 1, 2]


def test_a_rank_may_leave_while_another_still_talks(tmp_path):
    """A store of rank 0 would be gone with it."""

    def case():
        import torch.distributed as dist

        if os.environ["RANK"] == "0":
            (tmp_path / "pid").write_text(str(os.getpid()))
        dist.init_process_group("gloo")
        # Whoever is still connecting when the other leaves would fail in that.
        dist.barrier()
        if os.environ["RANK"] == "0":
            return "left"
        while _is_alive(int((tmp_path / "pid").read_text())):
            time.sleep(0.01)
        store = dist.distributed_c10d._get_default_store()
        store.set("key", "stays")
        return store.get("key").decode()

    assert [one.value for one in good_ranks(case)] == ["left", "stays"]


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_threads_of_the_parent_are_not_waited_for():
    """As where OMP_NUM_THREADS is 2 outside and the parent has computed something before."""

    def work():
        import torch

        return float((torch.ones(500, 500) @ torch.ones(500, 500)).exp().sum(-1)[0])

    def parent():
        import torch

        torch.set_num_threads(2)
        work()
        return forked(work).value

    assert forked(parent).value == float("inf")


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


def test_what_failed_fails_again_with_the_same_reason():
    """A second try would end in another error, such as a folder that is there already, and hide the first."""
    tries = []

    def make():
        tries.append(1)
        raise CaseError("the reason")

    once = Once()
    for _ in range(2):
        with pytest.raises(CaseError, match="the reason"):
            once.get("a", make)
    assert len(tries) == 1
    assert [once.get("b", lambda: tries.append(1)), once.get("b", lambda: tries.append(1))] == [None, None]
    assert len(tries) == 2


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
