"""The scripts of example_configs, run on CPU with tiny models, and the files of accelerate and DeepSpeed, loaded."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import forked
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
    # Once here, for all forked runs.
    for name in ("accelerate", "datasets", "peft", "pose_plugin.integrations.trl", "trl.trainer.sft_trainer"):
        importlib.import_module(name)
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
