"""Every file of example_configs: held against the real frameworks' schemas, and run on CPU as a shrunk copy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from tests.forked import forked
from tests.integration.axolotl_runs import import_axolotl
from tests.integration.example_runs import (
    BASES,
    REPLACED,
    ROOT,
    ExampleRun,
    differences,
    read,
    run_example,
    shrunk,
    validated,
    write_config,
    write_data,
    write_tiny,
)

pytestmark = pytest.mark.axolotl

# What each file promises: the rope that is written, and the target.
PROMISED: dict[str, tuple[dict[str, Any], int]] = {
    "llama3-80k/qlora-full-length.yaml": ({"rope_type": "default", "rope_theta": 2.0e8}, 81920),
    "llama3-80k/qlora-pose.yaml": ({"rope_type": "default", "rope_theta": 2.0e8}, 81920),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    import_axolotl()
    return tmp_path_factory.mktemp("examples")


def _at_home(case: Any, *args: Any) -> Any:
    """In the repository's root, from which the files are run."""
    os.chdir(ROOT)
    return case(*args)


@pytest.mark.parametrize("name", PROMISED)
def test_fits_the_schema(home, name):
    """As it is, for eight GPUs: no key that nothing reads, and every value as it was written."""
    values = read(name)
    base = write_config(home / "config" / values["base_model"], values["base_model"])
    unknown, cfg = forked(_at_home, validated, values, base).value
    assert not unknown
    changed = {key: (value, cfg.get(key)) for key, value in values.items() if cfg.get(key) != value}
    # Defaults are filled in, and the base model's path is the test's.
    assert set(changed) <= {"base_model", "datasets", "fsdp_config"}, changed
    for given, found in zip(values["datasets"], cfg["datasets"], strict=True):
        assert {key: found.get(key) for key in given} == given
    rope, target = PROMISED[name]
    overrides = cfg["overrides_of_model_config"]
    assert overrides["max_position_embeddings"] == target == values["pose"]["target_length"]
    assert {key: overrides["rope_parameters"].get(key) for key in rope} == rope


def test_keys_that_nothing_reads_are_found(home):
    """Axolotl takes such a file without a word, so that the tests above must look themselves."""
    values = read("llama3-80k/qlora-full-length.yaml")
    base = write_config(home / "config" / values["base_model"], values["base_model"])
    values |= {"lora_rank": 32, "flash_attention": True, "bnb_config_kwargs": {"anything": 1}}
    del values["attn_implementation"]
    values["datasets"][0]["role_to_train"] = ["user"]
    values["fsdp_config"] = {"wrap_policy": "x"}
    unknown, cfg = forked(_at_home, validated, values, base).value
    assert sorted(unknown) == ["datasets[].role_to_train", "flash_attention", "fsdp_config.wrap_policy", "lora_rank"]
    assert "lora_rank" not in cfg and "role_to_train" not in cfg["datasets"][0]


@pytest.mark.parametrize("name", PROMISED)
def test_runs(home, name):
    """Two steps of the shrunk copy, and what it saved."""
    done, small, out = _run(home, name)
    assert len(done.losses) == 2 and np.isfinite(done.losses).all()
    pose = small["pose"]
    if pose.get("sampler") == "none":
        assert not done.jumps
    else:
        assert done.jumps and done.farthest > pose.get("train_length", small["sequence_len"])
    assert done.farthest < pose["target_length"]
    config = json.loads((out / "config.json").read_text())
    rope = PROMISED[name][0]
    assert config["max_position_embeddings"] == pose["target_length"]
    assert {key: config["rope_parameters"].get(key) for key in rope} == rope
    forked(_reloads, out, small, done)


def _run(home: Path, name: str) -> tuple[ExampleRun, dict[str, Any], Path]:
    values = read(name)
    base = home / "tiny" / values["base_model"]
    if not base.exists():
        forked(write_tiny, base, values["base_model"])
    longest = values["sequence_len"] // BASES[values["base_model"]].shrink
    data = home / "data" / str(longest)
    if not data.exists():
        write_data(data, longest)
    out = home / "runs" / name.removesuffix(".yaml")
    small = shrunk(values, base, data, out)
    assert set(differences(values, small)) <= set(REPLACED)
    return forked(run_example, small).value, small, out / "out"


def _reloads(out: Path, small: dict[str, Any], done: ExampleRun) -> None:
    """The saved folder gives the frequencies, and what was trained, again."""
    import torch
    from safetensors.torch import load_file

    from pose_plugin import load_extended

    model = load_extended(out)
    frequencies = next(b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n)
    np.testing.assert_allclose(frequencies.double().numpy(), done.inverse_frequencies, rtol=1e-6)
    if small.get("adapter"):
        saved = load_file(out / "adapter_model.safetensors")
        for module in small.get("lora_modules_to_save", []):
            (name,) = [n for n in saved if module in n]
            base = load_file(Path(small["base_model"]) / "model.safetensors")
            assert not torch.equal(saved[name], base[f"model.{module}.weight"])
            loaded = model.get_input_embeddings() if module == "embed_tokens" else model.get_output_embeddings()
            torch.testing.assert_close(loaded.weight.float(), saved[name].float())
        assert any("lora_B" in n and v.abs().max() > 0 for n, v in saved.items())
