"""Context parallelism splits rows over ranks: plain positions arrive whole, skipped ones do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")

from pose_plugin import PoSECollator
from tests.forked import good_ranks
from tests.models import make_llama, make_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.once]
ROWS = [{"input_ids": list(range(30, 30 + length)), "labels": list(range(30, 30 + length))} for length in (64, 40)]


def batch_of(sampler: str, rows=ROWS):
    return PoSECollator(make_tokenizer(), target_length=512, sampler=sampler)(rows)


def pairs(batch):
    """(row, token, position) of every token that is not padding."""
    ids, positions, mask = (batch[key] for key in ("input_ids", "position_ids", "attention_mask"))
    found = set()
    for row in range(len(ids)):
        kept = mask[row].bool()
        found |= {(row, *each) for each in zip(ids[row][kept].tolist(), positions[row][kept].tolist(), strict=True)}
    return found


def over_torch(sampler):
    """accelerate's cp_backend "torch", as transformers' Trainer calls it; then a forward and backward by parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo")
    batch = batch_of(sampler)
    buffers = [batch[key] for key in ("input_ids", "position_ids", "attention_mask")]
    mesh = init_device_mesh("cpu", (2,))
    model = make_llama()
    whole = model.model.rotary_emb(torch.zeros(1, 1), batch["position_ids"])
    before = {pair: i for i, pair in enumerate(sorted(pairs(batch)))}
    table = {
        (row, int(batch["position_ids"][row, at])): whole[0][row, at].tolist()
        for row in range(2)
        for at in range(batch["position_ids"].shape[1])
    }
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        assert batch["input_ids"].shape[1] == 32
        part = pairs(batch)
        cos, _ = model.model.rotary_emb(torch.zeros(1, 1), batch["position_ids"])
        for row in range(2):
            for at in range(32):
                assert cos[row, at].tolist() == table[row, int(batch["position_ids"][row, at])]
    dist.destroy_process_group()
    assert part <= before.keys()
    return part


def test_torch_splits_plain_positions_with_their_tokens():
    first, second = (rank.value for rank in good_ranks(over_torch, "none"))
    assert not first & second and first | second == pairs(batch_of("none"))


def over_axolotl(sampler, rows, rank):
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from axolotl.utils.ctx_managers import sequence_parallel as module

    told = []
    module.update_ring_attn_params = lambda position_ids: told.append(position_ids.tolist())
    batch = batch_of(sampler, rows)
    batch, _, _ = module.apply_sequence_parallelism(dict(batch), rank, 2, 1, None)
    return pairs(batch), told


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["two rows", "one row"])
def test_axolotl_splits_plain_positions_with_their_tokens(rows, monkeypatch):
    parts = [over_axolotl("none", rows, rank) for rank in (0, 1)]
    (first, told), (second, _) = parts
    assert not first & second and first | second == pairs(batch_of("none", rows))
    # Ring attention reads from the positions where documents begin: one row is one document.
    assert told == ([] if len(rows) > 1 else [[list(range(64))]])


def test_axolotl_loses_skipped_positions():
    """Why samplers that skip are refused: with two rows the positions are replaced, without a message."""
    first, second = (over_axolotl("pose", ROWS, rank)[0] for rank in (0, 1))
    assert max(place for _, _, place in pairs(batch_of("pose"))) > 64
    assert first | second == pairs(batch_of("none"))
