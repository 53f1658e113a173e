"""Write a repaired copy of a folder."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pose_plugin.doctor.checks import diagnose
from pose_plugin.doctor.folder import REMOVED, Folder, Problem
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import new_folder, write_json

_ROPE = ("rope_parameters", "rope_scaling")
# More rounds than one repair can make possible after another.
_ROUNDS = 5


def mended(folder: Folder) -> dict[str, dict[str, Any]]:
    """Return the changed files with their new values; {} if no problem has a certain repair."""
    repaired, files = folder, dict[str, dict[str, Any]]()
    for _ in range(_ROUNDS):  # only with the original window is it known how far the factor reaches
        changed = _changed(repaired, diagnose(repaired))
        if not changed:
            break
        files |= changed
        repaired = replace(repaired, files={**repaired.files, **changed})
    return files


def _changed(folder: Folder, problems: Iterable[Problem]) -> dict[str, dict[str, Any]]:
    """Return the files that the problems' own repairs change; of two changes of one key the first counts."""
    files: dict[str, dict[str, Any]] = {}
    done: set[tuple[str, tuple[str, ...]]] = set()
    for problem in problems:
        for name, changes in problem.changes.items():
            values = files.setdefault(name, copy.deepcopy(folder.files[name]))
            for path, value in changes.items():
                if (name, path) not in done:
                    done.add((name, path))
                    _set(values, path, value)
    return files


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        values = values.setdefault(parent, {})
    # The layers that see far, in a rope dict with one dict per layer type.
    if parents and parents[-1] in _ROPE and isinstance(values.get("full_attention"), dict):
        values = values["full_attention"]
    if value is REMOVED:
        values.pop(key, None)
    else:
        values[key] = value


def write_mended(folder: Folder, output: Path) -> list[str]:
    """Write a copy of a folder with every certain repair. The folder itself is not changed.

    Files that stay as they are become hard links, or copies on another disk, so weights take no second space.

    Returns:
        the names of the changed files.

    Raises:
        PoSEError: no problem has a certain repair, or the output exists.
    """
    changed = mended(folder)
    if not changed:
        raise PoSEError(f"{folder.path}: no problem here has a repair that is certain to be right; follow the fixes")
    if output.exists():
        raise PoSEError(f"--mend {output} exists already; name a new folder")
    with new_folder(output) as part:
        for source in sorted(folder.path.rglob("*")):
            place = part / source.relative_to(folder.path)
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif str(source.relative_to(folder.path)) not in changed:
                place.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(source.resolve(), place)
        for name, values in changed.items():
            write_json(part / name, values)
    return sorted(changed)


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another disk, or a file system without hard links
        shutil.copy2(source, place)
