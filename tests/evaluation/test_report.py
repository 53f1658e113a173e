"""Tables, files and pages are made of rows: figures by hand, and a look at every form."""

import csv
import json
import math
import re
import struct
from datetime import date

import pytest

from pose_plugin import __version__
from pose_plugin.evaluation.figures import draw
from pose_plugin.evaluation.report import csv_files, markdown, tables, write
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row


def keys(found: dict[int, int]) -> Result:
    """Ten prompts per length, at depths 0 and 1/4 in turn."""
    rows = [
        Row(n, float(i < right), depth=i % 2 / 4, distance=n - i % 2 * n // 4)
        for n, right in found.items()
        for i in range(10)
    ]
    return Result("passkey", "Ten keys.", tuple(rows), {"": "There is …"})


def losses(values: dict[int, float], name="perplexity") -> Result:
    rows = []
    for n, value in values.items():
        rows.append(Row(n, value, 100, note=f"stride {n // 2}", details={"loss": math.log(value), "stride": n // 2}))
        rows.append(Row(n, value, 40, view="position", details={"from": 0, "to": n // 2, "loss": 2.0}))
    return Result(name, "Two texts.", tuple(rows))


def model(name, *results, **rest):
    return ModelResult(name, {result.measure: result for result in results}, **rest)


@pytest.fixture
def report():
    base = model("base", keys({128: 10, 256: 1}), losses({128: 17, 256: 2500}), notes=["a < b"], facts={"path": "x"})
    return Report([base, model("PoSE | linear", keys({128: 10, 256: 8}), losses({128: 18, 256: 20.125}))], 128, 256)


def test_markdown_tables_have_columns_of_one_width(report):
    assert markdown(report).split("\n\n")[:4] == [
        "**Passkey accuracy ± standard error**",
        "| model          |        128 |        256 | k_max |\n"
        "| -------------- | ---------: | ---------: | ----: |\n"
        "| base           | 1.00 ±0.00 | 0.10 ±0.09 |   128 |\n"
        "| PoSE \\| linear | 1.00 ±0.00 | 0.80 ±0.13 |   256 |",
        "**Sliding-window perplexity**",
        "| model          |   128 |     256 |\n"
        "| -------------- | ----: | ------: |\n"
        "| base           | 17.00 | 2.5e+03 |\n"
        "| PoSE \\| linear | 18.00 |   20.12 |",
    ]


def test_every_form_shows_every_cell_and_sentence(report, tmp_path):
    write(report, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = page.replace("&lt;", "<").replace("&gt;", ">")
    shown = {"markdown": markdown(report).replace("\\|", "|"), "html": page}
    for form, found in shown.items():
        for title, (header, rows) in tables(report).items():
            assert title in found
            assert all(cell in found for row in [header, *rows] for cell in row), form
        sentences = ["Ten keys.", "Two texts. By length: 128: stride 64; 256: stride 128.", "Note (base): a < b"]
        sentences += ["Best over all measures: ", "Trained window: 128 tokens, target window: 256 tokens."]
        sentences += [f"Written on {date.today().isoformat()} on ", f"with pose-plugin {__version__}, Python "]
        sentences += ["Effective length by passkey (k_max): base 128, PoSE | linear 256 tokens"]
        assert [found.count(sentence) for sentence in sentences] == [1] * 8, form


def test_tables_with_gaps():
    found = tables(Report([model("a", keys({128: 10})), model("b", keys({256: 0}))]))
    assert list(found) == ["Passkey accuracy ± standard error"]
    assert found["Passkey accuracy ± standard error"][1] == [
        ["a", "1.00 ±0.00", "-", "128"],
        ["b", "-", "0.00 ±0.00", "0"],
    ]


def test_a_table_for_each_kind_and_one_for_all_tasks_of_lm_eval():
    needles = Result("needle", "", (Row(128, 1.0, kind="single"), Row(128, 0.5, kind="kv"), Row(256, 0.0, kind="kv")))
    tasks = Result(
        "harness", "", (Row(4096, 0.5, kind="niah"), Row(8192, 0.25, kind="niah"), Row(0, 0.3, kind="qa f1"))
    )
    found = tables(Report([model("a", needles, tasks)]))
    assert found == {
        "Needle, single: mean score": (["model", "128"], [["a", "1.00 ±0.00"]]),
        "Needle, kv: mean score": (["model", "128", "256"], [["a", "0.50 ±0.00", "0.00 ±0.00"]]),
        "lm-eval": (["model", "qa f1", "niah 4096", "niah 8192"], [["a", "0.300", "0.500", "0.250"]]),
    }


@pytest.mark.parametrize(
    ("differences", "cells"),
    [
        ([0.0] * 8, ("+0.0 % (+0.0 to +0.0)", "kept")),
        ([0.06] * 8, ("+6.2 % (+6.2 to +6.2)", "worse by more than 5 %")),
        ([0.01, 0.03] * 50, ("+2.0 % (+1.8 to +2.2)", "kept")),
        # Eight windows of a model that all windows together show to be 1.6 % worse.
        ([0.4, 0.3, 0.2, 0.1, 0.0, -0.1, -0.1, -0.13], ("+8.7 % (-5.6 to +25.3)", "not clear")),
        ([0.06, 0.02] * 4, ("+4.1 % (+2.5 to +5.7)", "not clear")),
        ([-0.7] * 8, ("-50.3 % (-50.3 to -50.3)", "kept")),
        ([0.1] * 4, ("+10.5 %", "not clear: fewer than 5 windows")),
        ([math.inf] * 8, ("-", "lost")),
        ([-math.inf] * 8, ("-", "lost")),
    ],
)
def test_the_guard_gives_a_verdict_only_if_it_is_clear(differences, cells):
    def guard(losses):
        mean = sum(losses) / len(losses)
        score = math.exp(mean) if math.isfinite(mean) else math.inf
        return Result("short", "", (Row(64, score, samples=tuple(losses)),))

    first = [2.0 + 0.1 * i for i in range(len(differences))]
    report = Report(
        [model("a", guard(first)), model("b", guard([a + d for a, d in zip(first, differences, strict=True)]))]
    )
    ((title, (header, rows)),) = tables(report).items()
    assert (title, header) == ("Short-context guard: perplexity at 64", ["model", "64", "against a", "skill"])
    assert rows[0][2:] == ["-", "-"] and tuple(rows[1][2:]) == cells
    if cells == ("-", "lost"):
        ((_, (_, rows)),) = tables(Report(report.models[::-1])).items()
        assert rows[1][2:] == ["-", "-"]


def test_the_guard_does_not_compare_losses_of_other_tokens():
    report = Report([model(name, Result("short", "", (Row(64, 8.0),)), tokens=name) for name in "ab"])
    ((_, rows),) = tables(report).values()
    assert rows[1][2:] == ["-", "other tokens"]


def test_csv(report):
    files = {name: list(csv.DictReader(content.splitlines())) for name, content in csv_files(report).items()}
    assert list(files) == ["passkey.csv", "passkey_depth.csv", "perplexity.csv", "perplexity_position.csv"]
    row = files["passkey.csv"][3]
    assert float(row.pop("standard_error")) == pytest.approx(math.sqrt(0.8 * (1 - 0.8) / 10))
    assert row == {"model": "PoSE | linear", "length": "256", "score": "0.8", "n": "10"}
    assert files["passkey_depth.csv"][2] | {"standard_error": ""} == {
        "model": "base", "length": "256", "depth": "0.0", "score": "0.2", "n": "5", "standard_error": "",
    }  # fmt: skip
    assert files["perplexity.csv"][0] == {
        "model": "base", "length": "128", "score": "17", "n": "100", "loss": str(math.log(17)), "stride": "64",
    }  # fmt: skip
    assert files["perplexity_position.csv"][1] == {
        "model": "base", "length": "256", "score": "2500", "n": "40", "from": "0", "loss": "2.0", "to": "128",
    }  # fmt: skip


def test_files(report, tmp_path):
    folder = tmp_path / "new" / "folder"
    write(report, folder)
    pictures = draw(report, folder)
    written = [*write(report, folder, pictures), *(picture.png for picture in pictures)]
    names = ["results.json", "report.md", *csv_files(report), "report.html"]
    assert [path.name for path in written] == [*names, "passkey.png", "passkey_depth.png", "perplexity.png"]
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (data["train_length"], data["target_length"]) == (128, 256)
    assert data["models"][1]["passkey"]["scores"] == {"passkey/128": 1.0, "passkey/256": 0.8}
    assert data["models"][0]["path"] == "x"
    assert Result.from_dict(data["models"][0]["perplexity"]) == report.models[0].results["perplexity"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 3
    for picture in pictures:
        assert f"<figcaption>{picture.caption}</figcaption>" in page
        head = picture.png.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:24])
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and width > 500 and height > 200


def test_files_that_are_not_in_the_list_stay(report, tmp_path):
    folder, outside = tmp_path / "report", tmp_path / "mine.csv"
    write(report, folder)
    for file in (folder / "notes.md", outside):
        file.write_text("mine")
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (folder / "results.json").write_text(json.dumps({**data, "files": ["../mine.csv", *data["files"]]}))
    write(Report(report.models[:0]), folder)
    assert outside.exists() and {file.name for file in folder.iterdir()} == {
        "notes.md", "report.md", "report.html", "results.json",
    }  # fmt: skip


def test_what_is_not_finite_stays_readable(tmp_path):
    rows = (Row(128, math.inf, details={"loss": 900.0}), Row(256, math.nan))
    report = Report([model("a", Result("perplexity", "", rows))])
    assert re.search(r"a +\| +inf \| +nan", markdown(report))
    write(report, tmp_path)
    kept = json.loads((tmp_path / "results.json").read_text())["models"][0]["perplexity"]["rows"]
    assert [row["score"] for row in kept] == [None, None] and kept[0]["details"] == {"loss": 900.0}


def test_the_same_report_draws_the_same_bytes(report, tmp_path):
    first = [picture.svg.read_bytes() for picture in draw(report, tmp_path)]
    assert [picture.svg.read_bytes() for picture in draw(report, tmp_path)] == first


ROPE = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "rope", [ROPE, {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}], ids=["one", "by layer"]
)
def test_the_page_names_each_model_and_each_note_once(report, tmp_path, rope):
    report.models[1].facts = {"path": "org/name", "max_position_embeddings": 2048, "rope_parameters": rope}
    for each in report.models:
        each.notes[:] = ["`length` is 8"]
    write(report, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>org/name</td><td>2048</td><td>yarn × 4</td>" in page
    assert page.count("Note (base, PoSE | linear): <code>length</code> is 8") == 1
