from __future__ import annotations

import csv
import subprocess
import sys

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


def drawn(monkeypatch, tmp_path, coverages):
    """Return the axes and the legend of the figure instead of saving it."""
    from matplotlib.figure import Figure

    caught = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: caught.append(self))
    draw_coverage(coverages, tmp_path / "c.png")
    return caught[0].axes[0], caught[0].legends[0]


def test_lines_labels_and_marks(monkeypatch, tmp_path):
    axes, legend = drawn(monkeypatch, tmp_path, {"pose": seen(), "far": seen(128)})
    assert [text.get_text() for text in legend.get_texts()] == ["pose", "far"]
    near, far = axes.lines[:2]
    # A pair of tokens has a distance of at least 1.
    assert near.get_xdata().tolist() == list(range(1, 64)) and far.get_xdata().tolist() == list(range(1, 128))
    assert near.get_ydata().tolist() == seen().probability[1:].tolist()
    assert [text.get_text() for text in axes.texts] == ["trained 16", "target 128"]
    assert axes.get_xlim() == (0, 128)


def test_two_trained_windows_leave_no_mark(monkeypatch, tmp_path):
    axes, _ = drawn(monkeypatch, tmp_path, {"a": seen(), "b": seen(train_length=32)})
    assert [text.get_text() for text in axes.texts] == ["target 64"]


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
    [({}, "c.png", "got no coverage"), ({"a": seen()}, "c.txt", "must end in one of .png, .svg, .pdf")],
)
def test_what_cannot_be_drawn(tmp_path, coverages, name, message):
    with pytest.raises(PoSEError, match=message):
        draw_coverage(coverages, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PoSEError, match=r'pip install "pose-plugin\[plot\]"'):
        draw_coverage({"a": seen()}, tmp_path / "c.png")


def test_importing_needs_neither_torch_nor_matplotlib():
    code = "import sys, pose_plugin.positions.figure; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
