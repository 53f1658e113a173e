"""Kernels and compilers that put themselves between positions and attention: Liger's RoPE, torch.compile, fp16."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")

from tests.forked import forked
from tests.integration import matrix, trl_runs

ROOT = Path(__file__).parents[2]


# Triton's interpreter runs Liger's real kernel on a CPU; it has to be chosen before anything imports Triton.
LIGER = """
import json
import sys
from pathlib import Path

import axolotl
from liger_kernel.transformers import monkey_patch as liger

from tests.forked import CaseError, forked
from tests.integration import axolotl_runs


def case(folder, one_row):
    calls = []
    rotate = liger.liger_rotary_pos_emb

    def watched(q, k, cos, sin, *args, **kwargs):
        calls.append(1)
        return rotate(q, k, *((cos[:1], sin[:1]) if one_row else (cos, sin)), *args, **kwargs)

    liger.liger_rotary_pos_emb = watched
    plugins = ["axolotl.integrations.liger.LigerPlugin", "pose_plugin"]
    done = axolotl_runs.run(axolotl_runs.base_yaml(folder, plugins=plugins, liger_rope=True, max_steps=1))
    assert calls, "the kernel did not run"
    return bool(done.moved and done.losses)


ran = forked(case, Path(sys.argv[1]) / "as it is", False)
assert ran.value and "self-test passed" in ran.output, ran.output
try:
    forked(case, Path(sys.argv[1]) / "one row for all", True)
except CaseError as error:
    print(error)
"""


@pytest.mark.axolotl
def test_liger_rope(tmp_path):
    """Rows of a batch have different skips; a kernel that takes the first row's for all is stopped."""
    for name in ("axolotl", "liger_kernel", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install axolotl brings it on Linux")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LIGER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "one row's positions move another row's logits" in done.stdout
    assert "Turn it off (Liger: liger_rope: false)" in done.stdout


def compiled(folder, **options):
    """The captured batch is looked at through the compiled model, as it was trained."""
    trainer = trl_runs.sft(
        folder,
        torch_compile=True,
        torch_compile_backend="eager",
        per_device_train_batch_size=2,
        eval_strategy="no",
        max_steps=1,
        gradient_checkpointing=False,
        **options,
    )
    probe = matrix.Probe(("sdpa",))
    probe.watch(trainer.model, trainer)
    trainer.train()
    return {seen.verdict() for seen in probe.effects.values()}


@pytest.mark.parametrize("options", [{}, {"packing": True}], ids=["rows", "packed"])
def test_torch_compile(tmp_path, options):
    ran = forked(lambda: compiled(tmp_path, **options))
    assert ran.value == {"verified"}
    assert "self-test passed" in ran.output


@pytest.mark.axolotl
def test_torch_compile_through_axolotl(tmp_path):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import base_yaml, run

    packed = {"sample_packing": True, "sequence_len": 128}
    ran = forked(run, base_yaml(tmp_path, torch_compile=True, torch_compile_backend="eager", **packed))
    assert ran.value.losses and ran.value.moved
    assert "self-test passed" in ran.output


@pytest.mark.ends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_model_in_half_precision(tmp_path, dtype, packing):
    """Cast as a whole, as `model.half()` does: its frequencies are float32 again, and chunks see each other."""

    def case():
        import torch

        trainer = trl_runs.sft(tmp_path, packing=packing, eval_strategy="no", max_steps=1, learning_rate=1e-4)
        trainer.model.to(getattr(torch, dtype))
        probe = matrix.Probe(("eager", "sdpa"))
        probe.watch(trainer.model, trainer)
        trainer.train()
        frequencies = {b.dtype for name, b in trainer.model.named_buffers() if name.endswith("inv_freq")}
        return {seen.verdict() for seen in probe.effects.values()}, str(frequencies)

    ran = forked(case)
    assert ran.value == ({"verified"}, "{torch.float32}")
    assert "self-test passed" in ran.output
