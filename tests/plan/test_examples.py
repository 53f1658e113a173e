"""`pose-plugin plan` warns of nothing in the YAMLs of example_configs, except of what their first lines say."""

from __future__ import annotations

import json
import re

import pytest

from pose_plugin.plan.config_reader import from_yaml
from pose_plugin.plan.plan import make_plan
from tests.integration.example_runs import BASES, FOLDER, ROOT, examples, read

# The published recipe trains embeddings, but no norms.
WARNED = {f"llama3-80k/{name}.yaml": "leaves norms frozen" for name in ("qlora-full-length", "qlora-pose")}
WARNED["llama3-80k/lora-pose-zero2.yaml"] = "leaves norms frozen"


@pytest.mark.parametrize("name", examples())
def test_warnings(name, tmp_path, monkeypatch):
    """With as many rows as in the PoSE paper, on the GPUs that the file names."""
    monkeypatch.chdir(ROOT)
    text = (FOLDER / name).read_text(encoding="utf-8")
    head, base = " ".join(text.partition("base_model:")[0].replace("#", " ").split()), read(name)["base_model"]
    gpus, gib = (re.findall(r"Hardware: (one|\d+) GPUs? of (\d+) GB", head) or [("one", "24")])[0]
    if not (ROOT / base).exists():
        # Llama 2's chat model has the sizes of the other.
        (tmp_path / "config.json").write_text(json.dumps(BASES[base.replace("-chat", "")].config))
        base = str(tmp_path)
    inputs = from_yaml(FOLDER / name, base, gpus=int(gpus.replace("one", "1")), rows=64_000)
    warnings = make_plan(inputs, float(gib)).warnings
    expected = WARNED.get(name)
    assert [expected in each for each in warnings] == [True] if expected else warnings == []
    assert ("`pose-plugin plan` and the start of the run warn about that" in head) is bool(expected)
