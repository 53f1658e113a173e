"""Atomic writes: readers see the old file or the new one, also after an interruption."""

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


def test_a_kill_while_writing_leaves_the_old_file(file):
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
    # Uploads to the hub leave out names that begin with an underscore.
    (left,) = [name for name in names(file.parent) if name != file.name]
    assert left.startswith("_config.json.") and left.endswith(".part")


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_only_the_old_file(file, monkeypatch, error):
    def full(*args):
        raise error

    monkeypatch.setattr(os, "replace", full)
    old = file.read_text()
    with pytest.raises(type(error)):
        write_json(file, {"new": True})
    assert file.read_text() == old and names(file.parent) == [file.name]


def test_an_open_reader_keeps_reading_the_old_file(file):
    with file.open() as reader:
        begin = reader.read(3)
        write_whole(file, "new and longer than what was there\n")
        assert begin + reader.read() == '{\n  "old": true\n}\n'
    assert file.read_text() == "new and longer than what was there\n"


def test_an_existing_file_keeps_its_mode(file, tmp_path):
    file.chmod(0o640)
    write_json(file, {"new": True})
    assert file.stat().st_mode & 0o777 == 0o640
    # A new file has the mode that any other new file has.
    (tmp_path / "other").touch()
    write_json(tmp_path / "new.json", {})
    assert (tmp_path / "new.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_target_of_a_link_is_not_changed(file, tmp_path):
    """As in the hub's cache, where several revisions share a file."""
    old = file.read_text()
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, {"new": True})
    assert file.read_text() == old and not link.is_symlink() and "new" in link.read_text()
