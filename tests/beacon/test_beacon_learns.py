"""Beacons learn to remember what left the window."""

from __future__ import annotations

import torch
from peft import get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from pose_plugin.beacon import BeaconCache, BeaconConfig, check_beacon_gradients, set_ratio_step
from tests.models import make_llama

WORDS = 24


def documents(rows: int, tokens: int, rng: torch.Generator) -> torch.Tensor:
    """Each text is about one word: half of its tokens are that word, the others are noise."""
    topic = torch.randint(4, WORDS, (rows, 1), generator=rng)
    noise = torch.randint(4, WORDS, (rows, tokens), generator=rng)
    return torch.where(torch.rand((rows, tokens), generator=rng) < 0.5, topic, noise)


def trained_base(rng: torch.Generator) -> LlamaForCausalLM:
    """Return a model that recognises a text's word within its window; it was trained on 24 tokens at most."""
    base = make_llama(vocab_size=WORDS, eos_token_id=1, use_cache=True)
    optimizer = torch.optim.AdamW(base.parameters(), lr=5e-3)
    for _ in range(120):
        ids = documents(32, 24, rng)
        optimizer.zero_grad()
        base(ids, labels=ids).loss.backward()
        optimizer.step()
    return base


@torch.no_grad()
def loss_behind(model, memory: torch.Tensor | None, text: torch.Tensor) -> float:
    """Return the loss of a text's tokens 34-36, with `memory` (or nothing) read before token 33."""
    cache = BeaconCache() if memory is None else model.condense(memory)
    logits = model(text[:, 32:36], past_key_values=cache).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 33:36].flatten()).item()


def test_own_memory_predicts_better_than_none_or_another():
    """Two intervals of 16 are condensed when token 33 is read, so only eight beacons can predict the next tokens."""
    rng = torch.Generator().manual_seed(0)
    base = trained_base(rng)
    model = get_peft_model(base, BeaconConfig(interval=16, window=64, headroom=0, ratio=4))
    judged = documents(256, 40, torch.Generator().manual_seed(99))
    before = loss_behind(model.eval(), judged[:, :32], judged)
    alone = loss_behind(model, None, judged)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    model.train()
    for step in range(25):
        set_ratio_step(model, step)
        ids = documents(32, 40, rng)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        if step == 0:
            assert check_beacon_gradients(model) > 0
        optimizer.step()

    model.eval()
    own = loss_behind(model, judged[:, :32], judged)
    anothers = loss_behind(model, judged[:, :32].roll(1, 0), judged)
    assert own < alone - 0.25
    assert own < before - 0.15
    assert anothers > own + 0.4
    assert loss_behind(model, None, judged) == alone  # short texts are unchanged
