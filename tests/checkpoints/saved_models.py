"""Tiny saved models and adapters, extended 64 → 512, whose logits depend on positions visibly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pose_plugin import extend_context
from pose_plugin.checkpoints import complete_folder
from pose_plugin.checkpoints.probe import take_probe
from pose_plugin.checkpoints.record import model_facts
from pose_plugin.config import parse_settings
from tests.conftest import make_llama, make_tokenizer

TARGET = 512
ROPES: dict[str, Any] = {
    "linear": "linear",
    "ntk": "ntk",
    "base": {"type": "base", "theta": 1e6},
    "yarn": "yarn",
    "yarn-revised": "yarn-revised",
    "llama3": "llama3",
}


def make_base(folder: Path, **changes: Any) -> Any:
    # Large weights: with the usual ones a random model hardly attends to anything.
    model = make_llama(initializer_range=0.3, num_key_value_heads=1, **changes)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def save_full(folder: Path, rope: Any = "yarn", base: Path | None = None) -> Any:
    """A model with the base's weights and stretched frequencies. Returns it."""
    base = base or folder.with_name("base")
    if not base.exists():
        make_base(base)
    model = extended(base, rope)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    finish(folder, model, rope)
    return model


def save_adapter(folder: Path, rope: Any = "yarn", base: Path | None = None, **lora: Any) -> Any:
    """A LoRA adapter of random weights on the stretched base. Returns the PEFT model."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = base or folder.with_name("base")
    if not base.exists():
        make_base(base)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **lora)
        model = get_peft_model(extended(base, rope), config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    finish(folder, model, rope)
    return model


def extended(base: Path, rope: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = extend_context(AutoConfig.from_pretrained(base), TARGET, rope)
    return AutoModelForCausalLM.from_pretrained(base, config=config)


def finish(folder: Path, model: Any, rope: Any) -> None:
    settings = parse_settings({"target_length": TARGET, "train_length": 64, "rope": rope})
    complete_folder(folder, model.config, settings, facts=model_facts(model), probe=take_probe(model, TARGET))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Applies `change` to a JSON file's values in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
