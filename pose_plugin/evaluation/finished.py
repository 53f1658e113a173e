"""What an interrupted evaluation has measured already: one JSON line for each model, task and length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import Journal, digest

FILE = "finished.jsonl"
COUNTED = (
    "config.json", "adapter_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Files of a model folder beside weights and `tokenizer*` that change what a model answers."""


class Finished:
    """Results on disk, found again by everything that they depend on.

    Args:
        folder: the output folder.
        fresh: forget what is there.

    Attributes:
        versions: of pose_plugin, that the results were measured with.
    """

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self._fresh = fresh
        with writing(folder):
            self.journal = Journal(folder / FILE)
        if fresh:
            self.journal.rows = {}
        self.versions = {str(row.get("version", "an early version")) for row in self.journal.all()}

    def open(self) -> None:
        """Create the folder, forget what `fresh` forgets, and raise PoSEError now if results cannot be kept."""
        with writing(self.journal.path.parent):
            if self._fresh:
                self.journal.path.unlink(missing_ok=True)
            self.journal.open()

    def get(self, **what: Any) -> Any | None:
        """Return the result that was kept for exactly this, or None."""
        rows = self.journal.get(key(what))
        return rows[-1].get("result") if rows else None

    def put(self, result: Any, **what: Any) -> None:
        """Keep a result; it is on disk when this returns."""
        readable = {name: what.get(name) for name in ("name", "task", "length", "version")}
        with writing(self.journal.path.parent):
            self.journal.add(key(what), **readable, result=result)


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
    """Return the hash of everything but the display name."""
    return digest({name: value for name, value in what.items() if name != "name"})


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
