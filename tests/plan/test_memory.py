"""Estimates equal what tiny models that really train hold: weights, gradients, optimizer and saved activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pose_plugin.plan.memory import (
    NF4_BITS,
    NF4_BITS_SINGLE,
    OPTIMIZERS,
    Run,
    activations,
    architecture,
    layer_bytes,
    memory,
)
from tests.models import make_llama
from tests.plan.test_architecture import LLAMA3_8B

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step(model, optimizer) -> None:
    ids = torch.arange(24).reshape(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def states(optimizer) -> int:
    """Numbers of the shape of a parameter; counters of steps are left out."""
    kept = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    return bytes_of(tensor for tensor in kept if tensor.dim())


@pytest.mark.parametrize(
    "dtype, name, make",
    [
        (torch.float32, "adamw", torch.optim.AdamW),
        (torch.bfloat16, "adamw", torch.optim.AdamW),
        (torch.float32, "sgd", torch.optim.SGD),
    ],
)
def test_full_training(dtype, name, make):
    model = make_llama(**SHAPE).to(dtype)
    optimizer = make(model.parameters(), lr=1e-3)
    step(model, optimizer)
    wide = dtype.itemsize
    estimated = memory(architecture(model.config), Run(weight_bytes=wide, trained_bytes=wide, optimizer=name))
    assert estimated.weights == bytes_of(model.parameters())
    assert estimated.gradients == bytes_of(p.grad for p in model.parameters())
    assert estimated.optimizer == states(optimizer)


def test_adapter_with_whole_modules():
    """Frozen weights are bf16, adapters float32, and the original of a whole module stays."""
    peft = pytest.importorskip("peft")
    base = make_llama(**SHAPE).to(torch.bfloat16)
    counted = architecture(base.config)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"])
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        step(model, optimizer)
    run = Run("lora", 4, ["q_proj", "v_proj"], ["norm"], weight_bytes=2, trained_bytes=4)
    estimated = memory(counted, run)
    assert estimated.weights == bytes_of(model.parameters())
    assert estimated.gradients == bytes_of(p.grad for p in model.parameters() if p.grad is not None)
    assert estimated.optimizer == states(optimizer)


@pytest.mark.parametrize("double, bits", [(True, NF4_BITS), (False, NF4_BITS_SINGLE)])
def test_bits_of_an_nf4_weight(double, bits):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 1024)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    kept = [packed, state.absmax, *([state.state2.absmax] if double else [])]
    # The tables of 16 and of 256 values exist once per model.
    assert bytes_of(kept) * 8 / weight.numel() == pytest.approx(bits, rel=1e-3)


def kept_by_autograd(model, ids) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # Storages stay referenced, so that no address is used twice.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [SHAPE, {**SHAPE, "intermediate_size": 96, "num_attention_heads": 8}])
def test_what_a_layer_keeps_for_its_backward_pass(attention, shape, dtype):
    ids = torch.arange(96).reshape(2, 48) % 128
    two, three = (
        kept_by_autograd(make_llama(attention, **shape, num_hidden_layers=n).to(dtype).train(), ids) for n in (2, 3)
    )
    counted = architecture(make_llama(**shape).config)
    assert (three - two) / ids.numel() == layer_bytes(counted, 48, attention == "eager", dtype.itemsize)


def test_checkpointing_keeps_a_layers_input():
    model = make_llama(**SHAPE, num_hidden_layers=3)
    run = Run(rows=2, window=48)
    counted = architecture(model.config)
    whole, checkpointed = activations(counted, run), activations(counted, replace(run, checkpointing=True))
    assert whole == 3 * layer_bytes(counted, 48) * 96
    assert checkpointed == (3 * 2 * 64 + layer_bytes(counted, 48)) * 96


def test_zero_divides_what_its_stage_says():
    counted = architecture(LLAMA3_8B)
    run = Run(master=True, gpus=8)
    alone, one, two, three = (memory(counted, replace(run, stage=stage)) for stage in range(4))
    size = 8_030_261_248
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * size, 2 * size, 12 * size)
    assert (one.weights, one.gradients, one.optimizer) == (2 * size, 2 * size, 12 * size / 8)
    assert (two.weights, two.gradients) == (2 * size, 2 * size / 8)
    assert three.weights == 2 * size / 8 and three.gathered > 0 == two.gathered
    assert memory(counted, replace(run, stage=3, offload=True)).optimizer == 0


def test_logits_and_small_optimizers():
    counted = architecture(LLAMA3_8B)
    run = Run(rows=1, window=8192)
    assert memory(counted, run).logits == 12 * 8192 * 128256
    assert memory(counted, replace(run, fused_loss=True)).logits == 0
    order = [memory(counted, replace(run, optimizer=name)).optimizer for name in ("adamw", "lion", "adamw_8bit", "sgd")]
    assert order[0] > order[1] > order[3] == 0 and order[0] > order[2] > 0
    assert set(OPTIMIZERS) >= {"adamw", "adamw_8bit", "lion", "lion_8bit", "adafactor", "sgd"}
