"""Axolotl trains on the YAML that `pose-plugin init` writes, as it is."""

from __future__ import annotations

import json

import pytest
import yaml

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from pose_plugin.cli.main import main
from pose_plugin.training.checks import frozen_parts
from tests.forked import forked
from tests.integration.axolotl_runs import make_base, make_rows, train


@pytest.mark.parametrize("method", ["full", "lora"])
def test_one_step_on_a_cpu(tmp_path, monkeypatch, method):
    """The stretch by 8 makes the adapter train norms and embeddings too."""
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "base")
    make_rows(tmp_path / "rows.jsonl")
    line = ["init", "base", "--target-length", "512", "--data", "rows.jsonl", "--gpus", "0", "--output", "config.yaml"]
    assert main([*line, "--method", method]) == 0
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    # The tiny tokenizer has no padding token of its own, as a published one has; one step is enough.
    short = {"num_epochs": None, "max_steps": 1, "special_tokens": {"pad_token": "w0"}}

    def case():
        model, trainer = train({key: value for key, value in (values | short).items() if value is not None})
        return trainer.state.global_step, model.config.max_position_embeddings, frozen_parts(model)

    assert forked(case).value == (1, 512, [])
    pose = json.loads((tmp_path / values["output_dir"] / "pose.json").read_text())
    assert pose["target_length"] == 512
