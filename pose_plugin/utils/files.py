"""Atomic writes of files and folders, and JSON files."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError, shown

# With these, the place that is written to is at fault, and not the file that is read: no space, quota, file too large,
# read-only, a failing disk.
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# The names of temporary folders. The underscore: uploads to the hub leave such names out.
_PART = re.compile(r"_.*\.[0-9a-f]{32}\.part", re.DOTALL)
# Copies of a folder share these files, because they are large and are never changed in place.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@contextmanager
def _part(folder: Path, file: Path) -> Iterator[Path]:
    """Yield a new temporary folder in a folder, and remove it when the block ends, if it is still there.

    Those of processes that were killed are removed first. A lock tells them from those in use. It is on a folder, as
    some libraries replace the file that they write, and the lock with it. Without locks (Windows, some network file
    systems) they stay.

    Args:
        file: the file or folder that will be written, for its name and for errors.
    """
    _remove_left_parts(folder)
    while True:
        # The random name: several processes may write the same file. The cut: names are limited to 255 bytes.
        part = folder / f"_{file.name[:50]}.{uuid.uuid4().hex}.part"
        with _named(file):
            part.mkdir()
        try:
            with _locked(part, wait=True):
                # Another process may have removed it before it was locked.
                if part.exists():
                    yield part
                    return
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _remove_left_parts(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed."""
    with suppress(OSError):
        for left in folder.iterdir():
            if _PART.fullmatch(left.name):
                with suppress(OSError), _locked(left, wait=False):
                    shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Lock a folder for this process while the block runs; the system releases it if the process is killed.

    Args:
        wait: whether to wait for the lock, and to continue if there are no locks.

    Raises:
        OSError: it is locked already, or cannot be locked; only without `wait`.
    """
    number = None
    try:
        try:
            import fcntl

            number = os.open(folder, os.O_RDONLY)
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except ImportError:  # Windows
            if not wait:
                raise OSError(errno.ENOLCK, "No locks available") from None
        except OSError:
            if not wait:
                raise
        yield
    finally:
        if number is not None:
            os.close(number)


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, which replaces the file when the block ends.

    If the block raises, the temporary file is removed and the old file stays. An existing file keeps its mode. A
    symbolic link is replaced by a file, and its target stays: in the hub's cache, several revisions share it.

    Raises:
        OSError: with the name of the file, which Python leaves out of errors of `write`.

    Example:
        >>> with atomic_file(Path("weights.pt")) as part:
        ...     torch.save(weights, part)
    """
    with _named(file), _part(file.parent, file) as place:
        yield place / file.name
        _replace(place / file.name, file)


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """Write several files of a folder together: all of them change when the block ends, or none if it raises.

    A process that is killed while the block runs leaves the folder's files as they were, and a subfolder that the next
    write into this folder removes. The renames at the end take no space. A kill between two of them leaves some files
    new and some old; the same command writes the same files again.

    Args:
        folder: an existing folder.

    Example:
        >>> with staged(Path("outputs")) as stage:
        ...     stage.write_json("config.json", config)
        ...     stage.write_json("pose.json", record)  # the last one is also renamed last
    """
    with _part(folder, folder) as place:
        stage = Stage(folder, place)
        yield stage
        stage.commit()


class Stage:
    """The files of a folder that `staged` will write.

    Attributes:
        folder: where they will be.
        place: where they are until then.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        # By name, in the order in which they will be renamed; False for a file that will be removed.
        self._written: dict[str, bool] = {}

    def path(self, name: str) -> Path:
        """Return where a file is now: as it will be, if it was written, or as it is in the folder."""
        return (self.place if self._written.get(name) else self.folder) / name

    def has(self, name: str) -> bool:
        """Return whether the folder will have a file."""
        return self._written.get(name, True) and self.path(name).is_file()

    def write_json(self, name: str, values: Any) -> None:
        self.write(name, json_text(values))

    def write(self, name: str, text: str) -> None:
        """Write a text file, with the line ends as they are in the text."""
        with self.new(name) as part:
            part.write_bytes(_encoded(text))

    def copy(self, source: Path, name: str) -> None:
        """Copy a file from elsewhere, with its mode and times."""
        with self.new(name) as part:
            shutil.copy2(source, part)

    def remove(self, name: str) -> None:
        self._written[name] = False

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the path at which to write a file."""
        part = self.place / name
        with _named(self.folder / name):
            part.parent.mkdir(parents=True, exist_ok=True)
            yield part
        self._written.pop(name, None)
        self._written[name] = True

    def commit(self) -> None:
        """Rename every file to its place."""
        for name, kept in self._written.items():
            file = self.folder / name
            with _named(file):
                if kept:
                    file.parent.mkdir(exist_ok=True)
                    _replace(self.place / name, file)
                else:
                    file.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Write a folder whole or not at all: yield an empty folder, which gets its name when the block ends.

    Args:
        folder: a path that does not exist, or an empty folder.
    """
    with _named(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _part(folder.parent, folder) as part:
            yield part
            # On Windows, a rename does not replace an empty folder.
            with suppress(OSError):
                folder.rmdir()
            os.rename(part, folder)


def copy_folder(source: Path, output: Path, names: Iterable[str], texts: Mapping[str, str], option: str) -> None:
    """Copy files of a folder, with other texts in some of them. The output is written whole or not at all.

    Weights become hard links, if the disk allows it. Small files are copied, because they may be rewritten in either
    folder.

    Args:
        source: the folder, which is not changed.
        output: a new folder. If it is such a copy already, as in a repeated command, nothing is written.
        names: files to copy, relative to the folder.
        texts: files to write instead, by their relative names.
        option: the option that names the output, for the error.

    Raises:
        PoSEError: the output holds something else.
    """
    kept = [name for name in names if name not in texts]
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        if _is_copy(source, output, kept, texts):
            return
        raise PoSEError(
            f"{option} {output} exists and is not empty, and it is no copy of {source} as it is now; name a new folder"
        )
    with new_folder(output) as part:
        for name in kept:
            _link_or_copy(source / name, part / name)
        for name, text in texts.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(_encoded(text))


def _is_copy(source: Path, output: Path, names: Iterable[str], texts: Mapping[str, str]) -> bool:
    try:
        # Weights of a later training have the same size. Links and copies keep the time, so their bytes are not read.
        return all(filecmp.cmp(source / name, output / name) for name in names) and all(
            (output / name).read_bytes() == _encoded(text) for name, text in texts.items()
        )
    except OSError:  # a file is missing
        return False


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix in _WEIGHTS:
        # Another disk, or a file system without hard links. The target of a symbolic link, as the hub's cache has them,
        # because the link itself would point to nowhere from another folder.
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copy2(source, target)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        PoSEError: the file is not JSON, or not an object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PoSEError(f"{file} is not valid JSON: {shown(error)}; save or download it again") from None
    if not isinstance(values, dict):
        raise PoSEError(f"{file} holds a {type(values).__name__}, not an object {{…}}; save the folder again")
    return values


def listed_files(file: Path) -> list[Path]:
    """Return the files that a JSON file names under "files", all in its own folder; [] if it names none."""
    try:
        return [file.parent / Path(name).name for name in read_json(file).get("files", [])]
    except (OSError, PoSEError, TypeError):
        return []


def json_text(values: Any) -> str:
    """Return values as indented JSON, as it is written to files."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write_json(file: Path, values: Any) -> None:
    """Write values as indented JSON, atomically."""
    write_whole(file, json_text(values))


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically, with the line ends as they are in the text."""
    with atomic_file(file) as part:
        part.write_bytes(_encoded(text))


def _encoded(text: str) -> bytes:
    """Return the bytes of a text file.

    A path may hold bytes that are not UTF-8. They become escapes such as \\udcfc, from which JSON gives the path again.
    """
    return text.encode("utf-8", errors="backslashreplace")


def space_left(file: str | Path) -> str:
    """Return e.g. " (3.0 MiB are free in /data)" for the place of a file; "" if it cannot be measured."""
    for place in Path(file).parents:
        with suppress(OSError):
            return f" ({shutil.disk_usage(place).free / 2**20:.1f} MiB are free in {place})"
    return ""


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in errors that concern it, instead of its temporary path or nothing."""
    try:
        yield
    except OSError as error:
        temporary = any(_PART.fullmatch(part) for part in Path(str(error.filename)).parts)
        if error.filename is None or temporary or error.errno in OF_THE_DISK:
            # `from None` would hide the line that failed.
            raise OSError(error.errno, error.strerror or str(error), str(file)) from error
        raise


def _replace(part: Path, file: Path) -> None:
    # There may be no old file, another process may just have removed it, or the file system has no modes.
    with suppress(OSError):
        shutil.copymode(file, part)
    os.replace(part, file)
