"""A small data set, a tiny model and a base YAML for runs of the real Axolotl on CPU."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.forked import made_once
from tests.integration.records import Document, documents_of, logits_far_out, moved
from tests.models import is_save_probe, make_llama, save

# The special tokens w0, w1 and w2 are split off wherever they occur, so no word may begin with one.
WORDS = [f"w{i}" for i in range(30, 100)]


def make_base(folder: Path, **changes: Any) -> Path:
    return made_once(folder, lambda path: save(make_llama(**changes), path))


def make_rows(path: Path, count: int = 24, low: int = 20, high: int = 60) -> Path:
    picker = random.Random(0)
    rows = [" ".join(picker.choices(WORDS, k=picker.randrange(low, high))) for _ in range(count)]
    return made_once(path, lambda file: file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows)))


def base_yaml(folder: Path, **changes: Any) -> dict[str, Any]:
    """Trains the tiny model 64 → 512 for two steps. Keys of value None are left out."""
    make_base(folder / "base")
    make_rows(folder / "rows.jsonl")
    values: dict[str, Any] = {
        "base_model": str(folder / "base"),
        "plugins": ["pose_plugin"],
        "pose": {"target_length": 512, "rope": "linear"},
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}],
        "sequence_len": 64,
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "special_tokens": {"pad_token": "w0"},
        "dataset_num_proc": 1,
        # Without one, Axolotl shuffles anew in every process, and two steps read a few of the rows only.
        "seed": 42,
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_linear": True,
}


def in_this_process() -> None:
    """datasets starts interpreters for `num_proc`, which import all of Axolotl again: a minute for 24 rows."""
    from datasets import Dataset

    for name in ("map", "filter", "save_to_disk"):
        original = getattr(Dataset, name)

        def alone(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            kwargs.pop("num_proc", None)
            return _original(self, *args, **kwargs)

        setattr(Dataset, name, alone)


def load_cfg(values: dict[str, Any]) -> Any:
    """The config as `axolotl train` reads it: plugins registered, validated, normalised."""
    from axolotl.cli.config import load_cfg as axolotl_load_cfg
    from axolotl.utils.dict import DictDefault

    return axolotl_load_cfg(DictDefault(copy.deepcopy(values)))


def train(values: dict[str, Any], on_setup: Callable[[Any, Any], None] | None = None) -> tuple[Any, Any]:
    """`axolotl train` as the command runs it, in this process. Returns (model, trainer).

    Args:
        values: the YAML.
        on_setup: called with (model, trainer) before the first step.
    """
    import axolotl.train as module
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager

    in_this_process()
    cfg = load_cfg(values)
    meta = PluginManager.get_instance().load_datasets(cfg, preprocess=False) or load_datasets(cfg=cfg)
    setup = module.setup_model_and_trainer

    def watched(*args: Any, **kwargs: Any) -> Any:
        trainer, model, *rest = setup(*args, **kwargs)
        if on_setup is not None:
            on_setup(model, trainer)
        return (trainer, model, *rest)

    module.setup_model_and_trainer = watched
    model, _, trainer = module.train(cfg=cfg, dataset_meta=meta)
    return model, trainer


@dataclass
class Batch:
    """What one forward of the model received.

    Attributes:
        kind: "train", "eval", "probe" (the start-up self-test) or "save" (what is asked at each save).
        tokens, positions, mask: arrays of shape (batch, length); mask is None where the model got none.
    """

    kind: str
    tokens: np.ndarray
    positions: np.ndarray | None
    mask: np.ndarray | None

    def documents(self) -> list[Document]:
        return documents_of(self.tokens, self.positions, self.mask)


@dataclass
class Run:
    """What a training run did, in a form that passes between processes."""

    losses: list[float]
    eval_losses: list[float]
    batches: list[Batch]
    moved: list[str]
    modules: set[str]
    inverse_frequencies: np.ndarray
    attention: str
    callbacks: list[str]
    logits: list[list[float]]

    def of(self, kind: str) -> list[Batch]:
        return [batch for batch in self.batches if batch.kind == kind]

    def documents(self, kind: str = "train") -> list[Document]:
        return [document for batch in self.of(kind) for document in batch.documents()]


def run(values: dict[str, Any]) -> Run:
    """Trains, and records every batch the model received."""
    import torch

    batches: list[Batch] = []
    before: dict[str, torch.Tensor] = {}

    def record(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        kind = "train" if torch.is_grad_enabled() else "probe" if module.training else "eval"
        kind = "save" if is_save_probe(kwargs["input_ids"]) else kind
        arrays = [kwargs.get(name) for name in ("input_ids", "position_ids", "attention_mask")]
        batches.append(Batch(kind, *(None if a is None else a.cpu().numpy().copy() for a in arrays)))

    def on_setup(model: Any, trainer: Any) -> None:
        model.register_forward_pre_hook(record, with_kwargs=True)
        before.update({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

    model, trainer = train(values, on_setup)
    buffers = [b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n]
    history = trainer.state.log_history
    recorded = list(batches)
    return Run(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        eval_losses=[entry["eval_loss"] for entry in history if "eval_loss" in entry],
        batches=recorded,
        moved=moved(model, before),
        modules={type(module).__name__ for module in model.modules()},
        inverse_frequencies=buffers[0].double().numpy(),
        attention=model.config._attn_implementation,
        callbacks=[type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        # bitsandbytes' 4-bit layers on CPU cannot leave training mode.
        logits=[] if values.get("load_in_4bit") else logits_far_out(model),
    )
