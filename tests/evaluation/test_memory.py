import pytest
import torch
from transformers import LlamaConfig

from pose_plugin.errors import PoSEError
from pose_plugin.evaluation import memory
from pose_plugin.evaluation.memory import LOGIT_BYTES, estimate_bytes, fitting_batch, in_batches
from pose_plugin.evaluation.passkey import passkey

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16)  # fmt: skip


def test_estimate_by_hand():
    per_token = 8 * 64 + 3 * 128 + 2 * 16 * 2 * 3
    assert estimate_bytes(CONFIG, 2, 100, 2) == 2 * 100 * per_token * 2 + LOGIT_BYTES
    scores = estimate_bytes(CONFIG, 2, 100, 2, "eager") - estimate_bytes(CONFIG, 2, 100, 2)
    assert scores == 2 * 2 * 4 * 100**2 * 4


def test_batch_shrinks_until_it_fits_and_one_that_cannot_is_an_error(make_llama, monkeypatch):
    model, cpu = make_llama(), torch.device("cpu")
    for_two = estimate_bytes(model.config, 2, 1000, 4)
    monkeypatch.setattr(memory, "available_bytes", lambda device: for_two)
    assert fitting_batch(model, cpu, 1000, 8) == 2
    assert fitting_batch(model, cpu, 10, 8) == 8
    monkeypatch.setattr(memory, "available_bytes", lambda device: LOGIT_BYTES)
    with pytest.raises(PoSEError, match=r"length=1000 needs about .* free on cpu; .*shorter lengths"):
        fitting_batch(model, cpu, 1000, 8)
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    assert fitting_batch(model, cpu, 1000, 8) == 8


def test_memory_is_checked_for_all_lengths_before_the_model_runs(make_llama, tokenizer, monkeypatch):
    model = make_llama()
    monkeypatch.setattr(memory, "available_bytes", lambda device: estimate_bytes(model.config, 1, 300, 4))
    monkeypatch.setattr(model, "forward", lambda **kw: pytest.fail("ran"))
    with pytest.raises(PoSEError, match="length=2048"):
        passkey(model, tokenizer, [256, 2048], trials=1, progress=False)


def test_out_of_memory_halves_the_batch():
    sizes = []

    def run(rows):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("full")
        return list(rows)

    assert [row for part in in_batches(range(7), 5, run) for row in part] == list(range(7))
    assert sizes == [5, 2, 2, 2, 1]


def test_out_of_memory_with_one_row_is_a_clear_error():
    def run(rows):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(PoSEError, match="batch_size=1"):
        list(in_batches(range(3), 2, run))


def test_free_memory_of_this_machine():
    free = memory.available_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 2**50
    assert memory.available_bytes(torch.device("meta")) is None
