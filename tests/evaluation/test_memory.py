import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from pose_plugin.evaluation import memory
from pose_plugin.evaluation.generation import generate
from pose_plugin.evaluation.measures.haystack import Haystack, Wording
from pose_plugin.evaluation.measures.passkey import passkey
from pose_plugin.evaluation.memory import (
    LOGIT_BYTES,
    duration,
    estimate_bytes,
    forecast,
    in_batches,
    operations,
    tokens_at_once,
)
from pose_plugin.evaluation.model import continues, evaluating, greedy, prefill
from pose_plugin.evaluation.prompts import token_ids
from pose_plugin.evaluation.results import Work
from pose_plugin.evaluation.sharded import InStep
from pose_plugin.utils.errors import PoSEError
from tests.models import LAYERS, build, small_config

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16)  # fmt: skip


def test_estimate_by_hand():
    per_token = 8 * 64 + 3 * 128 + 2 * 16 * 2 * 3
    assert estimate_bytes(CONFIG, 100, 200) == 2 * 100 * per_token * 2 + LOGIT_BYTES
    scores = estimate_bytes(CONFIG, 100, 200, eager=True) - estimate_bytes(CONFIG, 100, 200)
    assert scores == 2 * 2 * 4 * 100**2 * 4
    # In chunks: the cache is whole and one layer of it is copied, all else is of 30 tokens, and each chunk has a mask.
    layer, cache = 8 * 64 + 3 * 128, 2 * 16 * 2 * 3
    chunked = (30 * layer + 100 * cache + 100 * cache // 3) * 2 + 4 * 30 * 100
    assert estimate_bytes(CONFIG, 100, 30) == chunked + LOGIT_BYTES
    assert estimate_bytes(CONFIG, 100, 30, eager=True) == chunked + 2 * 4 * 30 * 100 * 4 + LOGIT_BYTES


def test_batch_shrinks_until_it_fits_then_the_text_is_read_in_chunks_and_what_cannot_is_an_error(
    make_llama, monkeypatch
):
    model = make_llama()

    def fit(free, length, batch_size):
        monkeypatch.setattr(memory, "available_bytes", lambda device: free)
        return tokens_at_once(model, length, batch_size)

    two = estimate_bytes(model.config, 1000, 2000, 4)
    assert fit(two, 1000, 8) == 2000
    assert fit(two, 10, 8) == 80
    assert fit(estimate_bytes(model.config, 20000, 312, 4), 20000, 1) == 312
    with pytest.raises(PoSEError, match=r"length=1000 needs about .* free on cpu"):
        fit(LOGIT_BYTES, 1000, 8)
    assert fit(None, 1000, 8) == 8000


@pytest.mark.parametrize("kind", ["whole", "sliding", "bare"])
def test_reading_in_chunks_changes_no_answer(make_llama, kind, tokenizer):
    """Losses, last logits and greedy tokens are those of one forward; also with a window shorter than the chunk."""
    from transformers import MistralConfig, MistralForCausalLM

    from pose_plugin.evaluation.losses import TokenLoss

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
        torch.testing.assert_close(prefill(model, ids, 32)[0], prefill(model, ids)[0], rtol=1e-4, atol=1e-4)
        assert greedy(model, ids, 5, 32).equal(greedy(model, ids, 5))


def test_there_is_room_if_small_pieces_fit(monkeypatch):
    needed, cpu = estimate_bytes(CONFIG, 20000, 256), torch.device("cpu")
    assert needed < estimate_bytes(CONFIG, 20000, 20000)
    for free in (needed, None):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        memory.require_room(CONFIG, 20000, cpu)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    with pytest.raises(memory.TooLittleMemory, match=r"length=20000 needs about 0\..* are free on cpu"):
        memory.require_room(CONFIG, 20000, cpu)


def test_memory_is_checked_for_all_lengths_before_the_model_runs(make_llama, tokenizer, monkeypatch):
    model = make_llama()
    monkeypatch.setattr(memory, "available_bytes", lambda device: LOGIT_BYTES + 2**20)
    monkeypatch.setattr(model, "forward", lambda **kw: pytest.fail("ran"))
    with pytest.raises(PoSEError, match="length=2048"):
        passkey(model, tokenizer, [256, 2048], trials=1, progress=False)


def test_out_of_memory_halves_the_batch(make_llama):
    sizes = []

    def run(rows, chunk):
        sizes.append((len(rows), chunk))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("full")
        return list(rows)

    assert in_batches(make_llama(), range(7), 100, run, 5) == list(range(7))
    assert sizes == [(5, None), (2, None), (2, None), (2, None), (1, None)]


def test_only_ranks_in_the_same_forward_do_not_begin_again(make_llama, monkeypatch):
    """Under DDP each process has a model of its own, and finds what one process finds."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(memory, "gather", lambda value: [value])
    model, sizes = make_llama(), []

    def run(rows, chunk):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("full")
        return list(rows)

    assert in_batches(model, range(3), 100, run, 5) == [0, 1, 2] and sizes == [3, 2, 1]
    with pytest.raises(memory.TooLittleMemory, match="out of memory with 500 tokens"):
        in_batches(InStep(model, model, torch.device("cpu")), range(3), 100, run, 5)
    model.lm_head.weight.device_mesh = "tensor parallel"
    with pytest.raises(memory.TooLittleMemory, match="out of memory with 500 tokens"):
        in_batches(model, range(3), 100, run, 5)


def test_out_of_memory_with_one_row_reads_it_in_chunks(make_llama):
    sizes = []

    def run(rows, chunk):
        sizes.append((len(rows), chunk))
        if chunk is None or chunk > 300:
            raise torch.OutOfMemoryError("full")
        return list(rows)

    assert in_batches(make_llama(), range(2), 1000, run, 1) == [0, 1]
    assert sizes == [(1, None), (1, 500), (1, 250), (1, 250)]


def test_out_of_memory_with_the_smallest_chunk_is_an_error(make_llama):
    def run(rows, chunk):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(memory.TooLittleMemory, match="length=1000"):
        in_batches(make_llama(), range(3), 1000, run)


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


def test_the_limit_of_a_container_of_cgroup_v1(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    files = {"memory.limit_in_bytes": "1048576", "memory.usage_in_bytes": "1044480"}
    # Groups within the container use memory too; only the totals say how much of it holds files.
    files["memory.stat"] = "inactive_file 1\nactive_file 1\ntotal_inactive_file 524288\ntotal_active_file 393216"
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / "memory" / name).write_text(content + "\n")
    assert memory.available_bytes(torch.device("cpu")) == 1048576 - 1044480 + 524288 + 393216
    # What v1 writes if there is no limit.
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert 2**21 < memory.available_bytes(torch.device("cpu")) < 2**50


# --- the forecast ---------------------------------------------------------------------------------------------------


def test_operations_by_hand(make_llama):
    model = make_llama()
    weights = sum(p.numel() for p in model.parameters()) - 400 * 32
    assert operations(model, 10) == 2 * weights * 10 + 2 * 2 * 32 * 100


@pytest.mark.parametrize(("maximum", "probe"), [(4096, 512), (64, 64)])
def test_a_forecast_goes_by_operations(make_llama, monkeypatch, maximum, probe):
    """The timed forward stays within the positions of the model."""
    model, timed = make_llama(max_position_embeddings=maximum), []
    monkeypatch.setattr(memory, "_seconds", lambda model, length: timed.append(length) or 3.0)
    works = [("passkey", Work(512, 4)), ("needle", Work(2048, 2, steps=3)), ("harness", Work(512, 0))]
    short, long, unknown, together = forecast(model, works).splitlines()
    per_second = operations(model, probe) / 3.0
    seconds = [4 * operations(model, 512) / per_second]
    seconds.append(2 * (operations(model, 2048) + 3 * operations(model, 1)) / per_second)
    assert timed == [probe] and f"512 tokens ×     4  about {duration(seconds[0])}, " in short
    assert f"2048 tokens ×     2  about {duration(seconds[1])}, " in long and "GiB" in long
    assert "harness     not estimated" in unknown and together.endswith(duration(sum(seconds)))


def test_the_forecast_of_haystacks_reads_a_text_once_and_the_questions_token_by_token(
    make_llama, tokenizer, monkeypatch
):
    """Of two facts, 300 tokens hold one."""
    wording = Wording(question="{name}?", names=("Ann", "Bartholomew"), digits=4)
    measure = Haystack(texts=["One text.", "Another one."], facts=2, wording=wording, progress=False)
    measure.prepare(tokenizer, [300, 600])
    model = make_llama(max_position_embeddings=4096)
    monkeypatch.setattr(memory, "_seconds", lambda model, length: 3.0)
    exact = "{:.6g}".format
    monkeypatch.setattr(memory, "duration", exact)
    *lines, together = forecast(model, [("haystack", measure.work(length)) for length in (300, 600)]).splitlines()
    # The longer question, the digits, and a space and a line break before them.
    steps, seconds = len(token_ids(tokenizer, "Bartholomew?")) + 4 + 2, []
    for line, length, facts in zip(lines, (300, 600), (1, 2), strict=True):
        per_text = operations(model, length) + facts * steps * operations(model, 1)
        seconds.append(2 * per_text / (operations(model, memory.PROBE) / 3.0))
        assert f"haystack         {length} tokens ×     2  about {exact(seconds[-1])}, " in line
    assert together.endswith(exact(sum(seconds)))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "least"),
    [
        (LONGROPE, 1000),
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, 1000),
        (DYNAMIC, 1000),
        ({**LONGROPE, "short_factor": [4.0] * 4}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
    ],
)
def test_a_text_whose_length_decides_the_frequencies_is_read_whole(make_llama, monkeypatch, rope, least):
    """By pieces, the first tokens would be rotated as in a short text, and the losses would be others."""
    model = make_llama()
    model.config.rope_parameters = rope
    monkeypatch.setattr(memory, "available_bytes", lambda device: 700)
    monkeypatch.setattr(memory, "bytes_needed", lambda model, length, tokens: tokens)
    sizes = []

    def full(rows, chunk):
        sizes.append(chunk)
        raise torch.OutOfMemoryError("full")

    if least == 256:
        assert tokens_at_once(model, 1000, 1) == 500
    else:
        with pytest.raises(memory.TooLittleMemory, match="length=1000 needs about"):
            tokens_at_once(model, 1000, 1)
    # Shorter texts have the frequencies of a short text in any case.
    assert memory.fewest_tokens(model.config, 1000) == least and memory.fewest_tokens(model.config, 200) == 200
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    with pytest.raises(memory.TooLittleMemory, match="out of memory with"):
        in_batches(model, range(2), 1000, full, 2)
    assert sizes == [None, None] + ([500, 250] if least == 256 else [])


def test_dynamic_frequencies_do_not_depend_on_what_was_read_before(make_llama):
    model = make_llama(rope_parameters=dict(DYNAMIC), max_position_embeddings=64)
    ids = torch.randint(0, 400, (1, 200), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(2):
        with evaluating(model):
            found.append(prefill(model, ids[:, :100])[0])
        with evaluating(model):
            prefill(model, ids)
        # A step of the training has exactly the base's window, which transformers does not take for a short text.
        found.append(model(ids[:, :64]).logits[:, -1])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert torch.equal(found[1], make_llama(max_position_embeddings=64)(ids[:, :64]).logits[:, -1])


@pytest.mark.parametrize("shared", [0, 58])
@pytest.mark.parametrize("asked", [(2, 3), (3, 4), (9, 3), (20, 30)])
def test_an_answer_beyond_the_short_factors_is_that_of_the_long_ones(make_llama, shared, asked):
    """Whether the question crosses the old window, or the answer; each token is as if all were read anew."""
    model = make_llama(rope_parameters={**LONGROPE, "original_max_position_embeddings": 64})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            # Far keys count: in a new model, attention is nearly even.
            layer.self_attn.q_proj.weight *= 20
            layer.self_attn.k_proj.weight *= 20
    text, *tails = (torch.randint(3, 48, (n,), generator=draw).tolist() for n in (58, *asked))
    questions = [SimpleNamespace(ids=[*text, *ids], budget=5, shared=shared) for ids in tails]
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda tokens, **options: tokens)
    model.generation_config.eos_token_id = None
    found: list[list[int]] = []
    generate(model, tokenizer, questions, lambda question, tokens: found.append(tokens), 90)
    for question, tokens in zip(questions, found, strict=True):
        ids = list(question.ids)
        for token in tokens:
            with evaluating(model):
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


class Forgetful(DynamicCache):
    """Of a model that begins anew with each piece of several tokens, as Bamba in transformers 5.16 does."""

    @classmethod
    def of(cls, model):
        own = model.forward

        @functools.wraps(own)
        def forward(*args, **given):
            name = next((name for name in ("cache", "past_key_values") if name in given), None)
            if name is not None and given["input_ids"].shape[1] > 1:
                given[name] = cls()
            return own(*args, **given)

        model.forward = forward
        return model


@pytest.mark.parametrize(
    ("make", "goes_on"),
    [
        (lambda llama: Forgetful.of(llama), False),
        (lambda llama: build(small_config("lfm2", layer_types=["conv", "full_attention"])), True),
        (lambda llama: build(small_config("olmo3", **LAYERS)), True),
        (lambda llama: llama, True),
    ],
)
def test_layers_that_forget_what_is_before_a_piece_are_found_out(make_llama, make, goes_on):
    """Each question about a text is then read with the text."""
    model, draw = make(make_llama()), torch.Generator().manual_seed(0)
    text, *asked = (torch.randint(3, 48, (n,), generator=draw).tolist() for n in (40, 3, 5))
    questions = [SimpleNamespace(ids=[*text, *ids], budget=4, shared=40) for ids in asked]
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda tokens, **options: tokens)
    with evaluating(model):
        assert continues(model) == continues(model, prefill(model, torch.tensor([text]))[1]) == goes_on
        whole = [greedy(model, torch.tensor([question.ids]), 4)[0].tolist() for question in questions]
    model.generation_config.eos_token_id = None
    found: list[list[int]] = []
    generate(model, tokenizer, questions, lambda question, tokens: found.append(tokens), 50)
    assert found == whole


def test_a_model_whose_layers_forget_is_not_read_in_pieces(make_llama, monkeypatch):
    model, read = Forgetful.of(make_llama()), []
    monkeypatch.setattr(memory, "available_bytes", lambda device: 700)
    monkeypatch.setattr(memory, "bytes_needed", lambda model, length, tokens: tokens)
    with pytest.raises(memory.TooLittleMemory, match=r"length=1000: .* LlamaForCausalLM has layers that forget"):
        in_batches(model, range(2), 1000, lambda rows, chunk: read.append(chunk), 1)
    assert read == []
    assert in_batches(model, range(2), 600, lambda rows, chunk: [chunk], 1) == [None, None]
