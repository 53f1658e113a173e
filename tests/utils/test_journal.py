from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import Journal, digest
from tests.forked import forked


def test_rows_are_read_back_by_key(tmp_path):
    journal = Journal(tmp_path / "new" / "rows.jsonl")
    assert journal.get("a") == [] and not journal.path.parent.exists()
    journal.add("a", score=0.5, answer="line\u2028break\nand \ud800")
    journal.add("b", score=float("inf"))
    journal.add("a", score=1.0)
    again = Journal(journal.path)
    assert again.rows == journal.rows
    assert [row["score"] for row in again.get("a")] == [0.5, 1.0]
    assert len(again.all()) == 3 and again.damaged == 0


@pytest.mark.parametrize("torn", [b'\n{"key": "torn', b"\xff\xfe\x00", b"\n[1, 2]", b'\n{"score": 1}', b"\n3"])
def test_a_torn_line_swallows_neither_the_row_before_nor_the_one_after(tmp_path, torn):
    journal = Journal(tmp_path / "rows.jsonl")
    journal.add("before")
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b"\n" * (not torn.startswith(b"\n")) + torn)
    journal = Journal(journal.path)
    journal.add("after")
    again = Journal(journal.path)
    assert list(again.rows) == ["before", "after"] and again.damaged == 1


def until_full(path: Path) -> int:
    """Files may not grow above 3000 bytes, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    journal = Journal(path)
    for n in range(9):
        try:
            journal.add(str(n), text="x" * 700)
        except OSError:
            return n
    return 9


def test_a_full_disk_loses_only_what_was_being_written(tmp_path):
    assert forked(until_full, tmp_path / "rows.jsonl").value == 4
    found = Journal(tmp_path / "rows.jsonl")
    assert list(found.rows) == ["0", "1", "2", "3"]
    # Once there is room, the torn line swallows nothing.
    found.add("next")
    assert list(Journal(found.path).rows) == ["0", "1", "2", "3", "next"]


def write_rows(path: Path, name: str) -> None:
    journal = Journal(path)
    for i in range(200):
        journal.add(f"{name}{i}", text=name * 3000)


def test_several_writers_do_not_corrupt_each_other(tmp_path):
    path = tmp_path / "rows.jsonl"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_rows, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    journal = Journal(path)
    assert journal.damaged == 0 and set(journal.rows) == {f"{name}{i}" for name in "abc" for i in range(200)}
    assert all(row["text"] == row["key"][0] * 3000 for row in journal.all())


def test_a_locked_file_is_not_shared_and_shows_what_was_written_before(tmp_path):
    pytest.importorskip("fcntl")
    first, second = Journal(tmp_path / "rows.jsonl"), Journal(tmp_path / "rows.jsonl")
    first.open(lock=True)
    first.add("a")
    with pytest.raises(PoSEError, match=r"rows\.jsonl"):
        second.open(lock=True)
    second.close()
    first.close()
    second.open(lock=True)
    assert list(second.rows) == ["a"]


def test_digests_do_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2, "ü"]}) == digest({"b": [2, "ü"], "a": 1})
    assert len({digest(value) for value in ({"a": 1}, {"a": "1"}, {"a": 1.5}, [1], None)}) == 5
