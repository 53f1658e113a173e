"""`evaluate:` without a run: what each task needs, and ranks in step."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pose_plugin import extend_context
from pose_plugin.config import parse_settings
from pose_plugin.evaluation import block, callback, memory
from pose_plugin.evaluation.block import LongPPLTask, ShortGuard, from_settings
from pose_plugin.evaluation.callback import EvaluationCallback
from pose_plugin.evaluation.measures.longppl import KeyTokens
from pose_plugin.evaluation.measures.perplexity import perplexity
from pose_plugin.evaluation.sharded import InStep, agreed, divided, in_step, require_same_plan
from pose_plugin.utils.errors import PoSEError
from tests.forked import ranks

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
QUIET = {"progress": False, "batch_size": None}


@pytest.fixture
def judge(tmp_path, make_llama, tokenizer):
    make_llama().save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


def test_the_guard_takes_the_window_that_extend_context_has_noted(make_llama, tokenizer):
    model = make_llama()
    guard = ShortGuard([TEXT], None, 64, 2, QUIET)
    guard.prepare(make_llama(), tokenizer)
    assert guard.length == 64
    model.config = extend_context(model.config, 1024, "linear")
    guard = ShortGuard([TEXT], None, 64, 2, QUIET)
    guard.prepare(model, tokenizer)
    found = guard(model, tokenizer)
    expected = perplexity(model, tokenizer, [TEXT], [256], max_windows=2, progress=False).by_length[256].perplexity
    assert found.metrics() == {"short_perplexity/256": expected}
    assert found.definition.startswith("Short-context guard, at the window that the base was made with. Sliding-window")
    with pytest.raises(PoSEError, match=r"short, evaluate.short_length=9000: length=9000 is more than the longest"):
        ShortGuard([TEXT], 9000, None, 2, QUIET).prepare(model, tokenizer)


def test_longppl_asks_its_evaluator_once_and_leaves_no_trace(judge, make_llama, tokenizer, monkeypatch):
    asked = []

    def keys(model, tokenizer, texts, n, short, name, **options):
        asked.append((n, short, name))
        torch.rand(3), random.random(), np.random.rand()
        return KeyTokens(name, n, short, 2.0, -2.0, ((n - 1, n - 2),) if n > 100 else ((),))

    monkeypatch.setattr(block, "key_tokens", keys)
    task = LongPPLTask([TEXT], [80, 128, 200], 64, judge, QUIET)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    task.prepare(make_llama(), tokenizer)
    task.prepare(make_llama(), tokenizer)
    assert (torch.get_rng_state().equal(states[0]), random.getstate()) == (True, states[1])
    assert np.random.get_state()[1].tolist() == states[2]
    assert asked == [(80, 64, "judge"), (128, 64, "judge"), (200, 64, "judge")]
    found = task(make_llama(), tokenizer)
    # No key token at 80, so it is not measured there.
    assert list(found.metrics()) == ["longppl/128", "longppl/200"]
    assert [w.tokens for w in found.by_length.values()] == [2, 2] and "the evaluator, judge" in found.definition


def test_longppl_without_key_tokens_or_with_another_tokenizer_is_refused(judge, make_llama, tokenizers_by_name):
    task = LongPPLTask([TEXT], [128], 64, judge, QUIET)
    with pytest.raises(PoSEError, match=r"by judge no token of evaluate.texts gains .* last 64 tokens, at 128"):
        task.prepare(make_llama(), tokenizers_by_name["single digits"])
    with pytest.raises(PoSEError, match="the trained model and the evaluator judge have different tokenizers"):
        task.prepare(make_llama(1600), tokenizers_by_name["joined digits"])


def test_a_pad_token_more_is_no_other_tokenizer(judge, make_llama, monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    monkeypatch.setattr(block, "key_tokens", lambda *a, **k: KeyTokens("judge", 128, 64, 2.0, -2.0, ((100,),)))
    LongPPLTask([TEXT], [128], 64, judge, QUIET).prepare(make_llama(), tokenizer)


def test_longppl_needs_a_length_beyond_its_short_context(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text(" \n")
    asked = {"tasks": "longppl", "texts": str(tmp_path / "text.txt"), "evaluator": "judge", "lengths": [64, 128]}
    make = lambda **changes: from_settings(  # noqa: E731 - once
        parse_settings({"target_length": 256, "train_length": 128, "evaluate": {**asked, **changes}})
    )
    with pytest.raises(PoSEError, match="longppl compares with the last 128 tokens, and no length"):
        make()
    assert make(short_context=64).more["longppl"].lengths == [128]
    with pytest.raises(PoSEError, match=r"evaluate.texts: .*empty.txt is empty"):
        make(texts=str(tmp_path / "empty.txt"))


# --- ranks in step --------------------------------------------------------------------------------------------------


def test_what_is_divided(make_llama):
    model = make_llama()
    assert divided(model) is None and in_step(model, None) is model
    fsdp = make_llama()
    fsdp.model.layers[0].__class__ = type("L", (type(fsdp.model.layers[0]), type("FSDPModule", (), {})), {})
    assert divided(fsdp) == "FSDP2"
    model.lm_head.weight.ds_id = 0  # what ZeRO-3 leaves on a parameter
    assert divided(model) == "ZeRO-3"
    with pytest.raises(PoSEError, match="under ZeRO-3 needs a transformers Trainer"):
        in_step(model, None)
    trainer = SimpleNamespace(model_wrapped=model, args=SimpleNamespace(device=torch.device("meta")))
    assert in_step(model, trainer).device.type == "meta"


def test_the_memory_of_gathered_weights_is_counted(make_llama):
    model = make_llama()
    numbers, embedding = sum(p.numel() for p in model.parameters()), 400 * 32
    whole = InStep(model, model, torch.device("cpu"))
    assert whole.gathered_bytes == 4 * (2 * numbers // 2 + 2 * embedding)
    one = memory.fitting(model, torch.device("cpu"), 64, 1)
    assert memory.fitting(whole, torch.device("cpu"), 64, 1).bytes == one.bytes + whole.gathered_bytes


def _rank(make):
    """Rank 1 has less memory, another opinion and another plan."""
    import os

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    model = make()
    model = InStep(model, model, torch.device("cpu"))
    memory.available_bytes = lambda device: 2**40 if rank == 0 else memory.LOGIT_BYTES + 2**21
    fit = memory.fitting(model, torch.device("cpu"), 256, 64)
    tight = memory.LOGIT_BYTES if rank else 2**40
    memory.available_bytes = lambda device: tight
    try:
        memory.fitting(model, torch.device("cpu"), 256, 64)
        refused = ""
    except PoSEError as error:
        refused = str(error)
    require_same_plan(model, "same")
    try:
        require_same_plan(model, f"text of rank {rank}")
        plan = ""
    except PoSEError as error:
        plan = str(error)
    return fit.batch, refused, agreed(model, rank), agreed(model.model, rank), plan


def test_ranks_decide_together(make_llama):
    first, second = (one.value for one in ranks(_rank, make_llama))
    assert first[0] == second[0] < 64
    assert all("length=256 needs about" in one[1] for one in (first, second))
    assert (first[2], second[2]) == (0, 0) and (first[3], second[3]) == (0, 1)
    assert first[4] == second[4] and "on rank 1 are not those of rank 0" in first[4]


def test_a_rank_without_memory_ends_the_run_where_the_others_would_wait(make_llama, tokenizer, tmp_path, monkeypatch):
    from tests.evaluation.test_callback import train

    def full(model, tokenizer):
        raise memory.TooLittleMemory("full") from torch.OutOfMemoryError("full")

    def refused(model, tokenizer):
        raise memory.TooLittleMemory("found before it ran, on all ranks alike")

    def odd(model, tokenizer):
        raise IndexError("on this rank alone, for all one knows")

    monkeypatch.setattr(callback, "in_step", lambda model, trainer: InStep(model, model, torch.device("cpu")))
    with pytest.raises(IndexError):
        train(make_llama(), tokenizer, tmp_path, [EvaluationCallback(more={"x": odd}, every=1)])
    run = train(make_llama(), tokenizer, tmp_path, [EvaluationCallback(more={"x": refused}, every=1)])
    assert run.state.global_step == 4
    with pytest.raises(memory.TooLittleMemory, match="full"):
        train(make_llama(), tokenizer, tmp_path, [EvaluationCallback(more={"x": full}, every=1)])


def test_lengths_that_do_not_fit_are_left_out_and_named_once(make_llama, tokenizer, tmp_path, monkeypatch, caplog):
    """As in the command: what fits is measured, to the same figures as without the long lengths."""
    from tests.evaluation.test_callback import train

    (tmp_path / "text.txt").write_text(TEXT * 30)
    asked = {"tasks": ["passkey", "perplexity", "needle", "topics"], "texts": str(tmp_path / "text.txt"),
             "trials": 2, "max_windows": 2, "at_start": True}  # fmt: skip

    def history(lengths):
        settings = {"target_length": 16000, "train_length": 128, "evaluate": {**asked, "lengths": lengths}}
        watch = from_settings(parse_settings(settings))
        torch.manual_seed(4)  # of the rows that are trained on
        rows = train(make_llama(), tokenizer, tmp_path, [watch]).state.log_history
        return [{k: v for k, v in row.items() if k != "epoch"} for row in rows if "passkey/1000" in row], watch

    short, _ = history([1000])
    monkeypatch.setattr(memory, "available_bytes", lambda device: memory.LOGIT_BYTES + 2**22)
    with caplog.at_level("WARNING"):
        found, watch = history([16000, 1000, 8000])
    # The texts that fill the longest length are measured at every length, so perplexity may be that of fewer texts.
    # Batches are smaller where there is less memory, which may round otherwise.
    assert len(found) == 2 and found == [pytest.approx(row, rel=1e-4) for row in short]
    assert {"passkey/1000", "perplexity/1000", "needle/kv/1000", "topics/first/1000"} <= found[0].keys()
    assert watch.results[0][1].lengths == [1000] and list(watch.results[0][2].by_length) == [1000]
    for name in asked["tasks"]:
        told = [each for each in caplog.messages if each.startswith(f"{name} is not measured at 8000, 16000")]
        assert len(told) == 1 and "length=8000 needs about" in told[0] and "free on cpu" in told[0]


def test_a_length_that_runs_out_of_memory_half_way_takes_nothing_else_along(make_llama, tokenizer, monkeypatch, caplog):
    from pose_plugin.evaluation.by_length import ByLength
    from pose_plugin.evaluation.measures.passkey import PasskeyResult, passkey

    def measure(model, tokenizer, n):
        if n == 220 and full:
            raise memory.TooLittleMemory("full") from torch.OutOfMemoryError("full")
        return passkey(model, tokenizer, [n], trials=1, progress=False)

    full, model = True, make_llama()
    watch = ByLength("passkey", [240, 220, 200], measure, PasskeyResult)
    with caplog.at_level("WARNING"):
        assert watch(model, tokenizer).lengths == watch(model, tokenizer).lengths == [200]
    assert caplog.messages == ["passkey is not measured at 220, 240, the rest is: full"]
    # Memory may come back, and the longer ones with it.
    full = False
    assert watch(model, tokenizer) == passkey(model, tokenizer, [200, 220, 240], trials=1, progress=False)
    # Ranks that go in step would wait for one that stops; what is foreseen is foreseen by all of them.
    full = True
    with pytest.raises(memory.TooLittleMemory):
        watch(InStep(model, model, torch.device("cpu")), tokenizer)
    nothing = ByLength("passkey", [220], measure, PasskeyResult)
    with pytest.raises(memory.TooLittleMemory):
        nothing(model, tokenizer)
