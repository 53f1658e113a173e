"""Operations equal what torch counts while tiny models really train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pose_plugin.plan.memory import Run, architecture
from pose_plugin.plan.work import token_operations
from tests.models import make_llama
from tests.plan.test_architecture import LLAMA3_8B
from tests.plan.test_memory import SHAPE
from tests.plan.test_plan import base, plan_of  # noqa: F401 - a fixture

TARGETS = ["q_proj", "v_proj", "down_proj"]


def about(operations: float) -> Any:
    """Versions of torch count the few operations of RoPE's angles differently."""
    return pytest.approx(operations, rel=1e-4)


def counted(model, window: int) -> float:
    """Operations per token of one training step."""
    ids = torch.arange(2 * window).reshape(2, window) % 128
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # The angles of RoPE, one product per position and pair of a head's 16 numbers, are computed once per batch.
    return counter.get_total_flops() / ids.numel() - 2 * (16 / 2) / len(ids)


@pytest.mark.parametrize("window", [12, 48])
def test_full_training(window):
    model = make_llama("eager", **SHAPE).train()
    run = Run(window=window, eager=True)
    assert token_operations(architecture(model.config), run, causal=False) == about(counted(model, window))


def test_an_adapter():
    peft = pytest.importorskip("peft")
    model = make_llama("eager", **SHAPE).train()
    sizes = architecture(model.config)
    # As with gradient checkpointing; without it the first layer's projections skip the gradient of their input.
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    run = Run("lora", 4, TARGETS, window=48, eager=True)
    assert token_operations(sizes, run, causal=False) == about(counted(model, 48))


def test_checkpointing_computes_layers_once_more():
    model = make_llama("eager", **SHAPE).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = Run(window=48, eager=True, checkpointing=True)
    assert token_operations(architecture(model.config), run, causal=False) == about(counted(model, 48))


def test_causal_fused_attention():
    sizes = architecture(LLAMA3_8B)
    short, long = (token_operations(sizes, Run(window=window)) for window in (8192, 16384))
    # 4·n·queries per layer forward and 2.5 times that backward, half of it hidden by the mask.
    assert long - short == 8192 * 4096 * 32 * 4 * 3.5 / 2


def test_hours(base):  # noqa: F811
    plan = plan_of(base)
    assert plan.hours is None and plan.hours_full_length is None
    from dataclasses import replace

    plan = replace(plan, tokens_per_second=4000)
    assert plan.hours == pytest.approx(64_000 * 8192 / (8 * 4000) / 3600)
    assert plan.hours_full_length == pytest.approx(plan.hours * 4 * plan.more_work)
    assert 1 < plan.more_work < 2
