"""Every benchmark runs, and the README's tables equal the files in results/."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from pose_plugin import PoSESettings
from pose_plugin.plan.advice import FEW_ROWS
from pose_plugin.positions.coverage import coverage
from tests.pages import BENCHMARKS as FOLDER
from tests.pages import benchmark, committed, recall_benchmark

FIGURES = FOLDER.parent / "docs" / "figures"
# By the name of their results. A script called coverage.py would hide the package of that name.
SCRIPTS = {"coverage": "position_coverage", "step_cost": "step_cost", "interpolation": "interpolation"}


def script(name: str) -> ModuleType:
    """Import a benchmark by the name of its results."""
    return benchmark(SCRIPTS.get(name, name))


def small(script: str, folder: Path, *arguments: str) -> str:
    """Run the short form of a benchmark, which writes into a folder; return what it printed."""
    command = [sys.executable, str(FOLDER / script), "--quick", "--output", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Run a benchmark with --quick, once; return its results, its output and its folder."""
    done = {}

    def run(name: str) -> tuple[dict, str, Path]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            printed = small(f"{SCRIPTS[name]}.py", folder)
            done[name] = json.loads((folder / f"{name}.json").read_text()), printed, folder
        return done[name]

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_writes_json_and_figure_and_prints_its_table(quick, name):
    result, printed, folder = quick(name)
    assert {path.name for path in folder.iterdir()} == {f"{name}.json", f"{name}.png"}
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert script(name).table(result) in printed
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["machine"]["date"]) and result["machine"]["processor"]
    # The committed file has the same keys, so it was not made by an older script.
    assert result.keys() == committed(name).keys()


def test_coverage_of_fixed_halves_is_exact(quick):
    result, _, _ = quick("coverage")
    assert all(0 <= p <= 1 for line in result["chance"].values() for p in line)
    # The halves have 1024 tokens each, so distance 1024 needs a skip: u = 0 … 1023 of 0 … 14336.
    assert result["chance"]["chunks fixed at half"][:2] == [round(1024 / 14337, 4), round(1536 / 14337, 4)]
    assert result["draws"]["pose, 2 chunks"] == 200


def test_closed_form_of_fixed_halves_counts_pairs(monkeypatch):
    coverage = script("coverage")
    monkeypatch.setattr(coverage, "WINDOW", 8)
    monkeypatch.setattr(coverage, "TARGET", 20)
    counts = np.zeros(20)
    for skip in range(13):
        positions = [0, 1, 2, 3, *(skip + p for p in (4, 5, 6, 7))]
        for distance in {b - a for a in positions for b in positions if b > a}:
            counts[distance] += 1
    np.testing.assert_allclose(coverage.fixed_halves(np.arange(1, 20)), counts[1:] / 13)


def test_steps_train_the_rows_they_claim_to(quick):
    result, _, _ = quick("step_cost")
    cases = {case["method"]: case for case in result["cases"]}
    assert cases["pose"]["target"] == cases["full"]["target"] == 256
    assert cases["pose"]["tokens"] == 16 * 128 and cases["full"]["tokens"] == 16 * 256
    assert cases["full"]["farthest_position"] == 255 and 128 <= cases["pose"]["farthest_position"] <= 255
    assert all(case["seconds"] > 0 and case["megabytes"] > 0 for case in cases.values())
    # Twice the tokens need more memory. Times are not compared, because they depend on the machine.
    assert cases["full"]["megabytes"] > cases["pose"]["megabytes"]


def test_committed_step_cost_is_constant_for_pose_and_grows_for_full_length():
    cases = {(c["method"], c["factor"]): c for c in committed("step_cost")["cases"]}
    assert cases.keys() == {(method, factor) for method in ("pose", "full") for factor in (2, 4, 8, 16)}
    for key in ("seconds", "megabytes"):
        pose = [cases["pose", factor][key] for factor in (2, 4, 8, 16)]
        full = [cases["full", factor][key] for factor in (2, 4, 8, 16)]
        assert max(pose) < 1.5 * min(pose) and full == sorted(full) and full[-1] > 5 * full[0]


def test_interpolated_scores_stay_in_range_and_extrapolated_ones_do_not(quick):
    largest = quick("interpolation")[0]["largest_score"]
    assert largest["between"]["largest"] < 1.2 * largest["within"]["largest"]
    assert largest["beyond"]["median"] > 10 * largest["within"]["median"]


@pytest.mark.parametrize("name", [*SCRIPTS, "overhead"])
def test_the_pages_quote_the_results(name):
    page = FOLDER.parent / "docs" / "verified.md" if name == "overhead" else FOLDER / "README.md"
    assert script(name).table(committed(name)) in page.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_figures_are_pictures(name):
    assert (FIGURES / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_quotes_nothing_else():
    """The README has no table but those of the results."""
    text = (FOLDER / "README.md").read_text()
    for name in SCRIPTS:
        text = text.replace(script(name).table(committed(name)), "")
    assert not re.search(r"^\|", text, re.MULTILINE)


def test_coverage_agrees_with_the_published_table():
    """Compare with an independent simulation of 8000 rows, to two decimals."""
    expected = {
        "pose, 2 chunks": [1.00, 0.55, 0.14, 0.15, 0.13, 0.14, 0.07, 0.03, 0.00],
        "pose, 2 chunks, reference": [1.00, 0.55, 0.14, 0.15, 0.14, 0.15, 0.08, 0.03, 0.00],
        "clamped, 2 chunks": [1.00, 0.58, 0.22, 0.12, 0.11, 0.11, 0.17, 0.13, 0.11],
        "chunks fixed at half": [0.08, 0.11, 0.15, 0.14, 0.14, 0.14, 0.07, 0.03, 0.00],
    }
    chance = committed("coverage")["chance"]
    for name, values in expected.items():
        assert np.abs(np.array(chance[name]) - values).max() < 0.025


def test_overhead_measures_all_that_it_lists(tmp_path):
    printed = small("overhead.py", tmp_path)
    result = json.loads((tmp_path / "overhead.json").read_text())
    (seconds,) = result["seconds"].values()
    measured = committed("overhead")["seconds"]["this checkout"].keys()
    # Without Axolotl, its positions are left out.
    assert seconds.keys() == {name for name in measured if "Axolotl" not in name or find_spec("axolotl")}
    assert all(f"| {name} |" in printed for name in [*seconds, *result["ratios"]])
    # The first two are differences between processes, so noise may make them negative.
    assert all(value > 0 for value in list(seconds.values())[2:])


def test_the_committed_overhead_is_small():
    result = committed("overhead")
    seconds, ratios = result["seconds"]["this checkout"], result["ratios"]
    assert seconds["a row of 2,048 tokens, PoSECollator without its padding"] < 150e-6
    assert seconds["the self-test, SmolLM2-135M's shape"] < 2
    assert ratios["a step, with PoSE / plain"] < 1.015
    assert ratios["the start of a run, target 1,048,576 / 8,192"] < 1.1
    assert max(ratio for name, ratio in ratios.items() if "forwards" in name) < 1.2


def test_questions_on_a_cached_text_are_timed(tmp_path):
    printed = small("cached_haystack.py", tmp_path)
    (row,) = json.loads((tmp_path / "cached_haystack.json").read_text())["rows"]
    assert (row["length"], row["questions"]) == (2048, 40) and "| 2048 | 40 |" in printed


def test_the_page_quotes_what_a_cached_text_saves_and_says_what_was_timed():
    result = committed("cached_haystack")
    (row,), page = result["rows"], (FOLDER.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (timed,) = re.findall(r'"--prompts", .*default=(\d+)', (FOLDER / "cached_haystack.py").read_text(encoding="utf-8"))
    length, one, together = f"{row['length']:,}", round(row["one_s"]), round(row["together_s"])
    assert (int(timed), row["questions"]) == (1, 40)  # "one" and "forty"
    assert row["ratio"] == pytest.approx(row["one_s"] * row["questions"] / row["together_s"])
    assert (
        f"With {result['model']} on one CPU core, a text of {length} tokens takes {one} s with one question, and "
        f"{together} s with 40 questions. Forty prompts of one question each would take {round(row['ratio'])} times as "
        "long. Only one of these prompts was timed"
    ) in " ".join(page.split())


def test_the_gpu_checks_run_on_a_cpu(tmp_path, forks):
    """The GPU checks are not stale: their short form passes on a CPU."""
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
    small("gpu/checks.py", tmp_path, "--device", "cpu")
    verdicts = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert len(verdicts) > 3 and set(verdicts.values()) <= {"verified", "not run: axolotl is not installed"}


def test_the_smollm2_run_in_small(tmp_path, forks):
    """It trains with Axolotl, evaluates with the command, and makes every table and the picture."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    printed = small("smollm2/run.py", tmp_path)
    result = json.loads((tmp_path / "smollm2.json").read_text())
    assert list(result["models"]) == ["base", "yarn, RoPE only", "yarn, no skip", "yarn, PoSE"]
    losses = [row["gap"]["512"] for row in result["models"].values()]
    assert len(set(losses)) == 4, "two of the models are the same"
    assert (tmp_path / "smollm2.png").read_bytes().startswith(b"\x89PNG")
    for name in result["models"]:
        assert printed.count(f"| {name} |") == 4


def test_a_table_of_the_paper_in_small(tmp_path, forks):
    """The missing run is trained with Axolotl and judged, the others are the quick start's; a rerun trains nothing."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    arguments = ["--tables", "5", "--seeds", "10", "--work", str(tmp_path / "work")]
    first = small("paper_tables.py", tmp_path, *arguments)
    runs = json.loads((tmp_path / "paper_table_5.json").read_text())["runs"]
    assert len(runs) == 4 and all("10" in seeds for seeds in runs.values())
    page = (tmp_path / "paper_tables.md").read_text()
    assert "| 3 chunks (content: skip) |" in page and "--tables 6`" in page
    assert first.count("✓") == 1 and "✓" not in small("paper_tables.py", tmp_path, *arguments)


def test_the_page_of_the_papers_tables_quotes_the_results():
    tables = benchmark("paper_tables")
    assert (FOLDER.parent / "docs" / "paper_tables.md").read_text() == tables.page(FOLDER / "results")


def test_readme_and_the_smollm2_page_quote_the_results():
    tables = benchmark("smollm2.tables")
    page = (FOLDER.parent / "docs" / "smollm2.md").read_text(encoding="utf-8")
    quoted = tables.table(committed("smollm2"))
    with recall_benchmark() as recall:
        far_back = recall("judge").table(committed("recall")["rows"])
    keep = benchmark("keep")
    for table in (quoted, far_back, keep.table(committed("keep")["rows"])):
        assert table in page
        page = page.replace(table, "")
    assert not re.search(r"^\|", page, re.MULTILINE)
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert tables.summary(committed("smollm2")) in readme
    assert (FIGURES / "smollm2.png").read_bytes().startswith(b"\x89PNG")


ARMS = ("pose_skip", "yarn-4", "no_skip")


def listed(counts: Sequence[object]) -> str:
    *others, last = map(str, counts)
    return " and ".join(filter(None, [", ".join(others), last]))


def facts_found(arm: str, least: int = 8192, most: int = 32768) -> str:
    """Return how many facts of three texts each model of an arm finds from `least` tokens before the end on."""
    counts: dict[str, list[int]] = {}
    with recall_benchmark() as recall:
        for row in committed("recall")["rows"]:
            if row["length"] == 32704 and (row["model"] == arm or row["model"].startswith(f"{arm}-yarn-4-")):
                far = [a.found for a in recall("judge").answers_of(row) if least <= a.distance < most]
                counts.setdefault(row["model"], []).append(sum(far))
    assert counts and all(len(each) == 3 for each in counts.values())
    return listed([sum(counts[model]) for model in sorted(counts)])


def test_the_conclusion_about_linear_interpolation():
    root = FOLDER.parent
    page, readme = (
        " ".join((root / name).read_text(encoding="utf-8").split()) for name in ("docs/smollm2.md", "README.md")
    )
    with recall_benchmark() as recall:
        compare, rows = recall("compare"), committed("recall")["rows"]
        arms = [compare.shares_of(rows, arm, "linear-4", True) for arm in ("pose_skip", "no_skip")]
        difference = compare.bootstrap(*compare.paired(*arms))
        exact = [
            round(90 * np.mean(list(compare.shares_of(rows, arm, "linear-4", True, exact=True).values())))
            for arm in ("no_skip", "pose_skip")
        ]
    assert difference[0] < 0.15
    assert f"where the number ends, *no skip* finds {exact[0]} and *PoSE* {exact[1]}." in page
    more, low, high = (f"{value:.2f}".replace("0.", ".") for value in difference)
    plain, plain_far = (facts_found("no_skip-linear-4-1", least) for least in (8192, 24576))
    pose, pose_far = (facts_found("pose_skip-linear-4-1", least) for least in (8192, 24576))
    for sentence in (
        f"*no skip* finds {plain} and *PoSE* {pose}, so PoSE finds {more} more (95 % interval: {low} to {high})",
        f"*no skip* finds {plain_far} of 30, and *PoSE* {pose_far}.",
    ):
        assert sentence in page
    untrained = facts_found("linear-4")
    assert f"*RoPE only* finds {untrained} of 90, and none within 8,192 tokens." in page
    assert facts_found("linear-4", least=0, most=8192) == "0"
    assert "Of a whole text, it finds no fact, not even a near one," in page and facts_found("base", least=0) == "0"
    assert f"PoSE {pose}, no skip {plain}, RoPE only {untrained}. Stretch 2," in readme


def tiny(table: str, name: str) -> str:
    """Return the share of passkeys that the tiny model finds at the target, as the pages write it."""
    tables = benchmark("paper_tables")
    values, _ = tables.means(tables.kept(tables.RESULTS, table), tables.TABLES[table])
    row = values[name]["passkey"]
    return f"{row[max(row)]:.2f}".removeprefix("0")


def test_the_table_of_which_settings_quotes_the_results():
    page = (FOLDER.parent / "docs" / "how.md").read_text(encoding="utf-8")
    table = page.partition("## Which settings\n")[2].partition("\n## ")[0]
    with recall_benchmark() as recall:
        rows = committed("recall")["rows"]
        pose, untrained, plain = (
            np.mean(list(recall("compare").shares_of(rows, arm, "yarn-4", True).values()))
            for arm in ("pose_skip", "yarn-4", "no_skip")
        )
    plan = (FOLDER / "recall" / "PREREGISTRATION.md").read_text(encoding="utf-8")
    (fixed,) = re.findall(r"PoSE − untrained ≥ (\.\d+)", plan)
    gain, over_plain = (f"{pose - other:.2f}".removeprefix("0") for other in (untrained, plain))
    far_linear, far_ntk = (tiny("2", f"{rope}, PoSE") for rope in ("linear", "NTK"))
    assert f"At 64 times, PoSE finds {far_linear} with `linear` and {far_ntk} with `ntk`." in table
    assert f"PoSE finds {gain} more of the far facts than RoPE only, and {over_plain} more than ordinary" in table
    assert f"the experiment's plan required {fixed} each." in table
    bare, trained = (
        [facts_found(name) for name in names]
        for names in (("yarn-4", "linear-4"), ("pose_skip", "pose_skip-linear-4-1"))
    )
    assert f"`yarn` without training finds {bare[0]} and `linear` {bare[1]}; after training with PoSE, `yarn`" in table
    assert f"`yarn` finds {trained[0]} (three seeds) and `linear` {trained[1]} (one seed)." in table
    larger, square = (tiny("base", f"base × {times}, PoSE") for times in ("1,350", "256"))
    assert f"PoSE finds {larger} with this base (× 1,350) and {square} with the base × 256." in table
    assert {tiny("base", f"base × {times}, no skip") for times in ("1,350", "256")} == {".00"}
    shares = {
        (times, model): [float(tiny(table, f"{rope}, {model}")) for rope in ("linear", "NTK") for table in tables]
        for times, tables in (("2", ["x2"]), ("4 to 16", ["x4", "6"]))
        for model in ("PoSE", "no skip")
    }
    found, most = shares["4 to 16", "PoSE"], max(shares["4 to 16", "no skip"])
    assert (
        f"at 4 to 16 times, PoSE finds {min(found):.2f} to {max(found):.2f} of the passkeys at the target, and "
        f"ordinary positions at most {most:.2f}; at 2 times, they find {min(shares['2', 'no skip']):.2f} or more."
    ).replace(" 0.", " .") in table
    assert len(re.findall(r"(?<!\d)\.\d+", table)) == 10, "a number that no test recomputes"
    two, three = (tiny("5", f"{chunks} chunks (content: skip)") for chunks in (2, 3))
    assert "three chunks had the same perplexity and found fewer passkeys at the target;" in table and three < two
    for name in ("README.md", "docs/index.md"):
        text = " ".join((FOLDER.parent / name).read_text(encoding="utf-8").split())
        assert f"PoSE found {gain} more of the far facts than no training. It found {over_plain} more than rows" in text
        assert f"The experiment required {fixed} each." in text
    names = benchmark("paper_tables").TABLES["settings"].rows
    margin, none, unskipped, clamped = (float(tiny("settings", name)) for name in names)
    assert max(abs(margin - none), abs(margin - unskipped)) < 0.02 and clamped < none - 0.02
    runs = committed("paper_table_settings")["runs"]["clamped, target_margin: 0"].values()
    assert sum(run["passkey"]["2048"] < none - 0.02 for run in runs) == 1, "one seed of three"


def test_the_readme_quotes_the_results_of_smollm2():
    readme = " ".join((FOLDER.parent / "README.md").read_text(encoding="utf-8").split())
    models = committed("smollm2")["models"]

    def far_loss(model: str) -> float:
        return float(np.mean([losses["14336"] for losses in models[model]["loss"].values()]))

    keys = models["yarn, RoPE only"]["passkey"].values()
    found, asked = (sum(key[part] for key in keys) for part in ("found", "trials"))
    assert f"and *RoPE only* finds {found} of {asked}." in readme
    more = [f"{far_loss(f'{rope}, PoSE') - far_loss(f'{rope}, no skip'):.2f}"[1:] for rope in ("linear", "yarn")]
    assert f"PoSE's loss is higher than that of *no skip*, by {listed(more)}, computed before rounding" in readme


def test_the_table_of_when_it_pays_quotes_the_results():
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")

    def keys(model: str) -> int:
        found = committed("smollm2")["models"][model]["passkey"]
        return sum(found[length]["found"] for length in ("12288", "16384"))

    linear, ntk, yarn = (tiny("6", f"{rope}, PoSE") for rope in ("linear", "NTK", "YaRN"))
    far_linear, far_ntk, far_yarn = (tiny("2", f"{rope}, PoSE") for rope in ("linear", "NTK", "YaRN"))
    base = tiny("base", "base × 1,350, PoSE")
    assert tiny("base", "base × 1,350, no skip") == tiny("6", "linear, no skip") == tiny("6", "NTK, no skip") == ".00"
    for sentence in (
        f"base {facts_found('base')}, RoPE only {facts_found('yarn-4')}, no skip {facts_found('no_skip')}, "
        f"PoSE {facts_found('pose_skip')}. Rows 8 times as long without skips, about as many tokens in all: "
        f"{facts_found('full_length')}. PoSE's "
        "gain is smaller than the .15 required beforehand. Tiny model, "
        f"stretch 4: RoPE only {tiny('x4', 'YaRN, RoPE only')}, no skip {tiny('x4', 'YaRN, no skip')}, PoSE "
        f"{tiny('x4', 'YaRN, PoSE')} |",
        f"PoSE {keys('linear, PoSE')}, no skip {keys('linear, no skip')}. Tiny",
        f"PoSE {linear} (`linear`), {ntk} (`ntk`) and {base} (`base`, theta × 1,350), no skip .00 |",
        f"PoSE {yarn}, RoPE only {tiny('6', 'YaRN, RoPE only')}, no skip {tiny('6', 'YaRN, no skip')} |",
        f"PoSE {far_linear} (`linear`), {far_ntk} (`ntk`) and {far_yarn} (`yarn`) |",
        f"{linear}; {tiny('4', 'v = 0 (content: contiguous)')} with `contiguous`, the default |",
    ):
        assert sentence in readme


def test_the_outcome_of_the_recall_experiment_is_what_was_measured():
    """The numbers in the text of docs/smollm2.md; PREREGISTRATION.md fixed .15 more facts beyond 8,192 tokens."""
    page = " ".join((FOLDER.parent / "docs" / "smollm2.md").read_text(encoding="utf-8").split())
    rows = committed("recall")["rows"]
    with recall_benchmark() as recall:
        compare = recall("compare")

        def shares(arm: str, far: bool = True, exact: bool = False) -> dict[tuple[str, str], float]:
            return compare.shares_of(rows, arm, "yarn-4", far, exact=exact)

        def gain(other: str) -> tuple[float, float, float]:
            seeds = {seed for _, seed in shares(other)} - {""} or {"1", "2", "3"}
            pose = {name: share for name, share in shares("pose_skip").items() if name[1] in seeds}
            return compare.bootstrap(*compare.paired(pose, shares(other)))

        within = {arm: f"{np.mean(list(shares(arm, far=False).values())):.2f}"[1:] for arm in ARMS}
        exact = shares("pose_skip", exact=True)
        arms = {row["model"].rpartition("-yarn-4")[0] or "yarn-4" for row in rows if "yarn-4" in row["model"]}
        near: dict[tuple[str, str], list[float]] = {(arm, seed): [] for arm in arms for (_, seed) in shares(arm)}
        for arm in arms:
            for (_, seed), share in shares(arm, far=False).items():
                near[arm, seed].append(share)
        over_untrained, over_no_skip = gain("yarn-4"), gain("no_skip")

    def difference(values: tuple[float, float, float]) -> tuple[str, str]:
        mean, low, high = (f"{value:.2f}".replace("0.", ".") for value in values)
        return mean, f"{low} to {high}"

    assert max(over_untrained[0], over_no_skip[0]) < 0.15
    best, second = sorted(map(np.mean, near.values()))[:-3:-1]
    longer = f"{np.mean(near['full_length', '1']):.2f}".removeprefix("0")
    assert best == np.mean(near["full_length", "1"]) > second
    exact_counts = [round(30 * sum(v for (_, seed), v in exact.items() if seed == each)) for each in "123"]
    (more, interval), (more_than_no_skip, other) = difference(over_untrained), difference(over_no_skip)
    pose, untrained, plain = ARMS
    pose_1, plain_1, window_1 = (facts_found(f"{arm}-yarn-4-1") for arm in (pose, plain, "pose_window"))
    for sentence in (
        f"PoSE finds {facts_found(pose)}, RoPE only {facts_found(untrained)}, and no skip {facts_found(plain)}",
        f"PoSE finds {more} more than RoPE only (95 % interval: {interval})",
        f"It finds {window_1} of 90 facts beyond 8,192 tokens; *PoSE* with this seed finds {pose_1}, and *no skip* "
        f"{plain_1}. From 24,576 tokens on, it finds {facts_found('pose_window-yarn-4-1', 24576)} of 30.",
        f"It finds {facts_found('clamped')} of 90 facts beyond 8,192 tokens, and {facts_found('clamped', 24576)} of 30 "
        f"from 24,576 tokens on; *no skip* with this seed finds {plain_1} and "
        f"{facts_found('no_skip-yarn-4-1', 24576)}.",
        f"It finds {facts_found('full_length')} of 90 facts beyond 8,192 tokens; *PoSE* with this seed finds {pose_1}, "
        f"and *no skip* {plain_1}. From 24,576 tokens on, it finds {facts_found('full_length', 24576)} of 30, and "
        f"*PoSE* {facts_found('pose_skip-yarn-4-1', 24576)}. Within 8,192 tokens, it finds {longer} of the facts, more "
        "than any other model with YaRN.",
        f"{more_than_no_skip} more than no skip ({other})",
        f"PoSE finds {facts_found(pose, 24576)} of 30 facts, no skip {facts_found(plain, 24576)}, and RoPE only"
        f" {facts_found(untrained, 24576)}.",
        f"PoSE finds {facts_found(pose, 8192, 16384)}, no skip {facts_found(plain, 8192, 16384)}, and RoPE only"
        f" {facts_found(untrained, 8192, 16384)}.",
        f"are {within[pose]} for PoSE, {within[plain]} for no skip and {within[untrained]} for RoPE only",
        f"PoSE finds {listed(exact_counts)} of the facts beyond",
        f"It finds {facts_found('two_views')} of 90, PoSE {pose_1} and no skip {plain_1}.",
        f"From 24,576 tokens on, it finds {facts_found('two_views', 24576)} of 30.",
    ):
        assert sentence in page


def test_the_page_says_how_few_rows_the_recall_experiment_had():
    settings = yaml.safe_load((FOLDER / "recall" / "train.yaml").read_text(encoding="utf-8"))["pose"]
    seen = coverage(PoSESettings(**settings), draws=2000)
    least = seen.probability[1 : settings["target_length"] - settings["train_length"]].min()
    runs = committed("recall_training")["rows"]
    steps = [run["seconds_a_step"] for run in runs if run["steps"] == 2000]
    (long,) = (run["seconds_a_step"] for run in runs if run["steps"] == 250)
    page = " ".join((FOLDER.parent / "docs" / "smollm2.md").read_text(encoding="utf-8").split())
    assert FEW_ROWS / least > 7000 and 2000 * seen.probability[1000:32000].max() < 30
    for sentence in (
        f"needs more than 7,000 rows, so that each distance is in {FEW_ROWS} of them. It had 2,000, and each far "
        "distance was in fewer than 30.",
        f"A step of one row took {min(steps):.1f} to {max(steps):.1f} seconds on one core, and {long:.0f} seconds with",
    ):
        assert sentence in page


def test_the_picture_of_the_recall_experiment_shows_what_was_measured(tmp_path):
    with recall_benchmark() as recall:
        figure, rows = recall("figure"), committed("recall")["rows"]
        long = [row for row in rows if row["length"] == 32704]
        shares = figure.shares_by_band(long, "pose_skip-yarn-4-")
        figure.draw(rows, tmp_path / "recall.png")
    farthest = [round(30 * each[-1]) for each in shares]
    assert listed(farthest) == facts_found("pose_skip", 24576)
    for picture in (tmp_path / "recall.png", FIGURES / "recall.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_short_rows_leave_of_a_long_window_is_what_was_measured():
    """keep.py fixed .15 fewer facts beyond 4,096 tokens as a loss."""
    keep, rows = benchmark("keep"), committed("keep")["rows"]
    trained = [f"plain-{rate}-1" for rate in keep.RATES]
    texts = {model: [row for row in rows if row["model"] == model] for model in ("base", *trained)}
    assert {len(read) for read in texts.values()} == {9} and len(texts) * 9 == len(rows)
    base, *plain = (round(5 * sum(map(keep.far, read))) for read in texts.values())
    differences = [keep.difference(rows, [model], ["base"]) for model in trained]
    assert not any(keep.lost("base", model) for model in trained)
    means = [f"{mean:.2f}".replace("0.", ".") for mean, *_ in differences]
    lowest = f"{min(low for _, low, _ in differences):.3f}".replace("0.", ".")
    cells = [[cell.strip() for cell in keep.table(read).split("|")[-3:-1]] for read in texts.values()]
    (before, ruler), (_, ruler_after), *_ = cells
    page = " ".join((FOLDER.parent / "docs" / "smollm2.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"the base finds {base} of 45 facts, and the trained models {listed(plain)}, from the largest rate",
        f"The shares differ from the base's by {listed(means)}. The lowest end of the 95 % intervals is {lowest}.",
        f"changes from {before} to {listed([after for after, _ in cells[1:]])};",
        f"falls from {ruler[1:]} to {ruler_after[1:]}, but two prompts per task",
    ):
        assert sentence in page
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert f"back: {base} before training; {listed(plain)} after it, at three learning rates |" in readme


@pytest.mark.parametrize(("command", "seconds"), committed("times")["seconds"].items())
def test_the_readme_quotes_the_times_of_the_two_commands(command, seconds):
    minutes, rest = divmod(seconds, 60)
    time = f"{minutes} min {rest} s" if rest else f"{minutes} min"
    (line,) = re.findall(rf"^{command} .*$", (FOLDER.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"\d+ min(?: \d+ s)?", line) == [time]
