"""Facts that a run records with its settings: the model before and after, base, training, versions, hardware."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from pose_plugin.checkpoints.probe import quantization
from pose_plugin.checkpoints.saved import public_name
from pose_plugin.rope.read import RECORD_KEY, lookup, text_config

# Their versions are recorded if they are loaded, as they took part in the run.
_PACKAGES = ("torch", "transformers", "peft", "trl", "axolotl", "accelerate", "deepspeed", "bitsandbytes")


def model_facts(model: Any) -> dict[str, Any]:
    """Return `model` (rope before and after), `base` (the first weights) and `method` (full, lora, qlora, …).

    Args:
        model: the live model, a PEFT model included.
    """
    config = model.config
    text = text_config(config)
    before = lookup(text, RECORD_KEY) or {}
    parameters = lookup(text, "rope_parameters")
    facts: dict[str, Any] = {
        "model": {
            "type": lookup(text, "model_type"),
            "original_length": before.get("original_length"),
            "original_theta": before.get("original_theta"),
            "max_position_embeddings": lookup(text, "max_position_embeddings"),
            "rope_parameters": dict(parameters) if isinstance(parameters, Mapping) else parameters,
        },
        "base": {"name": _published(lookup(config, "_name_or_path")), "revision": lookup(config, "_commit_hash")},
        "method": "full",
    }
    adapters = getattr(model, "peft_config", None)
    if adapters:
        adapter = next(iter(adapters.values()))
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type)).lower()
        facts["method"] = f"q{kind}" if quantization(config) else kind
        facts["base"] = {
            "name": _published(adapter.base_model_name_or_path) or facts["base"]["name"],
            "revision": adapter.revision or facts["base"]["revision"],
        }
        facts["adapter"] = {
            key: getattr(adapter, key)
            for key in ("r", "lora_alpha", "use_dora", "modules_to_save")
            if hasattr(adapter, key)
        }
    return facts


def run_facts(trainer: Any, drawn: Mapping[str, int], data: list[str] | None = None) -> dict[str, Any]:
    """Return `trained`, `versions`, `hardware` and, if the names are known, `data`.

    Args:
        trainer: a transformers Trainer.
        drawn: counts of the collator of this process, see `PositionCollator.trained`.
        data: names of the data sets.
    """
    args, state = trainer.args, trainer.state
    trained: dict[str, Any] = {
        "steps": state.global_step,
        "epochs": round(float(state.epoch or 0), 4),
        # Not of `args`: `auto_find_batch_size` may have found a smaller batch, and ranks may share rows.
        "rows_a_step": trainer.get_total_train_batch_size(args),
        "learning_rate": args.learning_rate,
        "processes": args.world_size,
        # Each process draws positions for its own share of the rows; these counts are of the first process.
        "first_process": dict(drawn),
    }
    facts: dict[str, Any] = {
        "trained": trained,
        "versions": versions(),
        "hardware": hardware(args.world_size),
    }
    if data:
        facts["data"] = [public_name(name) for name in data]
    return facts


def _published(name: str | None) -> str | None:
    # pose.json is published with the weights, and a path tells who trained where.
    return public_name(name) if name else None


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the packages in use."""
    from pose_plugin._version import __version__

    found = {"pose_plugin": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def hardware(processes: int) -> str:
    """Return e.g. "8 × NVIDIA H100"."""
    import torch

    if torch.cuda.is_available():
        return f"{processes} × {torch.cuda.get_device_name()}"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        return f"{processes} × {accelerator.type}"
    return f"{processes} × CPU ({platform.machine()})"
