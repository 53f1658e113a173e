"""A small data set, a tiny model and a base YAML for runs of the real Axolotl on CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.conftest import make_llama, make_tokenizer

WORDS = [f"w{i}" for i in range(8, 120)]


def make_base(folder: Path, **changes: Any) -> Path:
    make_llama(**changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_rows(path: Path, count: int = 24, low: int = 20, high: int = 60) -> Path:
    picker = random.Random(0)
    rows = [" ".join(picker.choices(WORDS, k=picker.randrange(low, high))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def base_yaml(folder: Path, **changes: Any) -> dict[str, Any]:
    """Trains the tiny model 64 → 512 for two steps. Keys of value None are left out."""
    if not (folder / "base").exists():
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
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
}


def _in_this_process() -> None:
    """datasets starts new interpreters for `num_proc`, which import all of Axolotl again: a minute for 24 rows."""
    from datasets import Dataset

    for name in ("map", "filter"):
        original = getattr(Dataset, name)

        def alone(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            kwargs.pop("num_proc", None)
            return _original(self, *args, **kwargs)

        setattr(Dataset, name, alone)


def train(values: dict[str, Any], prepare: Any = None) -> Any:
    """`axolotl train` as the command runs it, in this process. Returns (model, trainer)."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train as axolotl_train
    from axolotl.utils.dict import DictDefault

    _in_this_process()
    cfg = load_cfg(DictDefault(values))
    if prepare is not None:
        prepare(cfg)
    meta = load_datasets(cfg=cfg)
    model, _, trainer = axolotl_train(cfg=cfg, dataset_meta=meta)
    return model, trainer
