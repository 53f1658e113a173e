"""What an interrupted evaluation has measured already: one JSON line for each model, task and length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError

FILE = "finished.jsonl"
COUNTED = (
    "config.json", "adapter_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Files of a model folder beside weights and `tokenizer*` that change what a model answers."""


class Finished:
    """Results on disk, found again by everything that they depend on; a changed option or model is measured anew.

    Args:
        folder: the output folder.
        fresh: forget what is there.

    Attributes:
        versions: of pose_plugin, that the results were measured with.
    """

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.file, self._fresh = folder / FILE, fresh
        self._found: dict[str, Any] = {}
        self.versions: set[str] = set()
        if self.file.exists() and not fresh:
            with writing(folder):
                text = self.file.read_text(encoding="utf-8", errors="replace")
            for line in text.split("\n"):  # an answer may hold other line breaks, as U+2028
                try:
                    row = json.loads(line)
                    self._found[row["key"]] = row["result"]
                    self.versions.add(str(row.get("version", "an early version")))
                except (ValueError, KeyError, TypeError):
                    # The line that was being written when the power went.
                    continue

    def open(self) -> None:
        """Makes the folder, forgets what shall be forgotten, and finds out now whether results can be kept.

        Raises:
            PoSEError: they cannot.
        """
        with writing(self.file.parent):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self._fresh:
                self.file.unlink(missing_ok=True)
            self.file.open("a").close()

    def get(self, **what: Any) -> Any | None:
        """The result that was kept for exactly this, or None."""
        return self._found.get(key(what))

    def put(self, result: Any, **what: Any) -> None:
        """Keeps a result; it is on disk when this returns."""
        self._found[key(what)] = result
        readable = {name: what.get(name) for name in ("name", "task", "length", "version")}
        row = json.dumps({**readable, "key": key(what), "result": result}, ensure_ascii=False).encode()
        # The line break stands before the row: a torn last line never swallows this one, and nothing has to be read
        # that another run into this folder may just be writing. One write, so that rows do not run into each other.
        line = b"\n" + row
        with writing(self.file.parent), self.file.open("ab", buffering=0) as file:
            while line:
                line = line[file.write(line) :]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses, in a sentence.

    Raises:
        PoSEError: no permission, no space, a file where a folder should be, …
    """
    try:
        yield
    except OSError as error:
        raise PoSEError(
            f"--output {folder} cannot be used ({error}); name a folder that can be written. What is finished is kept"
        ) from error


def key(what: dict[str, Any]) -> str:
    """A name is for readers; all else counts."""
    counted = {name: value for name, value in what.items() if name != "name"}
    return digest(json.dumps(counted, sort_keys=True, default=str))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def weights_of(path: str) -> list[Any]:
    """What tells one state of a model folder from another without reading it: weights, config and tokenizer by name,
    size and date; a hub name stands for itself."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    return [str(folder.resolve()), *(_state(file, file.name) for file in sorted(folder.iterdir()) if _counts(file))]


def state_of(folder: Path) -> list[Any]:
    """Every file below a folder by name, size and date, but hidden ones, what Python leaves there, and results: those
    of this very run may be written there, and would tell it that something has changed."""
    results = {file.parent for file in folder.rglob(FILE)} - {folder}

    def counts(file: Path) -> bool:
        parts = file.relative_to(folder).parts
        left = "__pycache__" in parts or any(part.startswith(".") for part in parts)
        return file.is_file() and not left and results.isdisjoint(file.parents)

    files = filter(counts, sorted(folder.rglob("*")))
    return [str(folder.resolve()), *(_state(file, file.relative_to(folder).as_posix()) for file in files)]


def _counts(file: Path) -> bool:
    named = file.suffix in (".safetensors", ".bin", ".model") or file.name in COUNTED
    return (named or file.name.startswith("tokenizer")) and file.is_file()


def _state(file: Path, name: str) -> list[Any]:
    return [name, file.stat().st_size, file.stat().st_mtime_ns]
