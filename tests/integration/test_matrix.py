"""Every cell of docs/verified.md that this environment can run says what is measured now."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")

from tests.forked import forked
from tests.integration import matrix, matrix_page


@pytest.mark.ends
@pytest.mark.parametrize("route", matrix.TRL)
def test_trl(tmp_path, route):
    assert matrix_page.read("TRL")[route] == matrix_page.measure("TRL", route, tmp_path)


@pytest.mark.axolotl
@pytest.mark.parametrize("route", matrix.AXOLOTL)
def test_axolotl(tmp_path, route):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    assert matrix_page.read("Axolotl")[route] == matrix_page.measure("Axolotl", route, tmp_path)


def cut_apart(folder):
    """The rule taken away before the probe looks: the fault that the matrix must be able to see."""
    from pose_plugin.attention import RestartBoundaries
    from tests.integration import trl_runs

    RestartBoundaries.install = lambda self: None
    pose = {"self_test": False}
    trainer = trl_runs.sft(
        folder, packing=True, per_device_train_batch_size=2, eval_strategy="no", max_steps=1, pose=pose
    )
    probe = matrix.Probe(("eager", "sdpa"))
    probe.watch(trainer.model, trainer)
    trainer.train()
    return {seen.verdict() for seen in probe.effects.values()}


def leaking(values):
    """FlashAttention on a packed batch of two rows as they are."""
    from pose_plugin.training import binding as module

    module.needs_one_row = lambda model: False
    effects = matrix.axolotl_effects(values, "sample_packing, multipack_real_batches", matrix.FLASH)
    return {seen.verdict() for seen in effects.values()}


@pytest.mark.once
def test_the_probe_sees_chunks_cut_apart(tmp_path):
    assert forked(cut_apart, tmp_path).value == {"chunks cut apart, no gradient across the jump"}


@pytest.mark.once
@pytest.mark.axolotl
def test_the_probe_sees_documents_mixed(tmp_path):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import base_yaml

    changes = matrix.AXOLOTL["sample_packing, multipack_real_batches"]
    values = base_yaml(tmp_path, **changes, pose={"target_length": 512, "rope": "linear", "self_test": False})
    assert forked(leaking, values).value == {"neighbours seen"}
    with pytest.raises(AssertionError, match="packed documents see each other"):
        forked(leaking, {**values, "pose": {"target_length": 512, "rope": "linear"}})


def in_blocks(values):
    """Axolotl's own sdpa for packed rows, which it puts in on bf16 GPUs, as it works where its kernel cannot."""
    from axolotl.monkeypatch.attention.sdpa_varlen import patch_sdpa_varlen

    assert patch_sdpa_varlen()
    effects = matrix.axolotl_effects(values, "sample_packing", ("sdpa",))
    return {seen.verdict() for seen in effects.values()}


@pytest.mark.axolotl
def test_axolotls_own_masks_of_packed_rows(tmp_path):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import base_yaml

    assert forked(in_blocks, base_yaml(tmp_path, **matrix.AXOLOTL["sample_packing"])).value == {"verified"}
