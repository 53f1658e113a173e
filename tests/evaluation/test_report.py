import csv
import json
import math
import struct
import sys

import pytest

from pose_plugin.evaluation import report as report_of
from pose_plugin.evaluation.figures import draw
from pose_plugin.evaluation.measures.passkey import PasskeyResult, PasskeyTrial
from pose_plugin.evaluation.measures.perplexity import Bucket, PerplexityResult, WindowPerplexity
from pose_plugin.evaluation.report import markdown_table, plain_table
from pose_plugin.evaluation.results import ModelResult, Report
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.plots import tokens


def passkey_result(correct: dict[int, int]):
    """Ten trials a length, at depths 0 and 1 in turn."""
    trials = [
        PasskeyTrial(n, float(i % 2), "12345", "12345" if i < right else "?", i < right)
        for n, right in correct.items()
        for i in range(10)
    ]
    return PasskeyResult(tuple(trials), (0.0, 1.0), 3, "There is …")


def perplexity_result(values: dict[int, float]):
    rows = {
        n: WindowPerplexity(n, n // 2, 3, 100, math.log(v), (Bucket(0, n // 2, 2.0, 40), Bucket(n // 2, n, 1.0, 60)))
        for n, v in values.items()
    }
    return PerplexityResult(rows, False, 2, 1)


@pytest.fixture
def report():
    return Report(
        [
            ModelResult("base", passkey_result({128: 10, 256: 1}), perplexity_result({128: 17, 256: 2500}),
                        notes=["256 is beyond max_position_embeddings=128"], facts={"path": "base"}),
            ModelResult("PoSE | linear", passkey_result({128: 10, 256: 8}),
                        perplexity_result({128: 18, 256: 20.125})),
        ],
        train_length=128,
        target_length=256,
    )  # fmt: skip


def test_terminal_text(report):
    assert report_of.text(report).split("\n\n")[:2] == [
        "Passkey accuracy ± standard error\n"
        "model                 128         256  k_max\n"
        "─────────────  ──────────  ──────────  ─────\n"
        "base           1.00 ±0.00  0.10 ±0.09    128\n"
        "PoSE | linear  1.00 ±0.00  0.80 ±0.13    256",
        "Sliding-window perplexity\n"
        "model            128      256\n"
        "─────────────  ─────  ───────\n"
        "base           17.00  2.5e+03\n"
        "PoSE | linear  18.00    20.12",
    ]
    assert report_of.text(report).count("Passkey retrieval: 10 prompts") == 1
    assert report_of.text(report).endswith("Note (base): 256 is beyond max_position_embeddings=128")


def test_markdown(report):
    text = report_of.markdown(report)
    assert "| model | 128 | 256 | k_max |\n| --- | ---: | ---: | ---: |\n| base | 1.00 ±0.00 |" in text
    assert "| PoSE \\| linear |" in text
    assert "Trained window: 128 tokens, target window: 256 tokens." in text


def test_tables_with_gaps():
    report = Report([ModelResult("a", passkey_result({128: 10})), ModelResult("b", passkey_result({256: 0}))])
    assert list(report_of.tables(report)) == ["Passkey accuracy ± standard error"]
    _, rows = report_of.tables(report)["Passkey accuracy ± standard error"]
    assert rows == [["a", "1.00 ±0.00", "-", "128"], ["b", "-", "0.00 ±0.00", "0"]]


def test_tables_by_hand():
    assert plain_table(["m", "1"], [["abc", "22"]]) == "m     1\n───  ──\nabc  22"
    assert markdown_table(["m", "1"], [["a", "2"]]) == "| m | 1 |\n| --- | ---: |\n| a | 2 |"


def test_files(report, tmp_path):
    folder = tmp_path / "new" / "folder"
    report_of.write(report, folder)
    pictures = draw(report, folder)
    written = [*report_of.write(report, folder, pictures), *pictures]
    names = ["results.json", "report.md", "passkey.csv", "passkey_depth.csv", "perplexity.csv"]
    names += ["perplexity_position.csv", "report.html", "passkey.png", "passkey_depth.png", "perplexity.png"]
    assert [path.name for path in written] == names
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (data["train_length"], data["target_length"]) == (128, 256)
    assert data["models"][1]["passkey"]["by_length"]["256"]["accuracy"] == 0.8
    assert data["models"][0]["path"] == "base"
    assert data["models"][0]["perplexity"]["by_length"]["256"]["perplexity"] == pytest.approx(2500)
    rows = list(csv.DictReader((folder / "passkey.csv").open(encoding="utf-8")))
    assert rows[3] == {"model": "PoSE | linear", "length": "256", "accuracy": "0.8", "trials": "10",
                       "correct": "8", "standard_error": str(math.sqrt(0.8 * (1 - 0.8) / 10))}  # fmt: skip
    rows = list(csv.DictReader((folder / "passkey_depth.csv").open(encoding="utf-8")))
    assert rows[2] == {"model": "base", "length": "256", "depth": "0.0", "accuracy": "0.2", "correct": "1",
                       "trials": "5"}  # fmt: skip
    rows = list(csv.DictReader((folder / "perplexity_position.csv").open(encoding="utf-8")))
    assert (rows[1]["from"], rows[1]["to"], rows[1]["loss"], rows[1]["tokens"]) == ("64", "128", "1.0", "60")
    for name in names[-3:]:
        head = (folder / name).read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:24])
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and width > 500 and height > 200


def test_only_what_was_measured_is_written(tmp_path):
    report = Report([ModelResult("a", perplexity=perplexity_result({128: 5}))])
    written = [*report_of.write(report, tmp_path), *draw(report, tmp_path)]
    assert {p.name for p in written} == {
        "results.json", "report.md", "perplexity.csv", "perplexity_position.csv", "perplexity.png", "report.html"
    }  # fmt: skip


def test_what_is_not_finite_stays_readable(tmp_path):
    blown = PerplexityResult({128: WindowPerplexity(128, 64, 1, 9, 900.0, ()),
                              256: WindowPerplexity(256, 64, 1, 9, math.nan, ())}, False, 1, 0)  # fmt: skip
    report = Report([ModelResult("a", perplexity=blown)])
    assert "inf" in report_of.text(report) and "nan" in report_of.text(report)
    report_of.write(report, tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["models"][0]["perplexity"]["by_length"]
    assert rows["128"]["perplexity"] is None and rows["128"]["loss"] == 900


def test_figures_without_matplotlib_name_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PoSEError, match=r'pip install "pose-plugin\[plot\]"'):
        draw(report, tmp_path)
    assert report_of.write(report, tmp_path)


def test_importing_the_report_does_not_import_matplotlib():
    import subprocess

    code = "import sys; from pose_plugin.evaluation import report, figures\n"
    code += "print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("length", "name"), [(128, "128"), (1024, "1k"), (32768, "32k"), (131072, "128k"), (5000, "5000")]
)
def test_token_counts_for_axes(length, name):
    assert tokens(length) == name
