"""What the pictures show, read from their axes: nothing is rendered."""

import math

import pytest

from pose_plugin.evaluation import figures
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row
from pose_plugin.utils.plots import tokens

pytest.importorskip("matplotlib")


def keys(found):
    """{(length, depth): found of four}"""
    rows = [Row(n, float(i < right), depth=d) for (n, d), right in found.items() for i in range(4)]
    return Result("passkey", "", tuple(rows))


def scores(measure, found):
    """{(kind, length, depth): score}"""
    return Result(measure, "", tuple(Row(n, score, kind=kind, depth=d) for (kind, n, d), score in found.items()))


def facts(kind, found):
    """{largest distance to the end: found of four}"""
    rows = [Row(n, float(i < right), kind=kind, distance=n) for n, right in found.items() for i in range(4)]
    return Result("haystack", "", tuple(rows))


def losses(measure, found):
    return Result(measure, "", tuple(Row(n, value) for n, value in found.items()))


def model(name, *results):
    return ModelResult(name, {result.measure: result for result in results})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """File name to figure."""
    from matplotlib.figure import Figure

    models = [
        model("without", losses("gap", {2048: 1.0})),
        model(
            "base",
            keys({(1024, 0.0): 4, (1024, 1.0): 4, (2048, 0.0): 1, (2048, 1.0): 0}),
            losses("perplexity", {1024: 8.0, 2048: 4000.0}),
            scores("needle", {("single", 1024, 0.0): 1.0, ("single", 2048, 0.5): 0.25, ("kv", 2048, 0.5): 0.5}),
            losses("longppl", {2048: 3.0}),
            losses("short", {512: 9.0}),
        ),
        model(
            "long",
            keys({(4096, 0.0): 3, (4096, 1.0): 4}),
            losses("perplexity", {1024: 9.0, 4096: math.inf}),
            scores("needle", {("single", 4096, 1.0): 0.75}),
            scores("topics", {("first", 2048, None): 0.5, ("first", 4096, None): 0.25}),
            losses("gap", {640: 2.0, 4096: 3.0}),
            facts("8192", {512: 4, 1024: 3, 2048: 2, 4096: 1, 8192: 0}),
        ),
    ]
    kept = {}

    def savefig(figure, path, **more):
        kept[path.name] = figure
        path.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        written = figures.draw(Report(models, 1024, 4096), tmp_path_factory.mktemp("drawn"))
    assert [file.name for each in written for file in (each.png, each.svg)] == list(kept)
    return {name: figure for name, figure in kept.items() if name.endswith(".png")} | {
        each.png.stem: each.caption for each in written
    }


def lines(axes):
    """Name to ([x, …], [y, …]) of what the legend names."""
    handles, names = axes.get_legend_handles_labels()
    return {
        name: tuple(list(map(float, (h.lines[0] if hasattr(h, "lines") else h).get_data()[i])) for i in (0, 1))
        for h, name in zip(handles, names, strict=True)
    }


def test_which(drawn):
    names = "gap passkey passkey_depth perplexity needle_single needle_kv longppl topics haystack"
    assert list(drawn) == [f"{name}.png" for name in names.split()] + names.split()


@pytest.mark.parametrize(
    ("name", "expected", "y", "x"),
    [
        ("perplexity", {"base": ([1024, 2048], [8, 4000]), "long": ([1024, 4096], [9, math.nan])},
         "perplexity (log scale)", "window size (tokens)"),
        ("topics", {"long": ([2048, 4096], [50, 25])}, "first topics found", "prompt length (tokens)"),
        ("longppl", {"base": ([2048], [3])}, "LongPPL", "window size (tokens)"),
        ("gap", {"without": ([2048], [1]), "long": ([640, 4096], [2, 3])}, "loss of the moved tokens (nats)",
         "farthest position"),
        ("haystack", {"long": ([512, 1024, 2048, 4096, 8192], [100, 75, 50, 25, 0])}, "facts found",
         "distance to the end (tokens)"),
    ],
)  # fmt: skip
def test_lines(drawn, name, expected, y, x):
    (axes,) = drawn[f"{name}.png"].axes
    found = lines(axes)
    assert list(found) == list(expected)
    for who, series in expected.items():
        for got, wanted in zip(found[who], series, strict=True):
            assert got == pytest.approx(wanted, nan_ok=True), who
    assert (axes.get_ylabel(), axes.get_xlabel(), axes.get_xscale()) == (y, x, "log")
    assert axes.get_yscale() == ("log" if name == "perplexity" else "linear")
    lengths = sorted({n for xs, _ in expected.values() for n in xs})
    assert [label.get_text() for label in axes.get_xticklabels()] == [tokens(n) for n in lengths]
    assert all(axes.get_xlim()[0] < n < axes.get_xlim()[1] for n in lengths)
    assert all(axes.get_ylim()[0] < v < axes.get_ylim()[1] for _, ys in expected.values() for v in ys if v == v)


def test_keys_by_length_with_their_intervals(drawn):
    (axes,) = drawn["passkey.png"].axes
    found = lines(axes)
    assert {who: ys for who, (_, ys) in found.items()} == {"base": [100, 12.5], "long": [87.5]}
    # Moved apart by a hair, no more.
    assert found["base"][0] == pytest.approx([1024, 2048], rel=0.03)
    assert found["base"][0][0] < 1024 and found["long"][0][0] > 4096
    for container, name in zip(*axes.get_legend_handles_labels(), strict=True):
        (bars,) = container.lines[2]
        spans = [tuple(segment[:, 1]) for segment in bars.get_segments()]
        by_hand = {"base": [(8, 8), (1, 8)], "long": [(7, 8)]}[name]
        for (low, high), (right, n) in zip(spans, by_hand, strict=True):
            z, p = 1.959964, right / n
            root = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
            wilson = [100 * max(0, (p + z * z / (2 * n) - root)) / (1 + z * z / n),
                      100 * min(1, (p + z * z / (2 * n) + root) / (1 + z * z / n))]  # fmt: skip
            assert [low, high] == pytest.approx(wilson, abs=1e-6)


def test_the_windows_are_marked_at_their_distance_in_a_haystack(drawn):
    (axes,) = drawn["haystack.png"].axes
    named = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert named == {"trained 1k": 1024, "target 4k": 4096}
    at = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2 == len(set(line.get_ydata()))]
    assert at == [1024, 4096]
    assert [line.is_dashed() for line in axes.lines if line.get_xdata()[0] in at] == [False, True]


def cells(axes):
    """{(column's label, row's label): the number in it}, by the colours; the numbers written are the same, rounded."""
    (image,) = axes.images
    columns = [label.get_text() for label in axes.get_xticklabels()]
    # Panels beside the first one show no labels of their own.
    rows = [axes.yaxis.get_major_formatter()(at, i) for i, at in enumerate(axes.get_yticks())]
    values = image.get_array()
    assert values.shape == (len(rows), len(columns)) and image.get_clim() == (0, 100)
    known = {
        (i, j): float(values[i, j])
        for i in range(len(rows))
        for j in range(len(columns))
        if values[i, j] == values[i, j]
    }
    written = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts
               if t.get_text().isdigit()}  # fmt: skip
    assert written == {at: f"{value:.0f}" for at, value in known.items() if value == value}
    return {(columns[j], rows[i]): value for (i, j), value in known.items()}


@pytest.mark.parametrize(
    ("name", "expected", "label"),
    [
        ("passkey_depth", {
            "base": {("1k", "0 %"): 100, ("1k", "100 %"): 100, ("2k", "0 %"): 25, ("2k", "100 %"): 0},
            "long": {("4k", "0 %"): 75, ("4k", "100 %"): 100}}, "passkeys found (%)"),
        ("needle_single", {"base": {("1k", "0 %"): 100, ("2k", "50 %"): 25}, "long": {("4k", "100 %"): 75}},
         "needles found (%)"),
        ("needle_kv", {"base": {("2k", "50 %"): 50}}, "needles found (%)"),
    ],
)  # fmt: skip
def test_heat_maps(drawn, name, expected, label):
    *panels, bar = drawn[f"{name}.png"].axes
    assert [panel.get_title() for panel in panels] == list(expected) and bar.get_ylabel() == label
    for panel in panels:
        assert {cell: v for cell, v in cells(panel).items() if v == v} == expected[panel.get_title()]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("passkey", ["Passkeys found by prompt length.", "mean of 8 answers", "95 %", "trained window, 1024",
                     "target window, 4096"]),
        ("passkey_depth", ["prompt length and depth of the key", "mean of 4 answers", "trained window, 1024"]),
        ("perplexity", ["Perplexity by window size. Lower is better.", "target window, 4096"]),
        ("needle_kv", ["Needles found (kv)", "A cell is one answer"]),
        ("gap", ["Loss of the moved tokens by farthest position. Lower is better."]),
        ("haystack", ["Facts found (8192) by distance to the end.", "mean of 4 answers", "trained window, 1024",
                      "target window, 4096"]),
    ],
)  # fmt: skip
def test_captions_name_axes_counts_and_marks(drawn, name, shown):
    assert all(part in drawn[name] for part in shown), drawn[name]
    # Only what the axis reaches is drawn.
    assert ("trained window" in drawn["longppl"], "target window" in drawn["longppl"]) == (False, False)


def test_any_name_of_a_model_is_drawn_and_in_the_legend(tmp_path):
    names = ["_merged", "a$x_{$b"]
    cells = {(length, depth): 2 for length in (1024, 2048) for depth in (0.0, 1.0)}
    pictures = figures.draw(Report([model(name, keys(cells), losses("gap", {640: 2.0})) for name in names]), tmp_path)
    for picture in pictures:
        drawn = picture.svg.read_text(encoding="utf-8")
        assert "<!-- \u200b_merged -->" in drawn and "<!-- a$x_{$b -->" in drawn, picture.png.name
