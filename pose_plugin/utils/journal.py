"""Append-only JSONL files of finished work: an interrupted run reads its rows back and continues after them.

A row is one line, `{"key": …, …}`. The line break is written *before* the row, so that a line torn by an interruption
never swallows the next row. Each row is a single append of the operating system and nothing is read while appending,
so that several processes can write to one file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

Row = dict[str, Any]


def digest(value: Any) -> str:
    """Return the sha256 of a value as hexadecimal digits; equal JSON gives equal digests.

    Args:
        value: anything JSON can hold; other objects count by their `str`.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """The rows of a file by key, and an end to append to.

    Args:
        path: the file. It is read if it exists, and created by `open` or by the first `add`.

    Attributes:
        rows: the rows of each key, in the order they were written.
        damaged: lines that could not be parsed, e.g. one torn by an interruption.

    Example:
        >>> journal = Journal(folder / "finished.jsonl")
        >>> if not journal.get(key):
        ...     journal.add(key, result=measure())  # on the disk when this returns
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, list[Row]] = {}
        self.damaged = 0
        self._file: BinaryIO | None = None
        if path.exists():
            self.read()

    def get(self, key: str) -> list[Row]:
        """Return the rows of a key, the oldest first."""
        return self.rows.get(key, [])

    def all(self) -> list[Row]:
        """Return every row, grouped by key."""
        return [row for rows in self.rows.values() for row in rows]

    def add(self, key: str, **row: Any) -> None:
        """Append a row; it is on the disk when this returns."""
        row = {"key": key, **row}
        line = b"\n" + json.dumps(row).encode("ascii")
        file = self.open()
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
        self.rows.setdefault(key, []).append(row)

    def open(self, lock: bool = False) -> BinaryIO:
        """Create the file if it is missing and keep it open for appending.

        Args:
            lock: refuse to share the file with another process, and read what others wrote before.

        Raises:
            OSError: the file cannot be written.
            PoSEError: another process holds the lock.
        """
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a row is one write, and the system appends each write as a whole.
            self._file = self.path.open("ab", buffering=0)
        if lock:
            _lock(self._file, self.path)
            self.read()
        return self._file

    def close(self) -> None:
        """Close the file, which also releases its lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> None:
        """Read the rows, with those that other processes have added."""
        self.rows, self.damaged = {}, 0
        # By bytes: text files also break lines at characters that a row may contain, such as U+2028.
        for line in self.path.read_bytes().split(b"\n"):
            try:
                row = json.loads(line) if line else None
                if row is not None:
                    self.rows.setdefault(str(row["key"]), []).append(row)
            except (ValueError, KeyError, TypeError):
                self.damaged += 1


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PoSEError(f"{path} is being written by another run; wait for it, or use another folder") from None
    except OSError as error:
        # Some network file systems have no locks.
        log.warning("%s cannot be locked (%s): do not start a second run that writes to it", path, error)
