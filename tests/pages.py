"""The pages of the documentation, and the benchmarks behind their tables."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page that are marked with a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(program: str, pages: Sequence[Path] = ()) -> list[list[str]]:
    """Return every command line of the pages that begins with the program, with continuation lines joined.

    Args:
        program: the first words of the line.
        pages: default: README and docs, without the page that has its own folders and test.
    """
    pages = pages or [page for page in PAGES if page.name != "other_trainers.md"]
    texts = [block.replace("\\\n", " ") for page in pages for block in blocks(page, "bash")]
    lines = [line for text in texts for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program)]


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import scripts of a folder by their bare names, as `python folder/script.py` does."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def benchmark(name: str) -> ModuleType:
    """Import a module of benchmarks/."""
    with importing_from(BENCHMARKS):
        return importlib.import_module(name)


def committed(name: str) -> dict[str, Any]:
    """Return the committed results of a benchmark."""
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


@contextmanager
def recall_benchmark() -> Iterator[Any]:
    """Yield a function that imports modules of benchmarks/recall, which import others of benchmarks/ when they run."""
    with importing_from(BENCHMARKS):
        yield lambda name: importlib.import_module(f"recall.{name}")
    for name in [name for name in sys.modules if name == "common" or name.split(".")[0] in ("recall", "smollm2")]:
        del sys.modules[name]
