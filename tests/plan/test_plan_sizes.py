"""The table of docs/plan.md is what the command prints."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sizes():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("plan_sizes")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def committed(sizes):
    return json.loads(sizes.FILE.read_text())


def test_the_page_has_the_committed_table(sizes):
    assert sizes.table(committed(sizes)) in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("at", [0, -1])
def test_the_command_prints_the_committed_numbers(sizes, at):
    target = sizes.TARGETS[at]
    assert sizes.plan(*sizes.RUNS[at], target) == committed(sizes)["plans"][at]
