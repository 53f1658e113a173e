"""The quick start runs end to end with two steps, and the page's table equals the committed benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.forked import forked
from tests.pages import benchmark, committed, importing_from

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "example_configs" / "quickstart"


def two_steps(output: Path) -> None:
    with importing_from(QUICKSTART):
        import run

        run.run(output, trials=2, jobs=1, steps=2, runs={"PoSE": {}})


def test_two_steps_of_the_quick_start(tmp_path, forks):
    pytest.importorskip("axolotl", reason="Axolotl is not installed here")
    printed = forked(two_steps, tmp_path / "out").output
    assert {"original", "RoPE", "PoSE"} <= {line.strip("| ").partition(" ")[0] for line in printed.splitlines()}
    listed = {Path(line.strip()).name for line in printed.splitlines() if line.startswith("  ")}
    assert {"results.json", "report.html", "passkey.png", "perplexity.png"} <= listed
    for name in ("results.json", "report.md", "passkey.csv", "passkey.png", "perplexity.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    saved = json.loads((tmp_path / "out" / "pose" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 2048 and saved["rope_parameters"]["factor"] == 16.0
    log = (tmp_path / "out" / "pose" / "train.log").read_text()
    assert "self-test passed" in log


def test_the_page_s_table_is_the_committed_benchmark():
    quickstart, result = benchmark("quickstart"), committed("quickstart")
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    table = quickstart.table(result["models"], result["lengths"])
    assert table in page and quickstart.with_table(page, table) == page


def test_the_page_says_what_each_trained_row_reads():
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    usual = yaml.safe_load((QUICKSTART / "pose.yaml").read_text(encoding="utf-8"))["pose"]
    with importing_from(QUICKSTART):
        import run
    for name, changes in {**run.RUNS, **benchmark("quickstart").CUT_APART}.items():
        (said,) = re.findall(rf"^- \*{name}\*: (.*?)(?=^- |^$)", page, re.M | re.S)
        assert re.findall(r"`content: (\w+)`", said) == [(usual | changes.get("pose", {}))["content"]], name


def test_pose_with_unbroken_windows_finds_nearly_as_many_passkeys():
    """The page says so, and that it differs from "no skip" in positions only."""
    tables = benchmark("paper_tables")
    values, seeds = tables.means(committed("paper_table_content"), tables.TABLES["content"])
    found = {name: row["passkey"][2048] for name, row in values.items()}
    assert seeds == 3 and abs(found["content: window"] - found["content: skip"]) < 0.05
    assert found["content: window, no skip"] < 0.05
    window, no_skip = (tables.TABLES["content"].rows[name] for name in ("content: window", "content: window, no skip"))
    assert window.changes == {"pose": {"content": "window"}} and no_skip == tables.NO_SKIP


# Bounds that the claims next to the table need: model, multiple of the window, least, most.
CLAIMS = [
    ("PoSE", 2, 0.95, 1.0),
    ("PoSE", 4, 0.95, 1.0),
    ("PoSE", 8, 0.9, 1.0),
    ("PoSE", 16, 0.8, 1.0),
    ("original", 8, 0.0, 0.1),
    ("original", 16, 0.0, 0.1),
    *((name, times, 0.0, 0.1) for name in ("RoPE only", "RandPos") for times in (2, 4, 8, 16)),
    *((name, 8, 0.0, 0.3) for name in ("no skip", "cut apart")),
    *((name, 16, 0.0, 0.1) for name in ("no skip", "cut apart")),
]


@pytest.mark.parametrize(("name", "times", "least", "most"), CLAIMS)
def test_the_committed_numbers_support_the_claims(name, times, least, most):
    result = committed("quickstart")
    assert len(result["seeds"]) == 3
    assert least <= result["models"][name]["passkey"][str(128 * times)]["mean"] <= most
