"""What can be wrong with a folder: one function per cause, in the order in which they are reported.

Each yields the problems that it finds. A config that a model's authors published must yield no warning and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pose_plugin.doctor.checks import files, forms, rope
from pose_plugin.doctor.folder import Folder, Problem

CHECKS: tuple[Callable[[Folder], Iterator[Problem]], ...] = (
    files.damaged_files,
    forms.types,
    forms.kinds,
    rope.factors,
    forms.forms_disagree,
    forms.nested_forms_disagree,
    rope.maximum_not_raised,
    rope.original_missing,
    rope.base_missing,
    rope.raised_without_rope,
    rope.family_keys,
    rope.longrope_lists,
    files.other_windows,
    files.adapter,
    files.tokenizer_limit,
    files.generation_limit,
    files.record,
    rope.notes,
)


def diagnose(folder: Folder) -> list[Problem]:
    """Return all problems of a folder, errors first."""
    rank = {"error": 0, "warning": 1, "info": 2}
    found = [problem for check in CHECKS for problem in check(folder)]
    return sorted(found, key=lambda problem: rank[problem.finding.severity])
