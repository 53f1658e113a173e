"""Tables and counts in texts for people."""

from __future__ import annotations

import pytest

from pose_plugin.utils.tables import columns, counted


def test_columns():
    assert columns([("length", "8"), ("a", "1024")]) == "length     8\na       1024"


@pytest.mark.parametrize(
    "number, form, expected", [(1, "", "1 text"), (2, "", "2 texts"), (0, "", "0 texts"), (1024, ",", "1,024 texts")]
)
def test_counted(number, form, expected):
    assert counted(number, "text", form) == expected
