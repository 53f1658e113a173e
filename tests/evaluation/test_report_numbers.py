"""Every number of a report where it belongs: files and tables of two models that have all measures, by hand."""

import json
import math

import pytest

from pose_plugin.evaluation import report as report_of
from pose_plugin.evaluation.measures.gap import Gap, GapResult
from pose_plugin.evaluation.measures.harness import HarnessResult
from pose_plugin.evaluation.measures.longppl import LongPPL, LongPPLResult
from pose_plugin.evaluation.measures.passkey import PasskeyResult, PasskeyTrial
from pose_plugin.evaluation.measures.perplexity import Bucket, PerplexityResult, WindowPerplexity
from pose_plugin.evaluation.results import ModelResult, Report
from pose_plugin.evaluation.retrieval import RetrievalResult, RetrievalTrial


def window(n, loss, buckets=()):
    """Of losses whose perplexity has few digits."""
    return WindowPerplexity(n, n // 4, 3, 96, math.log(loss), buckets)


def retrieval(measure, scores):
    """{(kind, length, depth): score}"""
    trials = tuple(RetrievalTrial(k, n, d, ("1",), "", s) for (k, n, d), s in scores.items())
    kinds = {k for k, _, _ in scores}
    texts = ({k: f"{what} of {k}" for k in kinds} for what in ("rule", "chance", "example"))
    return RetrievalResult(measure, trials, *texts, "in grass")


def everything():
    keys = tuple(PasskeyTrial(n, d, "1", "", right) for n, d, right in
                 [(128, 0.0, True), (128, 1.0, True), (512, 0.0, False), (512, 0.0, True), (512, 1.0, False),
                  (512, 1.0, False), (512, 1.0, False)])  # fmt: skip
    first = ModelResult(
        "base <1>",
        PasskeyResult(keys, (0.0, 1.0), 0, "Find it"),
        PerplexityResult({128: window(128, 4), 512: window(512, 8, (Bucket(0, 64, math.log(2), 63),))}, True, 5, 6),
        notes=["a < b"],
        facts={"path": "there"},
        needle=retrieval("needle", {("single", 128, 0.25): 1.0, ("kv", 128, 0.25): 0.5, ("kv", 512, 0.75): 0.125}),
        topics=retrieval("topics", {("first", 1024, 0.0): 0.75}),
        longppl=LongPPLResult(
            {512: LongPPL(512, math.log(16), 7, math.log(2), 70, (1.0,))}, "judge", 128, 2.0, -2.0, 1
        ),
        gap=GapResult({640: Gap(640, 0, 1.5, 256), 2048: Gap(2048, 1408, 2.5, 257)}, 640, 256, 1),
        short=PerplexityResult({256: window(256, 10)}, True, 1, 0),
        harness=HarnessResult({"ruler_vt 4096": 0.125}, ("ruler_vt",), (4096,), 4100, "0.4.11", None),
    )
    second = ModelResult(
        "long",
        short=PerplexityResult({256: window(256, 10.4)}, True, 1, 0),
        gap=GapResult({2048: Gap(2048, 1408, 2.25, 258)}, 640, 256, 1),
        harness=HarnessResult({"niah_single_1 4096": 1.0}, ("niah_single_1",), (4096,), 4100, "0.4.11", 3),
        notes=["of the second"],
    )
    return Report([first, second], train_length=128, target_length=512)


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("passkey.csv", [["base <1>", 128, 1, 0, 2, 2], ["base <1>", 512, 0.2, math.sqrt(0.2 * 0.8 / 5), 1, 5]]),
        ("passkey_depth.csv", [["base <1>", 128, 0, 1, 1, 1], ["base <1>", 128, 1, 1, 1, 1],
                               ["base <1>", 512, 0, 0.5, 1, 2], ["base <1>", 512, 1, 0, 0, 3]]),
        ("perplexity.csv", [["base <1>", 128, 4, math.log(4), 96, 3, 32],
                            ["base <1>", 512, 8, math.log(8), 96, 3, 128]]),
        ("perplexity_position.csv", [["base <1>", 512, 0, 64, 2, math.log(2), 63]]),
        ("needle.csv", [["base <1>", "single", 128, 0.25, 1], ["base <1>", "kv", 128, 0.25, 0.5],
                        ["base <1>", "kv", 512, 0.75, 0.125]]),
        ("topics.csv", [["base <1>", "first", 1024, 0, 0.75]]),
        ("longppl.csv", [["base <1>", 512, 16, math.log(16), 7, math.log(2), 70]]),
        ("gap.csv", [["base <1>", 640, 0, 1.5, 256], ["base <1>", 2048, 1408, 2.5, 257],
                     ["long", 2048, 1408, 2.25, 258]]),
        ("short.csv", [["base <1>", 256, 10, math.log(10), 96], ["long", 256, 10.4, math.log(10.4), 96]]),
        ("harness.csv", [["base <1>", "ruler_vt 4096", 0.125], ["long", "niah_single_1 4096", 1]]),
    ],
)  # fmt: skip
def test_csv(name, rows):
    files = report_of.csv_files(everything())
    header, *lines = (line.split(",") for line in files[name].splitlines())
    assert len(header) == len(rows[0]) and len(set(header)) == len(header)
    assert [list(map(number, line)) for line in lines] == [
        [cell if isinstance(cell, str) else pytest.approx(cell) for cell in row] for row in rows
    ]


def test_csv_headers():
    heads = {name: text.split("\n")[0] for name, text in report_of.csv_files(everything()).items()}
    assert heads["passkey.csv"] == "model,length,accuracy,standard_error,correct,trials"
    assert heads["passkey_depth.csv"] == "model,length,depth,accuracy,correct,trials"
    assert heads["perplexity.csv"] == "model,length,perplexity,loss,tokens,windows,stride"
    assert heads["perplexity_position.csv"] == "model,length,from,to,perplexity,loss,tokens"
    assert heads["needle.csv"] == heads["topics.csv"] == "model,kind,length,depth,score"
    assert heads["longppl.csv"] == "model,length,longppl,loss,key_tokens,plain_loss,plain_tokens"
    assert heads["gap.csv"] == "model,length,gap,loss,tokens"
    assert heads["short.csv"] == "model,length,perplexity,loss,tokens"
    assert heads["harness.csv"] == "model,task,score" and len(heads) == 10


TABLES = {
    "Passkey accuracy ± standard error": (["model", "128", "512", "k_max"],
                                          [["base <1>", "1.00 ±0.00", "0.20 ±0.18", "512"]]),
    "Sliding-window perplexity": (["model", "128", "512"], [["base <1>", "4.00", "8.00"]]),
    "Needle, single: mean score": (["model", "128"], [["base <1>", "1.00"]]),
    "Needle, kv: mean score": (["model", "128", "512"], [["base <1>", "0.50", "0.12"]]),
    "Topics, first: mean score": (["model", "1024"], [["base <1>", "0.75"]]),
    "LongPPL": (["model", "512"], [["base <1>", "16.000"]]),
    "Gap probe: loss by farthest position": (["model", "640", "2048"],
                                             [["base <1>", "1.500", "2.500"], ["long", "-", "2.250"]]),
    "Short-context guard: perplexity at 256": (["model", "256", "against base <1>", "skill"],
                                               [["base <1>", "10.00", "+0.0 %", "-"],
                                                ["long", "10.40", "+4.0 %", "kept"]]),
    "lm-eval": (["model", "ruler_vt 4096", "niah_single_1 4096"], [["base <1>", "0.125", "-"], ["long", "-", "1.000"]]),
    "Best by measure": (["measure", "best", "base <1>", "long"],
                        [["gap loss at 2048", "long ≈ base <1>", "2.5", "2.25"]]),
}  # fmt: skip


def test_tables():
    assert report_of.tables(everything()) == TABLES


@pytest.mark.parametrize(
    ("perplexities", "shown"),
    [
        ([10, 10.4], ["+4.0 %", "kept"]),
        ([10, 10.6], ["+6.0 %", "worse by more than 5 %"]),
        ([10, 9.0], ["-10.0 %", "kept"]),
        ([10, math.inf], ["-", "lost"]),
        ([math.inf, 10], ["-", "-"]),
    ],
)
def test_the_guard_by_hand(perplexities, shown):
    models = [ModelResult(str(v), short=PerplexityResult({64: window(64, v)}, True, 1, 0)) for v in perplexities]
    ((_, rows),) = report_of.tables(Report(models)).values()
    assert rows[1][2:] == shown
    models[1].tokens = "other"
    ((_, rows),) = report_of.tables(Report(models)).values()
    assert rows[1][3] == ("other tokens" if perplexities[0] < math.inf else "-")


@pytest.mark.parametrize(
    ("value", "shown"), [(8.126, "8.13"), (999.4, "999.40"), (1000.4, "1.0e+03"), (math.inf, "inf"), (math.nan, "nan")]
)
def test_digits_of_a_perplexity(value, shown):
    model = ModelResult("a", perplexity=PerplexityResult({64: window(64, value)}, True, 1, 0))
    ((_, rows),) = report_of.tables(Report([model])).values()
    assert rows == [["a", shown]]


def test_lengths_are_in_order_and_every_model_s():
    def keys(*lengths):
        return PasskeyResult(tuple(PasskeyTrial(n, 0.5, "1", "", True) for n in lengths), None, 0, "")

    def losses(*lengths):
        return PerplexityResult({n: window(n, 2) for n in lengths}, True, 1, 0)

    def gaps(*lengths):
        return GapResult({n: Gap(n, 0, 1.0, 1) for n in lengths}, 64, 25, 1)

    report = Report([ModelResult("a", keys(900), losses(900), gap=gaps(900)),
                     ModelResult("b", keys(1000, 80), losses(1000, 80), gap=gaps(1000, 80))])  # fmt: skip
    for title, (header, rows) in report_of.tables(report).items():
        assert header[1:4] == ["80", "900", "1000"], title
        assert [cell == "-" for cell in rows[0][1:4]] == [True, False, True], title


def test_the_same_is_told_in_every_form(tmp_path):
    report = everything()
    for path in report_of.write(report, tmp_path):
        assert path.parent == tmp_path and path.is_file()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    plain = page.replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")
    shown = {
        "terminal": report_of.text(report),
        "markdown": (tmp_path / "report.md").read_text(encoding="utf-8"),
        "html": plain,
    }
    windows = "Trained window: 128 tokens, target window: 512 tokens."
    said = [
        report_of.best(report),
        *report_of.definitions(report),
        "Note (base <1>): a < b",
        "Note (long): of the second",
    ]
    for form, text in shown.items():
        assert all(sentence in text for sentence in said), form
        assert all(title in text for title in TABLES), form
        assert form == "terminal" or windows in text, form
    # Eight of the first model, one kind of lm-eval run more of the second.
    assert len(report_of.definitions(report)) == 9
    assert "<1>" not in page and "a < b" not in page
    assert "<tr><th>model</th><th>128</th><th>512</th><th>k_max</th></tr>" in page
    data = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert (data["best"], data["train_length"], data["target_length"]) == (report_of.best(report), 128, 512)
    first, second = data["models"]
    assert (first["name"], first["notes"], first["path"], second["notes"]) == (
        "base <1>", ["a < b"], "there", ["of the second"]
    )  # fmt: skip
    for name, found in report.models[0].results().items():
        assert type(found).from_dict(first[name]).to_dict() == found.to_dict(), name
    assert [name for name in first if name in second] == ["name", "notes", "gap", "short", "harness"]


def test_what_is_no_number_is_null_at_any_depth():
    report = everything()
    report.models[0].gap = GapResult({640: Gap(640, 0, math.nan, 1, (math.inf, 1.0))}, 640, 256, 1)
    row = json.loads(report_of.to_json(report))["models"][0]["gap"]["by_length"]["640"]
    assert (row["loss"], row["losses"]) == (None, [None, 1.0])
