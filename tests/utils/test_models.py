"""Every wrapper is taken off, in any order."""

from __future__ import annotations

import pytest
import torch

from pose_plugin.utils.models import shells, unwrap
from tests.models import make_llama


class Engine(torch.nn.Module):
    """Like DeepSpeed's: holds the model as `module`, has a `config` of its own, and passes other attributes on."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.config = {"zero_optimization": {"stage": 3}}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_a_plain_model_is_itself():
    model = make_llama()
    assert unwrap(model) is model and list(shells(model)) == [model]


@pytest.mark.parametrize("wrappers", [[Engine], [torch.compile], [torch.compile, Engine], [Engine, torch.compile]])
@pytest.mark.parametrize("adapter", [False, True])
def test_wrapped(wrappers, adapter):
    peft = pytest.importorskip("peft")
    model = wrapped = make_llama()
    if adapter:
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
        tuner = wrapped.base_model
    for wrap in wrappers:
        wrapped = wrap(wrapped)
    assert unwrap(wrapped) is model
    assert not adapter or any(each is tuner for each in shells(wrapped))
