"""benchmarks/smollm2 reads what `pose-plugin evaluate` writes; the larger version, too."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from pose_plugin.evaluation.report import write
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("smollm2.run")
    for name in [name for name in sys.modules if name == "common" or name.startswith("smollm2")]:
        del sys.modules[name]


def test_the_larger_version_reads_its_reports(script, tmp_path):
    names = ["base", *(f"base + {r} (RoPE only)" for r in ("linear", "yarn")),
             *(f"{r}, {how}" for r in ("linear", "yarn") for how in ("no skip", "PoSE"))]  # fmt: skip
    places = {name: tmp_path / name for name in ("gap", "loss-a", "loss-b", "passkey-8,16", "passkey-32", "topics")}

    def keys(*lengths):
        return Result("passkey", "", tuple(Row(n, float(n < 16)) for n in lengths for _ in range(3)))

    for what, place in places.items():
        loss = {"loss-a": 1.0, "loss-b": 3.0}.get(what, 0.0)
        parts = [(0, loss), (28672, loss + 1)]
        buckets = [Row(32768, 9.0, view="position", details={"from": start, "loss": loss}) for start, loss in parts]
        result = {
            "gap": Result("gap", "", (Row(8192, 1.5),)),
            "loss": Result("perplexity", "", (Row(32768, 2.7), *buckets)),
            "passkey": keys(8, 16) if "8" in what else keys(32),
            "topics": Result("topics", "", tuple(Row(16384, score, kind="first") for score in (1.0, 0.0, 0.0, 0.0))),
        }[what.partition("-")[0]]
        write(Report([ModelResult(name, {result.measure: result}) for name in names]), place)
    (tmp_path / "pose-linear").mkdir()
    (tmp_path / "pose-linear" / "pose.json").write_text("{}")
    scale = script.replace(script.LARGER, texts=("a", "b"))
    result = json.loads(json.dumps(script.collect(tmp_path, scale, places)))
    assert list(result["models"]) == ["base", *(f"{r}, {how}" for r in ("linear", "yarn")
                                                for how in ("RoPE only", "no skip", "PoSE"))]  # fmt: skip
    for row in result["models"].values():
        assert (row["gap"], row["topics"]) == ({"8192": 1.5}, {"16384": 0.25})
        assert row["loss"] == {"a": {"0": 1.0, "28672": 2.0}, "b": {"0": 3.0, "28672": 4.0}}
        assert {n: one["found"] for n, one in row["passkey"].items()} == {"8": 3, "16": 0, "32": 0}
    assert set(result["definitions"]) == {"gap", "perplexity", "passkey", "topics"}
    shown = script.tables.table({"machine": {"date": "today", "processor": "x"}, **result})
    assert "| yarn, PoSE | 2.00 | 3.00 |" in shown and "| yarn, PoSE | 0.25 |" in shown
    assert "| yarn, PoSE | 3/3 | 0/3 | 0/3 |" in shown


def test_the_larger_version_asks_for_what_there_is(script, tmp_path, monkeypatch):
    """Each command that it would call is one that `pose-plugin evaluate` takes."""
    from pose_plugin.cli import evaluate as command
    from pose_plugin.cli import main as cli

    taken = []
    monkeypatch.setattr(command, "run", lambda args: taken.append((args.tasks, args.lengths)) or 0)
    monkeypatch.setattr(script, "call", lambda line, log, shown: cli.main(line[3:]))
    script.judge(tmp_path, tmp_path, script.LARGER)
    assert [tasks for tasks, _ in taken] == ["gap", *["perplexity"] * 3, "passkey", "passkey", "topics"]
    assert taken[-1][1] == "16384,65536"
