"""Modules that are trained beside an adapter move by small steps, though the model is in bf16."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pose_plugin.training.precision import (
    LostSteps,
    keep_small_steps,
    keeps_remainders,
    lost_share,
    warning_of_lost_steps,
)
from tests.forked import forked
from tests.models import make_llama

pytest.importorskip("peft")

STEP = 1e-4
WHOLE = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}


def adapted(dtype: Any = torch.bfloat16) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_llama().to(dtype), LoraConfig(target_modules=["q_proj"], modules_to_save=sorted(WHOLE)))


def trainer(model: Any, **changes: bool) -> Any:
    callbacks: list[Any] = []
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(bf16=True),
        callback_handler=SimpleNamespace(callbacks=callbacks),
        add_callback=callbacks.append,
        **{"is_deepspeed_enabled": False, "is_fsdp_enabled": False, **changes},
    )


def moved(model: Any) -> set[str]:
    """Which whole modules one step of Adam, which is as long as the learning rate, has moved."""
    whole = {n: p for n, p in model.named_parameters() if "modules_to_save" in n and p.requires_grad}
    before = {name: weight.detach().clone() for name, weight in whole.items()}
    optimizer = torch.optim.AdamW(whole.values(), lr=STEP, weight_decay=0.0)
    ids = torch.arange(20, 36)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return {name.split(".")[-4] for name, weight in whole.items() if not torch.equal(weight, before[name])}


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


# -- all weights in bf16 ---------------------------------------------------------------------------------------------


def adamw(weights: Any, lr: float = STEP, **group: Any) -> Any:
    return torch.optim.AdamW([{"params": list(weights), **group}], lr=lr, weight_decay=0.0)


def test_the_share_that_a_step_leaves_where_it_is():
    # bf16 has 8 bits: numbers below 1 are 1/256 apart, those below 1/512 are 2⁻¹⁷.
    weight = torch.tensor([1.0, 0.75, 0.0019, 0.0, -0.75, -0.0019, 0.02, 0.03], dtype=torch.bfloat16)
    assert lost_share(weight, 1e-5) == 5 / 8
    assert lost_share(weight, 1e-3) == 3 / 8
    assert lost_share(weight, 0.1) == 0
    assert lost_share(weight.half(), 1e-5) == 3 / 8, "fp16 has 11 bits"
    assert lost_share(weight[:0], 1e-5) == 0
    many = torch.ones(3 * 4096 + 5, dtype=torch.bfloat16)
    many[1::2] = 0
    assert lost_share(many, 1e-5) == pytest.approx(0.5, abs=1e-3), "a sample of a large one"


def warning(model: Any, optimizer: Any = None, lr: float = STEP, **changes: bool) -> str | None:
    trained = [p for p in model.parameters() if p.requires_grad]
    return warning_of_lost_steps(trainer(model, **changes), optimizer or adamw(trained, lr))


def test_the_warning_about_weights_in_bf16():
    text = warning(make_llama().to(torch.bfloat16))
    assert text is not None
    for piece in (
        "(bf16=True): the trained weights are in bfloat16",
        "learning_rate=0.0001 is rounded away in ",
        # Two norms in each of two layers, and the last.
        "in 5 tensors entirely (model.layers.0.input_layernorm.weight)",
        "dtype=torch.float32",
        "optim_args='bf16_stochastic_round=True'",
    ):
        assert piece in text, text


def test_no_warning_if_nothing_is_lost():
    assert warning(make_llama()) is None, "float32"
    assert warning(make_llama().to(torch.bfloat16), lr=0.1) is None, "long steps"
    assert warning(adapted()) is not None, "before the whole modules are cast"
    model = adapted()
    keep_small_steps(trainer(model))
    assert warning(model) is None, "PEFT keeps LoRA in float32, and the whole modules are now"


def test_a_warm_up_hides_no_step():
    """A scheduler begins with a learning rate of nothing and keeps the peak beside it."""
    model = make_llama().to(torch.bfloat16)
    optimizer = adamw(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0 and warning(model, optimizer) is None


@pytest.mark.parametrize(
    "group, keeps",
    [
        ({}, False),
        ({"kahan_sum": None}, True),  # torch-optimi: by itself, for narrow weights
        ({"kahan_sum": True}, True),
        ({"kahan_sum": False}, False),
        ({"use_kahan_summation": True}, True),
        ({"use_kahan_summation": False}, False),
        ({"master_bytewidth": 3}, True),  # FlashOptim
        ({"master_bytewidth": 0}, False),
    ],
)
def test_optimizers_that_keep_what_is_rounded_away(group, keeps):
    model = make_llama().to(torch.bfloat16)
    optimizer = adamw(model.parameters(), **group)
    assert keeps_remainders(optimizer) is keeps and (warning(model, optimizer) is None) is keeps
    # As accelerate wraps it.
    assert (warning(model, SimpleNamespace(optimizer=optimizer)) is None) is keeps


@pytest.mark.parametrize(
    "changes, rank0, times", [({}, True, 1), ({}, False, 0), ({"is_deepspeed_enabled": True}, True, 0)]
)
def test_the_callback_is_added_once_and_warns_once(caplog, changes, rank0, times):
    model = make_llama().to(torch.bfloat16)
    owner = trainer(model, **changes)
    keep_small_steps(owner)
    keep_small_steps(owner)
    (callback,) = owner.callback_handler.callbacks
    assert isinstance(callback, LostSteps)
    state = SimpleNamespace(is_world_process_zero=rank0)
    callback.on_train_begin(None, state, None, optimizer=adamw(model.parameters()))
    assert caplog.text.count("rounded away") == times


def test_beacons_have_their_own_fix():
    from peft import get_peft_model

    from pose_plugin.beacon import BeaconConfig

    for dtype, warned in ((None, True), ("float32", False)):
        model = get_peft_model(make_llama().to(torch.bfloat16), BeaconConfig(interval=8, window=32, dtype=dtype))
        text = warning(model)
        assert (text is not None) is warned
        assert text is None or ("beacon.dtype=None: the trained weights" in text and "dtype: float32" in text)


@pytest.mark.ends
def test_trl_with_a_model_in_bf16(tmp_path):
    pytest.importorskip("trl")
    outcome = forked(_by_trl, tmp_path)
    assert outcome.output.count("is rounded away in") == 1, outcome.output
    assert outcome.value < 0.3


def _by_trl(folder: Any) -> float:
    """The share of a projection's weights that moved in two steps of 0.00001."""
    from tests.integration import trl_runs

    owner = trl_runs.sft(folder, bf16=True, learning_rate=1e-5, max_steps=2, eval_strategy="no")
    owner.model.to(torch.bfloat16)
    weight = owner.model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    owner.train()
    return (weight != before).float().mean().item()


BY_CHANCE = {"optimizer": "adamw_torch_8bit", "optim_args": {"bf16_stochastic_round": True}}


@pytest.mark.axolotl
def test_axolotl_trains_all_weights_in_bf16(tmp_path):
    """The real Axolotl: two steps of 0.00001, which most projections do not take, and more of them by chance."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import base_yaml

    shares = {}
    for name, changes in (("plain", {}), ("by chance", BY_CHANCE)):
        values = base_yaml(tmp_path, bf16=True, fp16=None, learning_rate=1e-5, **changes)
        outcome = forked(_all_in_bf16, values)
        shares[name] = outcome.value
        warned = outcome.output.count("learning_rate=1e-05 is rounded away in")
        assert warned == (1 if name == "plain" else 0), outcome.output
        if warned:
            line = next(line for line in outcome.output.splitlines() if "rounded away in" in line)
            assert "bf16=True" in line and "zero2.json" in line
    assert shares["plain"] < 0.3 and shares["by chance"] > shares["plain"] + 0.1


def _all_in_bf16(values: dict[str, Any]) -> float:
    """The share of the projections' weights that moved."""
    from tests.integration.axolotl_runs import train

    torch.compiler.set_stance("force_eager")
    before: dict[str, Any] = {}

    def on_setup(model: Any, trainer: Any) -> None:
        before.update({n: p.detach().clone() for n, p in model.named_parameters() if "_proj" in n})
        assert {weight.dtype for weight in before.values()} == {torch.bfloat16}

    model, _ = train({**values, "plugins": ["pose_plugin", _on_cpu()]}, on_setup)
    now = dict(model.named_parameters())
    return torch.cat([(now[n] != weight).flatten() for n, weight in before.items()]).float().mean().item()


@pytest.mark.axolotl
def test_axolotl_in_bf16(tmp_path):
    """The real Axolotl in bf16: every whole module moves, and what is saved reloads."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from tests.integration.axolotl_runs import LORA, base_yaml

    lora = {**LORA, "lora_modules_to_save": sorted(WHOLE)}
    values = base_yaml(tmp_path, **lora, bf16=True, fp16=None, learning_rate=STEP)
    assert forked(_in_bf16, values).value == WHOLE
    config = forked(_reloaded, values["output_dir"]).value
    assert config == 512


def _on_cpu() -> str:
    """The name of a plugin, without which Axolotl takes bf16 for a wish that a CPU cannot fulfil."""
    from axolotl.integrations.base import BasePlugin

    class OnCPU(BasePlugin):
        def get_training_args(self, cfg: Any) -> dict[str, Any]:
            return {"use_cpu": True}

    helper = ModuleType("on_cpu")
    helper.OnCPU = OnCPU  # type: ignore[attr-defined]
    sys.modules["on_cpu"] = helper
    return "on_cpu.OnCPU"


def _in_bf16(values: dict[str, Any]) -> set[str]:
    from tests.integration.axolotl_runs import train

    before: dict[str, Any] = {}

    def on_setup(model: Any, trainer: Any) -> None:
        assert model.dtype == torch.bfloat16
        before.update({n: p.detach().clone() for n, p in model.named_parameters() if "modules_to_save" in n})

    model, _ = train({**values, "plugins": ["pose_plugin", _on_cpu()]}, on_setup)
    found = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    return {name.split(".")[-4] for name in found}


def _reloaded(folder: str) -> int:
    from pose_plugin import load_extended

    return load_extended(folder, dtype=torch.bfloat16).config.max_position_embeddings
