"""The scripts of example_configs, run on CPU with tiny models, and the files of accelerate and DeepSpeed, loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import forked
from tests.integration import distributed
from tests.integration.example_runs import (
    BASES,
    FOLDER,
    ROOT,
    TRICKY,
    answers,
    supervised,
    write_data,
    write_tiny,
)

LLAMA3 = "meta-llama/Meta-Llama-3-8B-Instruct"
TARGET, WINDOW = (length // BASES[LLAMA3].shrink for length in (81920, 8192))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("scripts")
    forked(write_tiny, folder / "base", LLAMA3)
    write_data(folder / "data", WINDOW)
    return folder


def _script(path: Path, *arguments: str) -> Any:
    """Runs a script as `python path arguments` does, and looks at its trainer."""
    from transformers import Trainer

    seen: dict[str, Any] = {}
    train = Trainer.train

    def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        def record(module: Any, args: Any, given: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                seen.setdefault("positions", []).append(given["position_ids"].clone())

        trainer.model.register_forward_pre_hook(record, with_kwargs=True)
        seen["trainer"] = trainer
        seen["rows"] = [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]
        weights = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        seen["before"] = {name: weight.detach().clone() for name, weight in weights.items()}
        return train(trainer, *args, **kwargs)

    Trainer.train = watched  # type: ignore[method-assign]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    os.chdir(ROOT)
    runpy.run_path(str(path), run_name="__main__")
    trainer = seen["trainer"]
    steps = [torch.diff(each, dim=1) for each in seen["positions"]]
    weights = dict(trainer.model.named_parameters())
    layers = [m.weight for m in trainer.model.modules() if type(m).__name__ == "Linear4bit"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rows": seen["rows"],
        "farthest": max(int(each.max()) for each in seen["positions"]),
        "jumps": any(bool((each > 1).any()) for each in steps),
        "losses": [entry["loss"] for entry in logged],
        "mean_loss": trainer.state.log_history[-1]["train_loss"],
        "learning_rates": [entry["learning_rate"] for entry in logged],
        "moved": {n for n, p in weights.items() if n in seen["before"] and not torch.equal(p, seen["before"][n])},
        "types": {n: str(p.dtype) for n, p in weights.items() if "modules_to_save" in n},
        "quantized": {(weight.quant_type, weight.quant_state.nested) for weight in layers},
        "sampler": type(trainer._get_train_sampler()).__name__,
        "batch": trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps,
    }


@pytest.mark.parametrize("window", [TARGET, WINDOW])
def test_the_80k_recipe_in_trl(home, window):
    """Whole rows with plain positions, and PoSE."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    from transformers import AutoTokenizer

    data, out = write_data(home / f"data{window}", window), home / f"out{window}"
    arguments = ["--model", home / "base", "--chats", data / "chats.jsonl", "--texts", data / "texts.jsonl"]
    arguments += ["--target-length", TARGET, "--train-length", window, "--output", out, "--max-steps", "2"]
    done = forked(_script, FOLDER / "llama3-80k" / "trl_qlora.py", *map(str, arguments)).value

    assert len(done["losses"]) == 2 and np.isfinite(done["losses"]).all()
    assert done["learning_rates"] == pytest.approx([5e-5, 2.5e-5])
    assert (done["quantized"], done["sampler"], done["batch"]) == ({("nf4", True)}, "LengthGroupedSampler", 8)
    trained = {part for n in done["moved"] for part in n.split(".") if part.endswith("_proj") or part == "embed_tokens"}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"}
    assert set(done["types"].values()) == {"torch.float32"}
    assert done["jumps"] is (window < TARGET) and WINDOW <= done["farthest"] < TARGET

    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    chats = [supervised(tokenizer, labels) for _, labels in done["rows"] if -100 in labels]
    expected = [[said + "<|eot_id|>" for said in turns] for turns in answers(data)]
    assert all(each in expected for each in chats) and all(each in chats for each in expected[-len(TRICKY) :])
    assert 0 < len(chats) < len(expected) and len(done["rows"]) > len(chats)
    assert max(len(tokens) for tokens, _ in done["rows"]) == window

    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_theta"]) == (TARGET, 2e8)
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (32, 16, 0.0)
    forked(_reloads, out, home / "base")


def _reloads(out: Path, base: Path) -> None:
    from safetensors.torch import load_file

    from pose_plugin import load_extended

    (name,) = (n for n in load_file(out / "adapter_model.safetensors") if "embed_tokens" in n)
    saved = load_file(out / "adapter_model.safetensors")[name]
    assert not torch.equal(saved.float(), load_file(base / "model.safetensors")["model.embed_tokens.weight"])
    loaded = load_extended(out).get_input_embeddings().weight
    torch.testing.assert_close(loaded, saved.to(loaded.dtype))


def test_sft_in_4_bit(home):
    """The script's other ways are in test_trl.py."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    out = home / "qlora"
    arguments = ["--model", home / "base", "--data", home / "data" / "texts.jsonl", "--target-length", TARGET]
    arguments += ["--train-length", "32", "--output", out, "--steps", "2", "--batch-size", "2", "--qlora"]
    done = forked(_script, FOLDER / "trl" / "sft.py", *map(str, arguments)).value
    assert np.isfinite(done["mean_loss"]) and done["quantized"] == {("nf4", True)}
    assert done["jumps"] and any("lora_B" in name for name in done["moved"])
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_type"]) == (TARGET, "yarn")
    assert json.loads((out / "adapter_config.json").read_text())["peft_type"] == "LORA"


# -- Unsloth -------------------------------------------------------------------------------------------------------


def _stand_in() -> Any:
    """Unsloth needs a GPU. This loads and wraps with transformers and PEFT, and leaves the same marks on the model."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(model_name: str, max_seq_length: int, load_in_4bit: bool, dtype: Any) -> tuple[Any, Any]:
            model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype)
            model.max_seq_length = max_seq_length
            return model, AutoTokenizer.from_pretrained(model_name)

        @staticmethod
        def get_peft_model(model: Any, use_gradient_checkpointing: str, **adapter: Any) -> Any:
            return peft.get_peft_model(model, peft.LoraConfig(**adapter))

    module = ModuleType("unsloth")
    module.FastLanguageModel = FastLanguageModel  # type: ignore[attr-defined]
    return module


def _unsloth_script(path: Path, *arguments: str) -> Any:
    sys.modules["unsloth"] = _stand_in()
    return _script(path, *arguments)


def test_the_80k_recipe_in_unsloth(home):
    out = home / "unsloth"
    arguments = ["--model", home / "base", "--extended", home / "extended", "--target-length", TARGET]
    arguments += ["--train-length", WINDOW, "--output", out, "--max-steps", "2"]
    arguments += ["--chats", home / "data" / "chats.jsonl", "--texts", home / "data" / "texts.jsonl"]
    done = forked(_unsloth_script, FOLDER / "llama3-80k" / "unsloth_qlora.py", *map(str, arguments)).value
    assert done["learning_rates"] == pytest.approx([5e-5, 2.5e-5])
    assert done["jumps"] and WINDOW < done["farthest"] < TARGET
    assert (done["sampler"], done["batch"]) == ("LengthGroupedSampler", 8)
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_theta"]) == (TARGET, 2e8)
    forked(_reloads, out, home / "base")


def test_unsloth_takes_what_the_script_gives():
    """The names of the arguments, held against Unsloth's source; it needs a GPU to be imported."""
    import ast

    spec = importlib.util.find_spec("unsloth")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Unsloth's source is not installed: pip install --no-deps unsloth")
    folder = Path(spec.submodule_search_locations[0])
    known: dict[str, set[str]] = {"from_pretrained": set(), "get_peft_model": set()}
    for part, owner in (("models/loader.py", "FastLanguageModel"), ("models/llama.py", "FastLlamaModel")):
        for node in ast.parse((folder / part).read_text(encoding="utf-8")).body:
            for method in node.body if isinstance(node, ast.ClassDef) and node.name == owner else ():
                if isinstance(method, ast.FunctionDef) and method.name in known:
                    known[method.name] |= {a.arg for a in method.args.args + method.args.kwonlyargs}
    script = ast.parse((FOLDER / "llama3-80k" / "unsloth_qlora.py").read_text(encoding="utf-8"))
    given: dict[str, set[str]] = {}
    for node in ast.walk(script):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in known:
            given[node.func.attr] = {keyword.arg or "" for keyword in node.keywords}
    assert given.keys() == known.keys()
    for name, names in given.items():
        assert names <= known[name], name


# -- accelerate and DeepSpeed --------------------------------------------------------------------------------------


# What `accelerate launch` tells its processes by each file.
TOLD = {
    "ddp": {},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
    },
    "context_parallel": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "8",
    },
}


@pytest.mark.parametrize("name", TOLD)
def test_accelerate_reads(name, monkeypatch):
    """Its own loader, which refuses unknown keys, and then what its launcher makes of every key."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    monkeypatch.chdir(ROOT)
    config = load_config_from_file(f"example_configs/accelerate/{name}.yaml")
    kinds = {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kinds.get(name, "FSDP"), 8, 1)
    blocks = {**config.fsdp_config, **config.deepspeed_config, **config.parallelism_config}
    # Blocks go to the launcher's options, key by key; one that is none of them would be dropped.
    assert set(blocks) <= {action.dest for action in launch_command_parser()._actions}
    told = distributed.environment(distributed.Case("trl", name, "full"))
    assert {key: told.get(key) for key in TOLD[name]} == TOLD[name]
    file = config.deepspeed_config.get("deepspeed_config_file")
    if file:
        assert (ROOT / file).is_file() and Path(told["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).samefile(ROOT / file)


@pytest.mark.parametrize("name, stage", [("zero2", 2), ("zero3", 3)])
def test_deepspeed_reads(name, stage):
    """The Trainer's own filling-in, and then DeepSpeed's own schema, which refuses keys that it does not know."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
    forked(_deepspeed, str(FOLDER / "deepspeed" / f"{name}.json"), stage)


def _deepspeed(file: str, stage: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    ours = HfTrainerDeepSpeedConfig(file)
    assert ours.is_zero3() is (stage == 3) and ours.is_zero2() is (stage == 2)
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=1, gradient_accumulation_steps=8, bf16=True, use_cpu=True
    )
    model = SimpleNamespace(config=LlamaConfig(hidden_size=64))
    ours.trainer_config_process(arguments)
    ours.trainer_config_finalize(arguments, model, 100)
    assert "auto" not in json.dumps(ours.config)
    read = DeepSpeedConfig(ours.config)
    assert (read.zero_config.stage, read.gradient_accumulation_steps) == (stage, 8)
    assert read.bfloat16_config.enabled if hasattr(read, "bfloat16_config") else read.bfloat16_enabled
