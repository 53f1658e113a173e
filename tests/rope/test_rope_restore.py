"""Rotary buffers restored after a cast, `to_empty` or a wrong number."""

from __future__ import annotations

import copy

import pytest
import torch

from pose_plugin.rope import extend_context, restore_rope, verify_rope
from pose_plugin.utils.errors import RopeMismatchError
from tests.models import make_llama


@pytest.fixture(scope="module")
def original():
    config = extend_context(make_llama().config, 512, rope="yarn")
    return type(make_llama())(config)


@pytest.fixture
def model(original):
    return copy.deepcopy(original)


def buffers(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def same(model, original):
    expected = buffers(original)
    return all(
        torch.equal(buffer, expected[name]) and buffer.dtype == torch.float32 for name, buffer in buffers(model).items()
    )


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_a_cast_model_gets_exact_frequencies_and_keeps_its_weights(model, original, cast):
    model.to(cast)
    with pytest.raises(RopeMismatchError, match=r"restore_rope\(model\)"):
        verify_rope(model)
    assert restore_rope(model, only_coarse=True) == sorted(buffers(original), key=len)
    assert same(model, original)
    assert {parameter.dtype for parameter in model.parameters()} == {cast}
    verify_rope(model)


def test_to_empty(model, original):
    model.to("meta")
    with pytest.raises(RopeMismatchError, match=r"meta device.*restore_rope\(model\)"):
        verify_rope(model)
    model.to_empty(device="cpu")
    for buffer in buffers(model).values():
        buffer.zero_()  # really there: anything that was in memory
    with pytest.raises(RopeMismatchError, match="to_empty, call"):
        verify_rope(model)
    assert restore_rope(model, only_coarse=True) == []
    assert len(restore_rope(model)) == 2
    assert same(model, original)


def test_buffers_still_on_meta_go_to_where_the_weights_are(model, original):
    rotary = model.model.rotary_emb
    rotary.to("meta")
    restore_rope(model)
    assert same(model, original)


def test_nothing_to_do(model, original):
    assert restore_rope(model, only_coarse=True) == []
    restore_rope(model)
    assert same(model, original)
    # Non-persistent as before: a checkpoint must not hold them.
    assert model.state_dict().keys() == original.state_dict().keys()


def test_what_cannot_be_built_from_its_config_is_left_alone(model):
    class Odd(type(model.model.rotary_emb)):
        def __init__(self, config, secret):
            super().__init__(config)

    model.model.rotary_emb.__class__ = Odd
    model.bfloat16()
    assert restore_rope(model) == []
    with pytest.raises(RopeMismatchError, match=r"torch\.bfloat16"):
        verify_rope(model)


def test_a_wrapped_model(model, original):
    class Engine(torch.nn.Module):
        """Like DeepSpeed's: it holds the model, and has a `config` that is not the model's."""

        def __init__(self, module):
            super().__init__()
            self.module = module
            self.config = {"zero_optimization": {"stage": 3}}

    engine = Engine(model.bfloat16())
    assert len(restore_rope(engine, only_coarse=True)) == 2
    verify_rope(engine)
    assert same(model, original)
