"""What can be wrong with a folder: one function per cause, in the order in which they are reported.

Each yields the problems that it finds. A config that a model's authors published must yield no warning and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pose_plugin.doctor.checks.files import (
    adapter,
    damaged_files,
    generation_limit,
    other_windows,
    record,
    tokenizer_limit,
)
from pose_plugin.doctor.checks.forms import forms_disagree, kinds, nested_forms_disagree, types
from pose_plugin.doctor.checks.rope import (
    base_missing,
    factors,
    family_keys,
    longrope_lists,
    maximum_not_raised,
    notes,
    original_missing,
    raised_without_rope,
)
from pose_plugin.doctor.folder import Folder, Problem

CHECKS: tuple[Callable[[Folder], Iterator[Problem]], ...] = (
    damaged_files,
    types,
    kinds,
    factors,
    forms_disagree,
    nested_forms_disagree,
    maximum_not_raised,
    original_missing,
    base_missing,
    raised_without_rope,
    family_keys,
    longrope_lists,
    other_windows,
    adapter,
    tokenizer_limit,
    generation_limit,
    record,
    notes,
)


def diagnose(folder: Folder) -> list[Problem]:
    """Return all problems of a folder, errors first."""
    rank = {"error": 0, "warning": 1, "info": 2}
    found = [problem for check in CHECKS for problem in check(folder)]
    return sorted(found, key=lambda problem: rank[problem.finding.severity])
