"""Runs of the real command on small books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.synthesize.material import byte_tokenizer, make_books


def make_place(folder: Path, books: int = 4) -> Path:
    """Make a folder with a tokenizer of bytes, and books of 3000 bytes."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    make_books(folder / "books", books)
    return folder


def arguments(place: Path, output: Path, url: str, *more: str) -> list[str]:
    """Return the arguments of a run that sends five requests per book."""
    line = ["synthesize", str(place / "books"), "--output", str(output), "--tokenizer", str(place / "tokenizer")]
    line += ["--window", "6000", "--model", "writer", "--base-url", url, "--chunk-tokens", "600", "--quiet"]
    return [*line, "--retry-wait", "0.01", *more]


def lines(path: Path) -> list[dict[str, Any]]:
    # A journal's rows begin with their line break, so its first line is empty.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
