"""A training that is killed at any moment and resumed ends as one that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pose_plugin.checkpoints import read_record
from pose_plugin.training.history import last_checkpoint
from tests.forked import forked
from tests.kill import survives
from tests.models import make_llama, save
from tests.training.test_history import trainer_of

pytestmark = pytest.mark.slow
STEPS = 3
# What a saved folder needs besides weights; the names of PoSE's own files are written after the weights.
WHOLE = ("config.json", "pose.json", "pose_probe.json")
# With a constant learning rate, the step that transformers makes after the last checkpoint would train.
SAVES = {
    "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "lr_scheduler_type": "linear",
}  # fmt: skip


def resumed(trainer):
    """Resume from the last checkpoint, if there is one, and save."""
    out = Path(trainer.args.output_dir)
    trainer.train(resume_from_checkpoint=out.exists() and last_checkpoint(out) is not None)
    trainer.save_model()


def by_transformers(folder):
    resumed(trainer_of(folder / "out", **SAVES))


def by_trl(folder):
    from peft import LoraConfig

    from tests.integration.trl_runs import sft

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    resumed(sft(folder, peft=lora, save_only_model=False, **SAVES))


def by_axolotl(folder):
    from tests.integration.axolotl_runs import base_yaml, train

    changes = {"output_dir": str(folder / "out"), "auto_resume_from_checkpoints": True, "lr_scheduler": "linear"}
    train(base_yaml(folder.parents[1], **{**SAVES, "lr_scheduler_type": None}, **changes))


TRAININGS = {"transformers": by_transformers, "trl": by_trl, "axolotl": by_axolotl}


def weights(out):
    (file,) = [out / name for name in ("model.safetensors", "adapter_model.safetensors") if (out / name).exists()]
    return load_file(file)


def outcome(folder):
    """Weights, and what the record says; each run that is resumed fetches some rows twice."""
    out = folder / "out"
    for place in (out, *(out / f"checkpoint-{step}" for step in range(1, STEPS + 1))):
        missing = [name for name in WHOLE if not (place / name).exists()]
        assert weights(place) and not missing, (place, missing)
    record = read_record(out)
    documents = record["trained"]["first_process"]["documents"]
    assert documents >= 2 * STEPS
    expected = weights(folder.parent / "whole" / "out")
    for name, tensor in weights(out).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
    # Also if the last step's checkpoint was resumed, and transformers made another step with a learning rate of 0.
    assert record["trained"]["steps"] == STEPS
    return record["target_length"]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_killed_training_is_resumed(tmp_path, name):
    if name != "transformers":
        pytest.importorskip(name)

    def prepare(folder):
        if name == "trl":
            save(make_llama(), folder / "base")

    # What a run imports, the forked children have then already. Axolotl also keeps the prepared data; its patches of
    # other packages stay in the child.
    first = tmp_path / "runs" / "first"
    forked(by_axolotl, first) if name == "axolotl" else TRAININGS[name](first)
    ended = survives(TRAININGS[name], tmp_path / "runs", outcome, prepare)
    assert ended["point"] + ended["time"], f"no run was killed: {ended}"
