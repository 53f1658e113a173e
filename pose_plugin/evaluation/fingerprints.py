"""What tells one state of a folder from another without reading its files: their names, sizes and dates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FINISHED = "finished.jsonl"
"""Where an evaluation keeps its results."""
COUNTED = (
    "config.json", "adapter_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Files of a model folder, besides weights and `tokenizer*`, that change what a model answers."""


def of_model(path: str) -> list[Any]:
    """Return the state of a model folder: weights, config and tokenizer. A hub name stands for itself."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    counted = [file for file in sorted(folder.iterdir()) if file.is_file() and _counts(file)]
    return [str(folder.resolve()), *(_state(file, file.name) for file in counted)]


def of_folder(folder: Path) -> list[Any]:
    """Return the state of every file below a folder.

    Hidden files, Python's caches and folders of results do not count: the results of this very run may be written
    there, and would look like a change.
    """
    results = {file.parent for file in folder.rglob(FINISHED)} - {folder}

    def counts(file: Path) -> bool:
        parts = file.relative_to(folder).parts
        left_out = "__pycache__" in parts or any(part.startswith(".") for part in parts)
        return file.is_file() and not left_out and results.isdisjoint(file.parents)

    files = filter(counts, sorted(folder.rglob("*")))
    return [str(folder.resolve()), *(_state(file, file.relative_to(folder).as_posix()) for file in files)]


def _counts(file: Path) -> bool:
    named = file.suffix in (".safetensors", ".bin", ".model") or file.name in COUNTED
    return named or file.name.startswith("tokenizer")


def _state(file: Path, name: str) -> list[Any]:
    return [name, file.stat().st_size, file.stat().st_mtime_ns]
