from __future__ import annotations

import csv

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.positions.coverage import Coverage
from pose_plugin.positions.figure import draw_coverage, write_coverage
from pose_plugin.utils.errors import PoSEError


def seen(target: int = 64, **changes) -> Coverage:
    settings = parse_settings({"target_length": target, "train_length": 16, **changes})
    return Coverage(np.linspace(1, 0, target), 100, settings)


@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_selects_the_format(tmp_path, ending, begins):
    path = draw_coverage({"a": seen()}, tmp_path / f"c.{ending}")
    assert path == tmp_path / f"c.{ending}" and path.read_bytes().startswith(begins)


def test_csv_has_one_line_per_distance(tmp_path):
    near, far = seen(64), seen(66)
    path = write_coverage({"a": near, "b, c": far}, tmp_path / "c.csv", rows=30)
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    assert head == ["distance", "a", "b, c", "a, rows of 30", "b, c, rows of 30"]
    assert [int(line[0]) for line in lines] == list(range(1, 66))
    assert float(lines[9][1]) == pytest.approx(near.probability[10], rel=1e-5)
    assert float(lines[9][4]) == pytest.approx(30 * far.probability[10], rel=1e-5)
    assert lines[-1][1] == lines[-1][3] == "" and lines[-1][2] != ""


@pytest.mark.parametrize(
    "coverages, name, message",
    [({}, "c.png", "coverages is empty"), ({"a": seen()}, "c.txt", "must end in one of .png, .svg, .pdf")],
)
def test_what_cannot_be_drawn(tmp_path, coverages, name, message):
    with pytest.raises(PoSEError, match=message):
        draw_coverage(coverages, tmp_path / name)
    assert not list(tmp_path.iterdir())
