"""A training that is killed at any moment and resumed ends as one that nobody killed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pose_plugin.checkpoints import read_record
from pose_plugin.training.history import last_whole_checkpoint
from tests.kill import survives
from tests.training.test_history import TARGET, trainer_of

pytestmark = pytest.mark.slow
STEPS = 3
# What a saved folder needs; the names of PoSE's own files are written after the weights.
WHOLE = ("config.json", "model.safetensors", "pose.json", "pose_probe.json")


def trained(folder):
    out = folder / "out"
    trainer = trainer_of(out, max_steps=STEPS, save_steps=1, save_total_limit=None)
    trainer.train(resume_from_checkpoint=bool(out.exists() and last_whole_checkpoint(out)) or None)
    trainer.save_model()


def outcome(folder):
    """Weights, and what the record says; each run that is resumed fetches some rows twice."""
    out = folder / "out"
    for place in (out, *(out / f"checkpoint-{step}" for step in range(1, STEPS + 1))):
        missing = [name for name in WHOLE if not (place / name).exists()]
        assert not missing, (place, missing)
    record = read_record(out)
    documents = record["trained"]["first_process"]["documents"]
    assert documents >= 2 * STEPS
    weights = load_file(out / "model.safetensors")
    expected = load_file(folder.parent / "whole" / "out" / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
    # Also if the last step's checkpoint was resumed, and transformers made another step with a learning rate of 0.
    assert record["trained"]["steps"] == STEPS
    return record["target_length"]


def test_a_killed_training_is_resumed(tmp_path):
    ended = survives(trained, tmp_path, outcome)
    assert ended["point"] + ended["time"], f"no run was killed: {ended}"
    assert outcome(tmp_path / "whole") == TARGET
