"""The table of docs/plan.md is what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import benchmark, committed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sizes():
    return benchmark("plan_sizes")


def test_the_page_has_the_committed_table(sizes):
    assert sizes.table(committed("plan_sizes")) in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("at", [0, -1])
def test_the_command_prints_the_committed_numbers(sizes, at):
    target = sizes.TARGETS[at]
    assert sizes.plan(*sizes.RUNS[at], target) == committed("plan_sizes")["plans"][at]
