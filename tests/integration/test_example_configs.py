"""Every file of example_configs: held against the real frameworks' schemas, and run on CPU as a shrunk copy."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from tests.forked import forked
from tests.integration.example_runs import (
    BASES,
    FOLDER,
    LIGER,
    REPLACED,
    ROOT,
    TRICKY,
    ExampleRun,
    answers,
    differences,
    examples,
    read,
    run_example,
    shrunk,
    supervised,
    validated,
    write_config,
    write_data,
    write_tiny,
)
from tests.integration.records import logits_far_out

pytestmark = pytest.mark.axolotl

# What each file promises: the kind of rope with its stretch, or its base, and the target.
PROMISED: dict[str, tuple[str, float, int]] = {
    "llama3-80k/qlora-full-length.yaml": ("base", 2.0e8, 81920),
    "llama3-80k/qlora-pose.yaml": ("base", 2.0e8, 81920),
    "llama3-80k/lora-pose-zero2.yaml": ("base", 2.0e8, 81920),
    "llama3-80k/full-pose-zero3.yaml": ("base", 2.0e8, 81920),
    **{
        f"llama2/pose-{target // 1024}k-{kind}.yaml": (kind, target / 4096, target)
        for target in (16384, 32768, 131072)
        for kind in ("linear", "ntk", "yarn")
    },
    "llama2/full-length-16k.yaml": ("linear", 4, 16384),
    "llama2/qlora-32k.yaml": ("yarn", 8, 32768),
    "mistral/lora-128k-zero2.yaml": ("yarn", 4, 131072),
    "mistral/full-128k-fsdp2.yaml": ("yarn", 4, 131072),
    "qwen/qwen2.5-lora-128k-fsdp2.yaml": ("yarn", 4, 131072),
    "qwen/qwen3-qlora-128k.yaml": ("yarn", 4, 131072),
    "qwen/qwen3.5-qlora-512k.yaml": ("yarn", 2, 524288),
    "small/tinyllama-full.yaml": ("yarn", 8, 16384),
    "small/smollm2-lora.yaml": ("yarn", 8, 65536),
}


def promised(name: str, config: dict[str, Any], shrink: int = 1) -> dict[str, Any]:
    """The rope that the file must write into the config of a model, by the formulas of the papers."""
    kind, number, target = PROMISED[name]
    if kind == "base":
        return {"rope_type": "default", "rope_theta": number}
    theta = BASES[read(name)["base_model"]].theta
    if kind == "ntk":
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {"rope_type": "default", "rope_theta": pytest.approx(theta * number ** (dim / (dim - 2)))}
    window = {"original_max_position_embeddings": target / number / shrink} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": number, "rope_theta": theta, **window}


# One of another kind each, tested where that is: with the quick start, and with the beacon.
ELSEWHERE = ("quickstart/", "beacon/")

_made: dict[str, tuple[ExampleRun, dict[str, Any], Path]] = {}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


def test_every_file_is_tested():
    assert [name for name in examples() if not name.startswith(ELSEWHERE)] == sorted(PROMISED)


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
    assert not unknown and not without_effect(values)
    changed = {key: (value, cfg.get(key)) for key, value in values.items() if cfg.get(key) != value}
    # Defaults are filled in, and the base model's path is the test's.
    assert set(changed) <= {"base_model", "datasets", "fsdp_config"}, changed
    for given, found in zip(values["datasets"], cfg["datasets"], strict=True):
        assert {key: found.get(key) for key in given} == given
    overrides = cfg["overrides_of_model_config"]
    assert overrides["max_position_embeddings"] == PROMISED[name][2] == values["pose"]["target_length"]
    rope = promised(name, BASES[values["base_model"]].config)
    assert {key: overrides["rope_parameters"].get(key) for key in rope} == rope


# Keys by what they need beside them.
NEEDS: dict[str, Any] = {
    "lora_": lambda values: values.get("adapter") in ("lora", "qlora"),
    "bnb_config_kwargs": lambda values: values.get("load_in_4bit"),
    "load_in_4bit": lambda values: values.get("adapter") == "qlora",
    "eval": lambda values: values.get("val_set_size"),
    "fsdp_config": lambda values: values.get("fsdp_version") == 2 and not values.get("deepspeed"),
    "deepspeed": lambda values: (ROOT / values["deepspeed"]).is_file(),
    "liger_": lambda values: LIGER in values["plugins"],
    "chat_template": lambda values: any(each["type"] == "chat_template" for each in values["datasets"]),
    "eot_tokens": lambda values: "chat_template" in values,
    "pad_to_sequence_len": lambda values: values.get("sample_packing"),
    # Rows that are packed are all of one length.
    "group_by_length": lambda values: not values.get("sample_packing"),
}


def without_effect(values: dict[str, Any]) -> list[str]:
    """Keys that do nothing beside the others, and names in them that nothing bears."""
    import inspect

    from transformers import AutoConfig, BitsAndBytesConfig

    found = [key for key in values for start, needs in NEEDS.items() if key.startswith(start) and not needs(values)]
    known = inspect.signature(BitsAndBytesConfig.__init__).parameters
    found += [key for key in values.get("bnb_config_kwargs", {}) if key not in known]
    base = BASES[values["base_model"]]
    special = {token for each in base.special.values() for token in ([each] if isinstance(each, str) else each)}
    tokens = [*values.get("special_tokens", {}).values(), *values.get("eot_tokens", [])]
    found += [token for token in tokens if token not in special]
    layer = values.get("fsdp_config", {}).get("transformer_layer_cls_to_wrap")
    if layer:
        kind = AutoConfig.for_model(**base.config).model_type
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        found += [] if hasattr(module, layer) else [layer]
    return found


def test_keys_without_effect_are_found():
    values = read("qwen/qwen3-qlora-128k.yaml")
    del values["adapter"]
    values |= {"evals_per_epoch": 4, "special_tokens": {"pad_token": "</s>"}, "deepspeed": "nowhere.json"}
    found = without_effect(values)
    assert {"lora_r", "load_in_4bit", "evals_per_epoch", "</s>", "deepspeed"} <= set(found)


def test_the_paper_s_files_differ_in_length_and_rope_alone():
    names = [name for name in PROMISED if name.startswith("llama2/pose-")]
    assert len(names) == 9
    first = read(names[0])
    assert len({(FOLDER / name).read_text().split("Hardware:")[1].split("Data:")[0] for name in names}) == 1
    allowed = {"sequence_len", "pose.target_length", "pose.rope", "output_dir", "dataset_prepared_path"}
    for name in names[1:]:
        assert set(differences(first, read(name))) <= allowed, name


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
    """Two steps of the shrunk copy, what it trained on, and what it saved."""
    done, small, out = _run(home, name)
    assert len(done.losses) == 2 and np.isfinite(done.losses).all() and min(done.losses) > 0 and done.moved
    pose = small["pose"]
    if pose.get("sampler") == "none":
        assert not done.jumps
    else:
        assert done.jumps and done.farthest > pose.get("train_length", small["sequence_len"])
    assert done.farthest < pose["target_length"]
    assert max(len(tokens) for tokens, _ in done.rows) <= small["sequence_len"]
    _trains_answers_and_texts(done, small)
    config = json.loads((out / "config.json").read_text())
    rope = promised(name, config, BASES[read(name)["base_model"]].shrink)
    assert config["max_position_embeddings"] == pose["target_length"]
    base = json.loads((Path(small["base_model"]) / "config.json").read_text())
    assert config["vocab_size"] == base.get("text_config", base)["vocab_size"], "tokens were added"
    assert {key: config["rope_parameters"].get(key) for key in rope} == rope
    forked(_reloads, out, small, done)


def _trains_answers_and_texts(done: ExampleRun, small: dict[str, Any]) -> None:
    """Of conversations every answer with what ends it and nothing else; of texts everything."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small["base_model"])
    chats = [row for row in done.rows if -100 in row[1]]
    kinds = {each["type"] for each in small["datasets"]}
    assert bool(chats) == ("chat_template" in kinds)
    assert (len(chats) < len(done.rows)) == ("completion" in kinds)
    for tokens, labels in done.rows:
        assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
    if not chats:
        return
    end = tokenizer.eos_token
    said = answers(Path(small["datasets"][0]["path"]).parent)
    # Qwen3's template opens the last answer with an empty thought.
    found = [[part.replace("<think>\n\n</think>\n\n", "") for part in supervised(tokenizer, row[1])] for row in chats]
    expected = [[each + end for each in turns] for turns in said]
    assert all(each in expected for each in found)
    # Those with the words of templates are short, and none is missing; of the long ones some are dropped.
    held_out = "val_set_size" in small
    assert held_out or all(each in found for each in expected[-len(TRICKY) :])
    assert len(found) < len(expected)


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
    assert [each for each in values["plugins"] if each not in small["plugins"]] in ([], [LIGER])
    if name not in _made:
        _made[name] = (forked(run_example, small).value, small, out / "out")
    return _made[name]


def test_the_published_recipe(home):
    """Every number of the recipe, where the run and what it saved show it."""
    name = "llama3-80k/qlora-full-length.yaml"
    done, _, out = _run(home, name)
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"], adapter["bias"]) == (32, 16, 0.0, "none")
    assert set(adapter["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapter["modules_to_save"] == ["embed_tokens"]
    trained = {part for n in done.moved for part in n.split(".") if part.endswith("_proj") or part == "embed_tokens"}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"}
    assert done.quantized == ("nf4", True)
    # Linear to 0 without warm-up: the first of two steps has all of it, the second half.
    assert done.learning_rates == pytest.approx([5e-5, 2.5e-5])
    assert done.sampler == "LengthGroupedSampler"
    assert (str(done.arguments["optim"].value), done.arguments["gradient_checkpointing"]) == ("adamw_torch", True)
    values = read(name)
    assert (values["micro_batch_size"], values["gradient_accumulation_steps"], values["num_epochs"]) == (1, 1, 1)
    assert (values["bf16"], values["attn_implementation"]) == (True, "flash_attention_2")


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
        base = load_file(Path(small["base_model"]) / "model.safetensors")
        loaded = {n.replace(".default", ""): p for n, p in model.named_parameters()}
        for module in small.get("lora_modules_to_save", []):
            names = [n for n in saved if f".{module}." in n]
            assert names, f"{module} is not saved"
            for name in names:
                assert not torch.equal(saved[name], base[name.removeprefix("base_model.model.")]), "not trained"
                torch.testing.assert_close(loaded[name.replace(".weight", ".modules_to_save.weight")], saved[name])
        assert any("lora_B" in n and v.abs().max() > 0 for n, v in saved.items())
    if done.logits:
        np.testing.assert_allclose(logits_far_out(model), done.logits, atol=2e-4)
