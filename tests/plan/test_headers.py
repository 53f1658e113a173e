"""What the headers of example_configs say of hardware is what `pose-plugin plan` reckons of the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("peft")

from pose_plugin.plan.config_reader import from_yaml
from pose_plugin.plan.memory import Run, architecture, memory
from pose_plugin.plan.plan import Plan, as_dict, make_plan
from tests.integration.example_runs import BASES, FOLDER, ROOT, examples, read

GPUS = re.compile(r"(one GPU|a GPU|(\d+) GPUs) of (\d+) GB")
# No file of ours has what these warn of.
FAULTS = ("no float32 copy", "knows no such key", "does not name the plugin", "stop the training", "nothing is trained")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """From where the files name one another."""
    monkeypatch.chdir(ROOT)


def header(path: Path) -> str:
    """The comment, or the docstring, in one line."""
    text = path.read_text()
    if path.suffix == ".py":
        return " ".join(text.split('"""')[1].split())
    lines = text.splitlines()
    end = next(at for at, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(" ".join(line.lstrip("#") for line in lines[:end]).split())


def plan_of(name: str, tmp_path: Path, gpus: int) -> Plan:
    base = read(name)["base_model"]
    place = ROOT / base
    if base in BASES:
        place = tmp_path
        (place / "config.json").write_text(json.dumps(BASES[base].config))
    return make_plan(from_yaml(FOLDER / name, str(place), gpus=gpus, steps=1000), draws=20)


@pytest.mark.parametrize("name", examples())
def test_figures(name, tmp_path):
    said = header(FOLDER / name)
    found = GPUS.search(said)
    gpus = int(found[2] or 1) if found else 1
    plan = plan_of(name, tmp_path, gpus)
    used = plan.memory
    assert json.loads(json.dumps(as_dict(plan)))["memory_bytes"]["total"] == used.total
    assert not [each for each in plan.warnings if any(fault in each for fault in FAULTS)]
    if name.startswith(("quickstart/", "beacon/quickstart")):
        assert not found and "GiB" not in said, "for a CPU"
        return
    assert found, "a header says what hardware the run wants"
    (reckoned,) = re.findall(r"Reckoned: about (\d+) GiB", said)
    assert int(reckoned) == round(used.total / 2**30)
    # CUDA itself takes about 1 GiB, and the allocator leaves some unused.
    assert used.total / 2**30 + 1.5 < int(found[3])
    states = (used.weights + used.gradients + used.optimizer) * gpus / 1e9
    for figure in re.findall(r"states of (\d+) GB", said):
        assert int(figure) == round(states)
    for figure in re.findall(r"GiB \(`pose-plugin plan`\), of which (\d+) are the trained embeddings", said):
        # Weight, gradient and two moments in float32.
        assert int(figure) == round(plan.model.embeddings * 16 / 2**30)
    for rows, words, figure in re.findall(r"([\d,]+) rows of ([\d,]+) logits take (\d+) GB in fp32", said):
        assert int(figure) == round(int(rows.replace(",", "")) * int(words.replace(",", "")) * 4 / 1e9)


def test_figures_of_scripts(tmp_path):
    """A script has no YAML: the same run is reckoned in another way."""
    said = header(FOLDER / "llama3-80k" / "trl_qlora.py")
    (reckoned, of, embeddings) = re.findall(
        r"about (\d+) GiB \(`pose-plugin plan` of (\S+), the same run\), of which (\d+) are", said
    )[0]
    plan = plan_of(f"llama3-80k/{of}", tmp_path, 1)
    assert (int(reckoned), int(embeddings)) == (
        round(plan.memory.total / 2**30),
        round(plan.model.embeddings * 16 / 2**30),
    )
    said = header(FOLDER / "trl" / "sft.py")
    # Lightning-AI/litgpt, litgpt/config.py: Qwen3-0.6B.
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    model = architecture({"model_type": "qwen3", "tie_word_embeddings": True, **sizes})
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    run = Run("lora", 16, linear, ["norm"], trained_bytes=4, checkpointing=True, fused_loss=True, window=4096)
    assert re.findall(r"of (\d+) GB\. Reckoned: about (\d+) GiB", said) == [
        ("8", str(round(memory(model, run).total / 2**30)))
    ]


def test_the_page_names_the_hardware_of_the_headers():
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[([\w./-]+\.(?:yaml|py))\].*\| ([^|]+) \|$", page, re.M)
    checked = 0
    for name, hardware in rows:
        path = next((p for p in (FOLDER / name, FOLDER / "llama3-80k" / name) if p.is_file()), None)
        assert path is not None, name
        sizes = set(re.findall(r"(?:(\d+) × )?(\d+) GB", hardware))
        if path.suffix == ".yaml" and sizes:
            found = GPUS.search(header(path))
            assert found is not None and sizes == {(found[2] or "", found[3])}, name
            checked += 1
    assert checked >= 10
    llama2 = {
        found.groups()[1:] for path in FOLDER.glob("llama2/*-linear.yaml") if (found := GPUS.search(header(path)))
    }
    assert llama2 == {("8", "40")} and "4,096 tokens, 8 × 40 GB" in page
