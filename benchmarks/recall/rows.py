"""Results as rows in one JSON file, written one row at a time so that a stopped run loses at most one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pose_plugin.utils.files import atomic_file


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a results file; none if it is missing."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def save_row(path: Path, row: dict[str, Any], machine: dict[str, str]) -> list[dict[str, Any]]:
    """Append a row to a results file, one line per row, and return all rows.

    The file is replaced as a whole, so that it is valid JSON at any time.
    """
    rows = [*load_rows(path), row]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(each, ensure_ascii=False) for each in rows)
    with atomic_file(path) as part:
        part.write_text(f'{{"machine": {json.dumps(machine)},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    return rows
