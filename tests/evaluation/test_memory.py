import pytest
import torch
from transformers import LlamaConfig

from pose_plugin.evaluation import memory
from pose_plugin.evaluation.measures.passkey import passkey
from pose_plugin.evaluation.memory import LOGIT_BYTES, Fit, estimate_bytes, fitting, in_batches
from pose_plugin.utils.errors import PoSEError

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16)  # fmt: skip


def test_estimate_by_hand():
    per_token = 8 * 64 + 3 * 128 + 2 * 16 * 2 * 3
    assert estimate_bytes(CONFIG, 2, 100, 2) == 2 * 100 * per_token * 2 + LOGIT_BYTES
    scores = estimate_bytes(CONFIG, 2, 100, 2, "eager") - estimate_bytes(CONFIG, 2, 100, 2)
    assert scores == 2 * 2 * 4 * 100**2 * 4
    # In chunks: the cache is whole and one layer of it is copied, all else is of 30 tokens, and each chunk has a mask.
    layer, cache = 8 * 64 + 3 * 128, 2 * 16 * 2 * 3
    chunked = 2 * (30 * layer + 100 * cache + 100 * cache // 3) * 2 + 4 * 2 * 30 * 100
    assert estimate_bytes(CONFIG, 2, 100, 2, chunk=30) == chunked + LOGIT_BYTES
    assert estimate_bytes(CONFIG, 2, 100, 2, "eager", 30) == chunked + 2 * 2 * 4 * 30 * 100 * 4 + LOGIT_BYTES


def test_batch_shrinks_until_it_fits_then_the_text_is_read_in_chunks_and_what_cannot_is_an_error(
    make_llama, monkeypatch
):
    model, cpu = make_llama(), torch.device("cpu")

    def fit(free, length, wanted):
        monkeypatch.setattr(memory, "available_bytes", lambda device: free)
        return fitting(model, cpu, length, wanted)

    two = estimate_bytes(model.config, 2, 1000, 4)
    assert fit(two, 1000, 8) == Fit(2, None, two)
    assert fit(two, 10, 8).batch == 8
    in_chunks = estimate_bytes(model.config, 1, 20000, 4, chunk=256)
    assert fit(in_chunks, 20000, 8) == Fit(1, 256, in_chunks)
    with pytest.raises(PoSEError, match=r"length=1000 needs about .* free on cpu; .*shorter lengths"):
        fit(LOGIT_BYTES, 1000, 8)
    assert fit(None, 1000, 8).batch == 8


@pytest.mark.parametrize("kind", ["whole", "sliding", "bare"])
def test_reading_in_chunks_changes_no_answer(make_llama, kind, tokenizer):
    """Losses, last logits and greedy tokens are those of one forward; also with a window shorter than the chunk."""
    from transformers import MistralConfig, MistralForCausalLM

    from pose_plugin.evaluation.losses import TokenLoss
    from pose_plugin.evaluation.model import greedy, last_logits

    model = make_llama()
    if kind == "sliding":
        torch.manual_seed(0)
        model = MistralForCausalLM(MistralConfig(**(model.config.to_dict() | {"sliding_window": 24}))).eval()
    ids = torch.randint(0, 400, (2, 101), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = TokenLoss(model)
        if kind == "bare":
            loss.at_head, loss.rows = False, 26
        torch.testing.assert_close(loss(ids, 32), loss(ids), rtol=1e-4, atol=1e-4)
        for keep in (1, 6):
            torch.testing.assert_close(last_logits(model, ids, keep, 32), last_logits(model, ids, keep),
                                       rtol=1e-4, atol=1e-4)  # fmt: skip
        assert greedy(model, ids, 5, 32).equal(greedy(model, ids, 5))


def test_there_is_room_if_small_pieces_fit(monkeypatch):
    needed, cpu = estimate_bytes(CONFIG, 1, 20000, 2, chunk=256), torch.device("cpu")
    assert needed < estimate_bytes(CONFIG, 1, 20000, 2)
    for free in (needed, None):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        memory.require_room(CONFIG, 20000, cpu)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    with pytest.raises(memory.TooLittleMemory, match=r"length=20000 needs about 0\..* are free on cpu; use shorter"):
        memory.require_room(CONFIG, 20000, cpu)


def test_memory_is_checked_for_all_lengths_before_the_model_runs(make_llama, tokenizer, monkeypatch):
    model = make_llama()
    monkeypatch.setattr(memory, "available_bytes", lambda device: LOGIT_BYTES + 2**20)
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


def test_files_that_were_read_leave_a_container_free(tmp_path, monkeypatch):
    """They count as used until somebody needs the room: of a limit of 1 MiB, 15/16 hold files here."""
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    files = {"memory.max": "1048576", "memory.current": "1044480"}
    files["memory.stat"] = "anon 61440\ninactive_file 524288\nactive_file 393216\nslab_reclaimable 65536\nshmem 4096"
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    assert memory.available_bytes(torch.device("cpu")) == 1048576 - 1044480 + 524288 + 393216 + 65536
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(torch.device("cpu")) > 2**21
