"""Use the installed wheel as a user would: python dist_smoke.py none|trl|3.11|3.12, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator

import pose_plugin

EXTRA = sys.argv[1]
BASE = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
)


def command(*words: str) -> str:
    """Run a command and return what it printed; a failure ends this script with its output."""
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(words)} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return run.stdout


assert "site-packages" in str(Path(pose_plugin.__file__)), pose_plugin.__file__
print(EXTRA, pose_plugin.__version__, "torch", torch.__version__)
command("pose-plugin", "--help")
command("pose-plugin", "coverage", "--target-length", "2048", "--train-length", "128")
model = AutoModelForCausalLM.from_config(pose_plugin.extend_context(BASE, target_length=2048, rope="yarn"))
collator = pose_plugin.PoSECollator(collate=default_data_collator, target_length=2048, train_length=128)
row = list(range(3, 103))
batch = collator([{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)}])
assert batch["position_ids"].max() < 2048
assert torch.isfinite(model(**batch).loss)

if EXTRA != "none":
    import trl  # noqa: F401

if EXTRA.startswith("3."):
    # Only Axolotl's own look-up shows that the bare name works in this version.
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    manager.register("pose_plugin")
    assert any(type(plugin).__name__ == "PosePlugin" for plugin in manager.plugins.values()), manager.plugins
    assert "coverage" in command("axolotl", "pose", "--help")
print(EXTRA, "works")
