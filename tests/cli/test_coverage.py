from __future__ import annotations

import contextlib
import csv
import sys

import numpy as np
import pytest

from pose_plugin.cli import main as cli
from pose_plugin.config import parse_settings
from pose_plugin.positions import coverage, make_sampler

LENGTHS = ("--target-length", 256, "--train-length", 32)


def run(*arguments):
    return cli.main(["coverage", *map(str, arguments)])


def tables(text: str) -> list[dict[str, list[str]]]:
    """Return the tables of the output: each a dict from the name of a line to its cells."""
    blocks = [block.splitlines()[1:] for block in text.split("\n\n")]
    found = []
    for head, *lines in (block for block in blocks if block and block[0].startswith("distance")):
        width = len(head.split()) - 1
        found.append({"distance": head.split()[1:]} | {" ".join(x.split()[:-width]): x.split()[-width:] for x in lines})
    return found


def test_table_rows_figure_and_csv(tmp_path, capsys):
    picture = tmp_path / "new" / "coverage.png"
    code = run(*LENGTHS, "--compare", "pose:3,none,pose", "--rows", 500, "--draws", 300, "--seed", 7,
               "--distances", "16,200", "--output", picture)  # fmt: skip
    assert code == 0
    settings = parse_settings({"target_length": 256, "train_length": 32})
    expected = coverage(settings, draws=300, seed=7).probability
    output = capsys.readouterr().out
    chances, rows = tables(output)
    # The second `pose` has the same settings as the first line, so it adds none.
    assert list(chances) == list(rows) == ["distance", "pose, 2 chunks", "pose, 3 chunks", "none"]
    assert chances["distance"] == rows["distance"] == ["16", "200"]
    assert chances["pose, 2 chunks"] == [f"{expected[d]:.3f}" for d in (16, 200)]
    assert rows["pose, 2 chunks"] == [f"{500 * expected[d]:.0f}" for d in (16, 200)]
    assert chances["none"] == ["1.000", "0.000"] and rows["none"] == ["500", "0"]
    assert "none: 224 of 255 distances are in less than 1 % of the rows, the nearest 32" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "new" / "coverage.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0][:2] == ["distance", "pose, 2 chunks"] and len(lines) == 256
    np.testing.assert_allclose([float(line[1]) for line in lines[1:]], expected[1:], rtol=1e-5)


def test_without_output_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*LENGTHS, "--draws", 50, "--variant", "reference") == 0
    (chances,) = tables(capsys.readouterr().out)
    assert list(chances) == ["distance", "pose, 2 chunks, reference"]
    # Half a window, three quarters, the whole; quarters of the target, and the last window before it.
    assert chances["distance"] == ["16", "24", "31", "64", "128", "192", "224", "240", "255"]
    assert not list(tmp_path.iterdir())


def test_options_reach_the_simulation(capsys):
    assert run(*LENGTHS, "--draws", 50, "--unskipped-ratio", 1, "--distances", "31,32") == 0
    assert tables(capsys.readouterr().out)[0]["pose, 2 chunks"] == ["1.000", "0.000"]
    last = []
    for margin in (0, 64):
        assert run(*LENGTHS, "--draws", 2000, "--target-margin", margin, "--distances", "250") == 0
        last.append(float(tables(capsys.readouterr().out)[0]["pose, 2 chunks"][0]))
    plain, wide = last
    assert plain < 0.06 < 0.08 < wide


def test_no_figures_needs_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*LENGTHS, "--draws", 50, "--output", tmp_path / "c.png", "--no-figures") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-length", 16], "target_length=16 is smaller than the trained window train_length=32"),
        (["--target-length", 1, "--train-length", 1], "--target-length: '1' is not a number of tokens from 2"),
        (["--target-length", 1 << 25], "more than the 16777216 positions that can be simulated"),
        (["--train-length", 0], "--train-length: '0' is not a number of tokens"),
        (["--sampler", "posy"], "did you mean pose?"),
        (["--chunks", 0], "--chunks: '0'"),
        (["--chunks", 10**9], "chunks=1000000000 are more than the tokens of a window, --train-length 32"),
        (["--compare", "pose:33"], "chunks=33 are more"),
        (["--variant", "own"], "--variant: 'own'"),
        (["--every", 4], "--every 4 has no effect without --sampler turns or sentences"),
        (["--unskipped-ratio", 1.5], "--unskipped-ratio: '1.5'"),
        (["--compare", "pose,random"], "pose.sampler='random'"),
        (["--compare", "pose:many"], "--compare pose:many: chunks must be a number"),
        (["--rows", 0], "--rows: '0'"),
        (["--rows", "9" * 5000], "--rows: '9999"),
        (["--draws", -1], "--draws: '-1'"),
        (["--distances", "far"], "--distances: 'far'"),
        (["--distances", "10,256"], "--distances 256 must be from 1 to 255"),
        (["--output", "FOLDER"], "is a folder; name a file"),
        (["--output", "FOLDER/file/c.png"], "lies inside a file"),
        (["--output", "FOLDER/c.txt"], "must end in one of .png, .svg, .pdf"),
    ],
)
def test_bad_input_is_an_error_with_exit_code_2(tmp_path, capsys, arguments, message):
    (tmp_path / "file").write_text("")
    arguments = [str(a).replace("FOLDER", str(tmp_path)) for a in arguments]
    assert run(*LENGTHS, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pose-plugin coverage: ") and message in error and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_matplotlib_is_reported_before_the_simulation(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*LENGTHS, "--output", tmp_path / "c.png") == 2
    shown = capsys.readouterr().err
    assert 'pip install "matplotlib' in shown and "--no-figures" in shown
    assert not list(tmp_path.iterdir())


def test_samplers_that_jump_at_borders(capsys):
    line = "coverage --target-length 4096 --train-length 512 --sampler turns --chunks 3 --every 64 --draws 50"
    assert cli.main([*line.split(), "--compare", "cream,sentences,turns:2"]) == 0
    out = capsys.readouterr().out
    for name in ("turns, 3 chunks", "cream ", "sentences ", "turns, 2 chunks"):
        assert name in out
    assert cli.main([*line.split()[:-4], "--every", "0"]) == 2
    assert "--every: '0'" in capsys.readouterr().err


def test_the_help_names_the_usual_distances_of_borders(capsys):
    with contextlib.suppress(SystemExit):
        run("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "turns: an eighth of the window, sentences: 25" in shown
    for name, spacing in (("turns", 100), ("sentences", 25)):
        assert make_sampler(parse_settings({"target_length": 2048, "sampler": name})).usual_spacing(800) == spacing
