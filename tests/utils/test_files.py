"""Atomic writes: readers see the old file or the new one, also after an interruption."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import atomic_file, copy_folder, new_folder, read_json, staged, write_json, write_whole
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
        write = Path.write_bytes

        def killed(path, data):
            write(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        Path.write_bytes = killed
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


def killed_in_the_middle(file: Path, write: Callable[[Path], None]) -> None:
    def case():
        with atomic_file(file) as part:
            write(part)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CaseError, match="the child died"):
        forked(case)


@pytest.mark.parametrize("again", ["the same file", "another file", "several files", "a folder"])
def test_what_a_kill_left_is_removed_by_the_next_write(file, again):
    pytest.importorskip("fcntl")
    killed_in_the_middle(file, lambda part: part.write_text("{"))
    assert len(names(file.parent)) == 2
    if again == "several files":
        with staged(file.parent) as stage:
            stage.write("new", "")
    elif again == "a folder":
        with new_folder(file.with_name("new")):
            pass
    else:
        write_json(file if again == "the same file" else file.with_name("new"), {})
    assert names(file.parent) == [file.name, *(["new"] if again != "the same file" else [])]


def test_what_another_process_writes_is_left_alone(file):
    pytest.importorskip("fcntl")
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with atomic_file(file) as part:
                part.write_text("first")
                # As safetensors does: the file that was opened is replaced.
                part.with_name("other").write_text("theirs")
                part.with_name("other").replace(part)
                os.write(ready[1], b"1")
                os.read(done[0], 1)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    write_json(file, {"ours": True})
    with staged(file.parent) as stage, new_folder(file.with_name("new")):
        stage.write_json(file.name, {"ours": 2})
    assert len([name for name in names(file.parent) if name.endswith(".part")]) == 1
    assert "ours" in file.read_text()
    os.write(done[1], b"1")
    os.waitpid(pid, 0)
    assert file.read_text() == "theirs" and names(file.parent) == [file.name, "new"]


def test_without_locks_nothing_is_removed(file, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    killed_in_the_middle(file, lambda part: part.write_text("{"))

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_json(file, {"new": True})
    assert "new" in file.read_text() and len(names(file.parent)) == 2


def test_a_copy_shares_weights_and_nothing_else(tmp_path):
    """The hub's cache has links to files elsewhere, which point to nowhere from another folder."""
    source, copy = tmp_path / "snapshots" / "model", tmp_path / "copy"
    (source / "part").mkdir(parents=True)
    for name in ("model.safetensors", "README.md", "config.json", "part/x.json"):
        blob = tmp_path / name.replace("/", "-")
        blob.write_text(name)
        (source / name).symlink_to(os.path.relpath(blob, (source / name).parent))
    all_names = ["model.safetensors", "README.md", "config.json", "part/x.json"]
    for _ in range(2):  # the second time, nothing is left to do
        copy_folder(source, copy, all_names, {"config.json": "{}", "part/y.json": "[]"}, "--output")
        assert (copy / "model.safetensors").samefile(tmp_path / "model.safetensors")
        assert not (copy / "README.md").samefile(tmp_path / "README.md")
        assert not any(path.is_symlink() for path in copy.rglob("*"))
        assert {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()} == {
            **{name: name for name in all_names}, "config.json": "{}", "part/y.json": "[]"
        }  # fmt: skip
    for change in (copy / "config.json", copy / "README.md", copy / "part" / "y.json"):
        change.write_text("another")
        with pytest.raises(PoSEError, match=r"--output .*copy exists"):
            copy_folder(source, copy, all_names, {"config.json": "{}", "part/y.json": "[]"}, "--output")


def test_weights_of_a_later_training_are_no_such_copy(tmp_path):
    source, copy = tmp_path / "model", tmp_path / "copy"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"first")
    copy_folder(source, copy, ["model.safetensors"], {}, "--output")
    (source / "new").write_bytes(b"later")  # of the same size
    (source / "new").replace(source / "model.safetensors")
    with pytest.raises(PoSEError, match="it is no copy of"):
        copy_folder(source, copy, ["model.safetensors"], {}, "--output")
    assert (copy / "model.safetensors").read_bytes() == b"first"


def test_a_path_that_is_no_utf_8(tmp_path):
    """Linux allows any bytes; Python hands those that are no UTF-8 out as surrogates."""
    values = {"folder": b"/models/F\xfc\xc3\xbc".decode("utf-8", "surrogateescape")}
    write_json(tmp_path / "request.json", values)
    assert read_json(tmp_path / "request.json") == values
    assert "ü" in (tmp_path / "request.json").read_text(encoding="utf-8")
    with staged(tmp_path) as stage:
        stage.write("README.md", values["folder"])
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "/models/F\\udcfcü"
