"""Interrupted runs resume with the same command, and send no answered request again."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from pose_plugin.cli.main import main
from pose_plugin.synthesize.client import Client
from pose_plugin.synthesize.paid import Answers
from pose_plugin.utils.clean import Cleaner
from tests.forked import LIMIT, forked
from tests.kill import files, survives
from tests.synthesize.material import story
from tests.synthesize.processes import count_lines, start, wait_for
from tests.synthesize.proxy import faulty
from tests.synthesize.runs import arguments, lines, make_place, manifest
from tests.synthesize.server import Server

TASKS = ("--tasks", "single,multi,biography", "--concurrency", "3")


def test_a_killed_run_resumes(place, tmp_path):
    """Both runs are separate processes. The proxy counts what the server worked for."""
    with faulty(hold_after=6) as proxy:
        line = arguments(place, tmp_path / "killed", proxy.url, *TASKS)
        process = start(line)
        # Six answers are on disk. Three more were given but have not arrived.
        journal = tmp_path / "killed" / "journal.jsonl"
        wait_for(lambda: count_lines(journal) == 6 and proxy.held == 3, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert manifest(tmp_path / "killed")["state"] == "running"
        assert not (tmp_path / "killed" / "train.jsonl").exists()
        arrived, lost = set(proxy.answered()), {seen.key for seen in proxy.log if not seen.answered}
        assert (len(arrived), len(lost)) == (6, 3)
        # As if the process had been killed in the middle of a write.
        with journal.open("ab") as file:
            file.write(b'\n{"key": "torn')
        proxy.hold_after = None
        process = start(line)
        output = process.communicate()
        assert process.returncode == 0, output
        paid = Counter(proxy.forwarded)
        assert all(paid[key] == 1 for key in arrived)
        assert {key for key, times in paid.items() if times > 1} == lost
        assert len(proxy.answered()) == len(set(proxy.answered()))
        found = manifest(tmp_path / "killed")
        assert found["requests"]["from_journal"] == 6
        assert sum(paid.values()) == 6 + 3 + found["requests"]["asked"]
        # The result equals that of an uninterrupted run.
        assert main(arguments(place, tmp_path / "whole", proxy.url, *TASKS)) == 0
    assert lines(tmp_path / "killed" / "train.jsonl") == lines(tmp_path / "whole" / "train.jsonl")
    whole = manifest(tmp_path / "whole")
    for name in ("rows", "tokens", "questions", "left_out"):
        assert found[name] == whole[name]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT / 2
    while not true() and time.monotonic() < end:
        time.sleep(0.02)


def test_an_interrupt_waits_for_requests_in_flight(place, tmp_path):
    import pose_plugin.synthesize.run  # noqa: F401 - before the fork

    with faulty(hold_after=4) as proxy:
        line = arguments(place, tmp_path, proxy.url, *TASKS)

        def interrupt() -> None:
            # In a thread of the parent, because a forked child has no threads.
            try:
                until(lambda: proxy.held == 3)
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
                # An answer that arrived earlier would be followed by another request.
                until((tmp_path / "interrupted").exists)
            finally:
                proxy.release()

        def case() -> int:
            def stop(client: Client, reason: str) -> None:
                known(client, reason)
                (tmp_path / "interrupted").touch()

            known, Client.stop = Client.stop, stop  # type: ignore[method-assign] - in this child alone
            (tmp_path / "pid").write_text(str(os.getpid()))
            return main(line)

        helper = threading.Thread(target=interrupt)
        helper.start()
        outcome = forked(case)
        helper.join()
    assert outcome.value == 1
    told = outcome.output.index("interrupt again to end at once")
    assert told < outcome.output.index("stopped: interrupted")
    # The three in flight were answered and stored; none was sent after the interrupt.
    assert count_lines(tmp_path / "journal.jsonl") == 7 == len(proxy.log)
    found = manifest(tmp_path)
    assert found["state"] == "stopped" and found["unfinished"] > 0
    assert found["rows"]["count"] == len(lines(tmp_path / "train.jsonl"))


def test_a_second_interrupt_ends_at_once(place, tmp_path):
    """What arrived before is on disk."""
    with faulty(hold_after=4) as proxy:
        process = start(arguments(place, tmp_path, proxy.url, *TASKS))
        wait_for(lambda: count_lines(tmp_path / "journal.jsonl") == 4 and proxy.held == 3, process)
        process.send_signal(signal.SIGINT)
        while b"interrupt again to end at once" not in (line := process.stderr.readline()):
            assert line, "it ended after the first interrupt"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        assert count_lines(tmp_path / "journal.jsonl") == 4 and len(proxy.log) == 7


def test_two_runs_in_one_folder(place, tmp_path, capsys):
    pytest.importorskip("fcntl")
    answers = Answers(tmp_path / "journal.jsonl", Cleaner(), write=True)
    with Server() as server:
        assert main(arguments(place, tmp_path, server.url)) == 2
        assert "is being written by another run" in capsys.readouterr().err
        assert server.log == []
    answers.close()


def test_a_disk_without_locks(one_book, tmp_path, capsys, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with Server() as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "multi")) == 0
    assert "cannot be locked" in capsys.readouterr().err and len(lines(tmp_path / "train.jsonl")) == 1


def test_a_full_disk_ends_the_run_and_keeps_what_was_stored(one_book, tmp_path, capsys, monkeypatch):
    known, synced = os.fsync, []

    def fsync(number):
        synced.append(number)
        if len(synced) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        known(number)

    with Server() as server:
        line = arguments(one_book, tmp_path, server.url, "--concurrency", "1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            assert main(line) == 1
        assert "a file cannot be written: No space left on device" in capsys.readouterr().err
        assert len(server.log) == 3
        assert main(line) == 0
        # Here the third one was written, though not synced.
        assert len(server.log) == 5


def test_damaged_lines_are_requested_again(one_book, tmp_path, capsys):
    with Server() as server:
        line = arguments(one_book, tmp_path, server.url)
        assert main(line) == 0
        path = tmp_path / "journal.jsonl"
        stored = path.read_text().splitlines(keepends=True)
        # Lines that earlier versions could write: parts as content, and tokens as text.
        poisoned = [json.loads(row) for row in stored[1:3]]
        poisoned[0] |= {"content": [{"type": "text", "text": "?"}]}
        poisoned[1] |= {"input_tokens": "many"}
        rows = [*(json.dumps(row) + "\n" for row in poisoned), "\0\0\0\n", '{"key": 1}\n', *stored[3:]]
        path.write_text("".join(rows))
        assert main(line) == 0
        assert len(server.log) == 7
    assert "journal.jsonl: 4 damaged lines are ignored" in capsys.readouterr().err


CHANGES = {
    ("--seed", "1"): "--seed was 0, now 1",
    ("--temperature", "0.1"): "--temperature was 0.7, now 0.1",
    ("--questions", "4"): "--questions was 10, now 4",
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_are_refused(one_book, tmp_path, capsys, change):
    with Server() as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "multi")) == 0
        line = arguments(one_book, tmp_path, server.url, "--tasks", "multi", *change)
        assert main(line) == 2
        assert CHANGES[change] in capsys.readouterr().err
        assert len(server.log) == 1
        assert main([*line, "--accept-changes"]) == 0
        assert len(server.log) == 2


@pytest.mark.parametrize(
    "change",
    [("--concurrency", "1"), ("--timeout", "9"), ("--budget", "1", "--price-input", "0", "--price-output", "0")],
)
def test_settings_that_change_no_request_may_differ(one_book, tmp_path, change):
    with Server() as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "multi")) == 0
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "multi", *change)) == 0
        assert len(server.log) == 1


def test_other_documents_are_refused(tmp_path, capsys):
    """Tasks take the documents in turn: with one more, others change their task, and are paid for again."""
    place, output = make_place(tmp_path / "place", books=3), tmp_path / "output"
    books = place / "books"
    with Server() as server:
        line = arguments(place, output, server.url, "--tasks", "multi,biography")
        assert main(line) == 0
        asked, before = len(server.log), lines(output / "train.jsonl")
        (books / "book1.txt").rename(tmp_path / "away.txt")
        (books / "new.txt").write_text(story(9, 3000), encoding="utf-8")
        (books / "book0.txt").write_text(story(8, 3000), encoding="utf-8")
        assert main(line) == 2
        error = capsys.readouterr().err
        assert all(f"{word} {books / name}" in error for word, name in CHANGED.items())
        assert len(server.log) == asked and lines(output / "train.jsonl") == before
        assert main([*line, "--accept-changes"]) == main(line) == 0


CHANGED = {"new:": "new.txt", "gone:": "book1.txt", "changed:": "book0.txt"}


def test_a_damaged_manifest(one_book, tmp_path, capsys):
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": {}})[:-1])
    assert main(arguments(one_book, tmp_path, "http://127.0.0.1:9/v1")) == 2
    assert "manifest.json is damaged" in capsys.readouterr().err


def test_a_stop_keeps_complete_rows(tmp_path):
    place, output = make_place(tmp_path / "place"), tmp_path / "output"
    with Server() as server:
        assert main(arguments(place, output, server.url)) == 0
    before = lines(output / "train.jsonl")
    assert len(before) == 4
    for number in range(8):
        (place / "books" / f"new{number}.txt").write_text(story(100 + number, 3000), encoding="utf-8")
    with faulty(fault_for=lambda body: "401 |no") as proxy:
        line = arguments(place, output, proxy.url, "--accept-changes", "--concurrency", "1")
        assert main(line) == 1
        # Nothing is sent after the refusal.
        assert len(proxy.log) == 1
    assert sorted(map(str, lines(output / "train.jsonl"))) == sorted(map(str, before))


def _result(folder):
    """Return what a run ends with, without times and counts of the last run."""
    found = manifest(folder)
    kept = {name: found[name] for name in ("state", "rows", "tokens", "questions", "left_out", "models", "unfinished")}
    rows = sorted(row["key"] + str(row["attempt"]) for row in lines(folder / "journal.jsonl"))
    return kept, rows, lines(folder / "train.jsonl"), lines(folder / "sources.jsonl"), list(files(folder))


def test_killed_at_any_moment(one_book, tmp_path):
    """Each answer that reached the disk is paid for once; the rows are those of a run that nobody killed."""
    import pose_plugin.synthesize.run  # noqa: F401 - before the fork

    with Server() as server:
        stored = Counter()

        def command(folder):
            return main(arguments(one_book, folder, server.url, "--tasks", "single", "--concurrency", "2"))

        def result(folder):
            for row in lines(folder / "journal.jsonl"):
                stored[folder.name, row["key"], row["attempt"]] += 1
            return _result(folder)

        ended = survives(command, tmp_path, result)
        print(dict(ended), "requests:", len(server.log), "answers on disk:", sum(stored.values()))
    # No answer was requested again after it was stored.
    assert set(stored.values()) == {1}
