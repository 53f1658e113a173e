"""Write a repaired copy of a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pose_plugin.doctor.checks import diagnose
from pose_plugin.doctor.folder import REMOVED, Folder, Problem
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import copy_folder, json_text

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
    """Write a copy of a folder with every certain repair (see `copy_folder`). The folder itself is not changed.

    Returns:
        the names of the changed files.

    Raises:
        PoSEError: no problem has a certain repair, or the output holds something else or is inside the folder.
    """
    if output.resolve().is_relative_to(folder.path.resolve()) and output.resolve() != folder.path.resolve():
        raise PoSEError(f"--mend {output} is inside {folder.path}, which stays as it is; name a folder outside it")
    changed = mended(folder)
    if not changed:
        raise PoSEError(f"{folder.path}: no problem here has a repair that is certain to be right; follow the fixes")
    names = [str(path.relative_to(folder.path)) for path in sorted(folder.path.rglob("*")) if path.is_file()]
    texts = {name: json_text(values) for name, values in changed.items()}
    copy_folder(folder.path, output, names, texts, "--mend")
    return sorted(changed)
