"""Modules that are trained beside an adapter move by small steps, though the model is in bf16."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pose_plugin.integrations.precision import keep_small_steps
from tests.conftest import make_llama
from tests.forked import forked

pytest.importorskip("peft")

STEP = 1e-4
WHOLE = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}


def adapted(dtype: Any = torch.bfloat16) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_llama().to(dtype), LoraConfig(target_modules=["q_proj"], modules_to_save=sorted(WHOLE)))


def trainer(model: Any, **changes: bool) -> Any:
    return SimpleNamespace(model=model, **{"is_deepspeed_enabled": False, "is_fsdp_enabled": False, **changes})


def moved(model: Any) -> set[str]:
    """Which whole modules one step of Adam, which is as long as the learning rate, has moved."""
    whole = {n: p for n, p in model.named_parameters() if "modules_to_save" in n and p.requires_grad}
    before = {name: weight.detach().clone() for name, weight in whole.items()}
    optimizer = torch.optim.AdamW(whole.values(), lr=STEP, weight_decay=0.0)
    ids = torch.arange(20, 36)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return {name.split(".")[-4] for name, weight in whole.items() if not torch.equal(weight, before[name])}


def test_norms_stand_still_without_it():
    """A norm of 1 in bf16 takes no step of 0.0001; this is what the cast is for."""
    assert moved(adapted()) <= {"embed_tokens"}


def test_all_move():
    model = adapted()
    # The embeddings, two norms a layer, and the last.
    assert keep_small_steps(trainer(model)) == 6
    assert moved(model) == WHOLE
    assert keep_small_steps(trainer(model)) == 0, "done once"


def test_the_model_computes_as_before():
    ids = torch.arange(20, 36)[None]
    model = adapted()
    before = model(input_ids=ids).logits
    keep_small_steps(trainer(model))
    after = model(input_ids=ids).logits
    assert after.dtype == before.dtype == torch.bfloat16
    torch.testing.assert_close(after, before, atol=2e-2, rtol=2e-2)
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert {each.dtype for each in hidden} == {torch.bfloat16}


def test_a_wider_input_stays_wide():
    """In a model that computes in float32, as TRL leaves a base in 4 bit without autocast."""
    model = adapted(torch.float32)
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data = weight.data.bfloat16()
    assert keep_small_steps(trainer(model)) == 6
    norm = model.base_model.model.model.norm
    assert norm(torch.ones(1, 2, 32)).dtype == torch.float32
    assert norm(torch.ones(1, 2, 32).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("changes", [{"is_deepspeed_enabled": True}, {"is_fsdp_enabled": True}])
def test_what_keeps_weights_of_its_own_is_left_alone(changes):
    model = adapted()
    assert keep_small_steps(trainer(model, **changes)) == 0
    assert {p.dtype for n, p in model.named_parameters() if "modules_to_save" in n} == {torch.bfloat16}


def test_float32_is_left_alone():
    assert keep_small_steps(trainer(adapted(torch.float32))) == 0


@pytest.mark.axolotl
def test_axolotl_in_bf16(tmp_path):
    """The real Axolotl in bf16: every whole module moves, and what is saved reloads."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import LORA, base_yaml, import_axolotl

    import_axolotl()
    lora = {**LORA, "lora_modules_to_save": sorted(WHOLE)}
    values = base_yaml(tmp_path, **lora, bf16=True, fp16=None, learning_rate=STEP)
    assert forked(_in_bf16, values).value == WHOLE
    config = forked(_reloaded, values["output_dir"]).value
    assert config == 512


def _in_bf16(values: dict[str, Any]) -> set[str]:
    from axolotl.integrations.base import BasePlugin

    from tests.integration.axolotl_runs import train

    class OnCPU(BasePlugin):
        """Without it, Axolotl takes bf16 for a wish that a CPU cannot fulfil."""

        def get_training_args(self, cfg: Any) -> dict[str, Any]:
            return {"use_cpu": True}

    helper = ModuleType("on_cpu")
    helper.OnCPU = OnCPU  # type: ignore[attr-defined]
    sys.modules["on_cpu"] = helper
    before: dict[str, Any] = {}

    def on_setup(model: Any, trainer: Any) -> None:
        assert model.dtype == torch.bfloat16
        before.update({n: p.detach().clone() for n, p in model.named_parameters() if "modules_to_save" in n})

    model, _ = train({**values, "plugins": ["pose_plugin", "on_cpu.OnCPU"]}, on_setup)
    found = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    return {name.split(".")[-4] for name in found}


def _reloaded(folder: str) -> int:
    from pose_plugin import load_extended

    return load_extended(folder, dtype=torch.bfloat16).config.max_position_embeddings
