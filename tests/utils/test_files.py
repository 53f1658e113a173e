"""A file that is written over: whoever reads it, or whatever a kill leaves, is the old one or the new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pose_plugin.utils.files import write_json, write_whole
from tests.forked import CaseError, forked


@pytest.fixture
def file(tmp_path) -> Path:
    write_json(tmp_path / "config.json", {"old": True})
    return tmp_path / "config.json"


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_kill_in_the_middle_leaves_the_old_one(file):
    old = file.read_text()

    def case():
        write = Path.write_text

        def killed(path, text, **kwargs):
            write(path, text[: len(text) // 2], **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        Path.write_text = killed
        write_json(file, {"new": True})

    with pytest.raises(CaseError, match="the child died"):
        forked(case)
    assert file.read_text() == old
    # What is left is no file that anybody looks for, and an upload leaves it out.
    (left,) = [name for name in names(file.parent) if name != file.name]
    assert left.startswith("_config.json.") and left.endswith(".part")


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_written_leaves_the_old_one_and_nothing_else(file, monkeypatch, error):
    def full(*args):
        raise error

    monkeypatch.setattr(os, "replace", full)
    old = file.read_text()
    with pytest.raises(type(error)):
        write_json(file, {"new": True})
    assert file.read_text() == old and names(file.parent) == [file.name]


def test_a_reader_goes_on_in_the_old_one(file):
    with file.open() as reader:
        begin = reader.read(3)
        write_whole(file, "new and longer than what was there\n")
        assert begin + reader.read() == '{\n  "old": true\n}\n'
    assert file.read_text() == "new and longer than what was there\n"


def test_the_mode_stays(file, tmp_path):
    file.chmod(0o640)
    write_json(file, {"new": True})
    assert file.stat().st_mode & 0o777 == 0o640
    # A new one is as any other.
    (tmp_path / "other").touch()
    write_json(tmp_path / "new.json", {})
    assert (tmp_path / "new.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_link_points_to_stays_as_it_is(file, tmp_path):
    """As in the hub's cache, where several revisions share a file."""
    old = file.read_text()
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, {"new": True})
    assert file.read_text() == old and not link.is_symlink() and "new" in link.read_text()
