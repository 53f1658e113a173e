"""Shared by the benchmarks: arguments, folders of results, facts about the machine, Markdown tables, a canvas."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURES = HERE.parent / "docs" / "figures"


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for JSON and PNG; default: results/, docs/figures/")
    parser.add_argument("--quick", action="store_true", help="takes seconds; only shows that the script runs")
    return parser


def places(output: Path | None) -> tuple[Path, Path]:
    """Return the folders of the JSON and of the PNG, and create them if missing."""
    folders = (output, output) if output else (RESULTS, FIGURES)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def machine(*packages: str) -> dict[str, str]:
    """Return the date, the processor, and the versions of Python and the named packages."""
    described = {"date": datetime.date.today().isoformat(), "processor": _processor()}
    described["python"] = platform.python_version()
    return described | {name: importlib.metadata.version(name) for name in packages}


def save(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    line = "|---|" + "---:|" * (len(header) - 1)
    top, *others = ("| " + " | ".join(row) + " |" for row in [header, *rows])
    return "\n".join([top, line, *others])


def about(facts: dict[str, str]) -> str:
    """Return the line below a table: date, processor and versions."""
    rest = [f"{name} {version}" for name, version in facts.items() if name not in ("date", "processor")]
    return f"{facts['date']}, {facts['processor']}, {', '.join(rest)}."


@contextmanager
def canvas(path: Path, width: float, height: float, columns: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure in the style of the reports and its row of axes, and save it at the end."""
    from pose_plugin.utils.plots import new_figure

    with new_figure(path, (width, height)) as figure:
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
