"""`coverage` and `plan` write each file as a whole, so a run that is killed and repeated ends as any other."""

from __future__ import annotations

import json

import pytest

from pose_plugin.cli.main import main
from tests.kill import survives

BASE = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("command", ["coverage", "plan"])
def test_killed_and_repeated(command, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASE))
    line = f"{command} --target-length 2k --train-length 512 --draws 50"
    if command == "plan":
        line += f" --base {tmp_path / 'base'} --steps 10"
    words = line.split()
    # What a run imports, the forked children have already.
    assert main([*words, "--output", str(tmp_path / "first.png")]) == 0
    ended = survives(lambda folder: main([*words, "--output", str(folder / "new" / "out.png")]), tmp_path / "runs")
    print(command, dict(ended))
