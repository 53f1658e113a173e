"""Every answer that was paid for, on disk before anything else is done with it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log


@dataclass(frozen=True)
class Entry:
    """One answer of the server, usable or not: both are paid.

    Attributes:
        key: hash of the request.
        attempt: from 1, as an unusable answer is asked for again.
        item, part: what of the data it is for.
        content: what the model wrote.
        finish: why it stopped.
        input_tokens, output_tokens: as billed; estimated where the server does not say.
        model: the model that the server says has answered.
    """

    key: str
    attempt: int
    item: str
    part: str
    content: str
    finish: str
    input_tokens: int
    output_tokens: int
    model: str


def request_key(request: dict[str, Any]) -> str:
    """sha256 of everything that decides an answer; the server's address does not."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=True).encode("ascii")).hexdigest()


class Journal:
    """Answers by request, appended to `journal.jsonl` and flushed to the disk one by one.

    Raises:
        PoSEError: another process writes to the same file.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._answers: dict[str, list[Entry]] = {}
        self._file: Any = None
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            _lock(self._file, path)
        if path.exists():
            self._load()

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and self._file is not None:
            # Killed while writing: that answer is lost, and the next one must begin on a line of its own.
            os.truncate(self.path, whole)
        damaged = 0
        for line in data[:whole].splitlines():
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError):
                damaged += 1
                continue
            self._answers.setdefault(entry.key, []).append(entry)
        if damaged:
            log.warning(f"{self.path}: {damaged} damaged lines are ignored, and asked for again")

    def answers(self, key: str) -> list[Entry]:
        return self._answers.get(key, [])

    def all(self) -> list[Entry]:
        return [entry for entries in self._answers.values() for entry in entries]

    def add(self, entry: Entry) -> None:
        """Returns once the answer is on the disk."""
        self._file.write(json.dumps(asdict(entry), ensure_ascii=True).encode("ascii") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._answers.setdefault(entry.key, []).append(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lock(file: Any, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise PoSEError(
            f"--output {path.parent} is being written by another run; wait for it, or name another folder"
        ) from None
    except OSError as error:
        # Some disks of clusters have no locks.
        log.warning(f"--output {path.parent} cannot be locked ({error}): start no second run into it")
