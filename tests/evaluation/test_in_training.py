"""Measures while training that need more than a model: a base window, an evaluator, ranks in step."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import Field

from pose_plugin import extend_context
from pose_plugin.config import parse_settings
from pose_plugin.evaluation import callback, memory
from pose_plugin.evaluation.callback import EvaluationCallback, from_settings
from pose_plugin.evaluation.measure import Measure, require_same_tokens
from pose_plugin.evaluation.measures.longppl import LongPPL
from pose_plugin.evaluation.measures.passkey import Passkey
from pose_plugin.evaluation.measures.perplexity import perplexity
from pose_plugin.evaluation.measures.short import Short
from pose_plugin.evaluation.results import joined
from pose_plugin.evaluation.sharded import InStep, agreed, divided, in_step, require_same_plan
from pose_plugin.utils.errors import PoSEError
from tests.evaluation.test_callback import train
from tests.forked import ranks

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def judge(tmp_path, make_llama, tokenizer):
    make_llama().save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


def prepared(measure, model, tokenizer, lengths=(128,), train_length=64):
    """The callback's copy of a measure, before the first step."""
    watch = EvaluationCallback([measure], lengths, train_length=train_length)
    watch.bind_trainer(SimpleNamespace(processing_class=tokenizer))
    watch._prepare(model)
    return watch.measures[0]


def test_the_guard_takes_the_window_that_extend_context_has_noted(make_llama, tokenizer):
    model = make_llama()
    guard = prepared(Short(texts=[TEXT], max_windows=2), model, tokenizer)
    # A model that nothing has stretched has the window of its config, as in the command.
    assert guard.pieces() == [256]
    model.config = extend_context(model.config, 1024, "linear")
    guard = prepared(Short(texts=[TEXT], max_windows=2, progress=False), model, tokenizer)
    assert guard.pieces() == [256]
    expected = perplexity(model, tokenizer, [TEXT], [256], max_windows=2, progress=False).by_length()[256].score
    assert guard.run(model, 256).metrics() == {"short_perplexity/256": expected}
    with pytest.raises(PoSEError, match=r"evaluate.tasks=short: short_length=9000"):
        prepared(Short(texts=[TEXT], short_length=9000), model, tokenizer)


class Asked(LongPPL):
    """LongPPL whose evaluator is not read: a key token at the end of lengths above 100."""

    def ask(self, evaluator, length):
        self.asked.append(length)
        torch.rand(3), random.random(), np.random.rand()
        if length < 100:
            raise PoSEError(f"length={length}: no token gains")
        return [[length - 1, length - 2]]

    asked: list[int] = Field([])


def test_longppl_asks_its_evaluator_once_and_leaves_no_trace(judge, make_llama, tokenizer, caplog):
    measure = Asked(texts=[TEXT], short_context=64, evaluator=judge)
    watch = EvaluationCallback([measure], [80, 128, 200])
    watch.bind_trainer(SimpleNamespace(processing_class=tokenizer))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with caplog.at_level("WARNING"):
        watch._prepare(make_llama())
        watch._prepare(make_llama())
    assert (torch.get_rng_state().equal(states[0]), random.getstate()) == (True, states[1])
    assert np.random.get_state()[1].tolist() == states[2]
    (own,) = watch.measures
    assert own.asked == [80, 128, 200] and "longppl is not measured at 80" in caplog.text
    found = joined(watch._parts(own, make_llama(), 1))
    # No key token at 80, so it is not measured there.
    assert list(found.metrics()) == ["longppl/128", "longppl/200"]
    assert [row.n for row in found.rows] == [2, 2] and f"the evaluator, {judge}" in found.definition


def test_longppl_without_key_tokens_or_with_another_tokenizer_is_refused(judge, make_llama, tokenizers_by_name):
    measure = LongPPL(texts=[TEXT], short_context=64, evaluator=judge)
    with pytest.raises(PoSEError, match=r"evaluate.tasks=longppl: length=128: no token gains"):
        prepared(measure, make_llama(), tokenizers_by_name["single digits"])
    with pytest.raises(PoSEError, match="the trained model and the evaluator judge have different tokenizers"):
        prepared(measure, make_llama(1600), tokenizers_by_name["joined digits"])


def test_a_pad_token_more_is_not_another_tokenizer(judge):
    from transformers import AutoTokenizer

    one, other = AutoTokenizer.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    other.add_special_tokens({"pad_token": "<pad>"})
    require_same_tokens(LongPPL(texts=[TEXT]), one, other, "judge", "base")


def test_a_text_of_a_word_does_not_hide_what_other_tokenizers_make(tokenizers_by_name):
    one, other = (tokenizers_by_name[name] for name in ("single digits", "joined digits"))
    with pytest.raises(PoSEError, match="base and the evaluator judge"):
        require_same_tokens(LongPPL(texts=["A", "of 12345"]), one, other, "judge", "base")


@pytest.mark.parametrize(("short", "lengths"), [(None, [256, 512]), (300, [512])])
def test_longppl_takes_the_lengths_beyond_its_short_context(tokenizer, short, lengths):
    measure = LongPPL(texts=[TEXT * 3], short_context=short)
    measure.prepare(tokenizer, [128, 256, 512], callback.Windows(trained=128))
    assert measure.pieces() == lengths
    with pytest.raises(PoSEError, match="short_context=128"):
        LongPPL(texts=[TEXT]).prepare(tokenizer, [64, 128], callback.Windows(trained=128))


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
    assert memory.bytes_needed(whole, 64, 64) == memory.bytes_needed(model, 64, 64) + whole.gathered_bytes


def _rank(make):
    """Rank 1 has less memory, another opinion and another plan."""
    import os

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    model = make()
    model = InStep(model, model, torch.device("cpu"))
    memory.available_bytes = lambda device: 2**40 if rank == 0 else memory.LOGIT_BYTES + 2**21
    tokens = memory.tokens_at_once(model, 256, 64)
    tight = memory.LOGIT_BYTES if rank else 2**40
    memory.available_bytes = lambda device: tight
    try:
        memory.tokens_at_once(model, 256, 64)
        refused = ""
    except PoSEError as error:
        refused = str(error)
    require_same_plan(model, "same")
    try:
        require_same_plan(model, f"text of rank {rank}")
        plan = ""
    except PoSEError as error:
        plan = str(error)
    return tokens, refused, agreed(model, rank), agreed(model.model, rank), plan


def test_ranks_decide_together(make_llama):
    first, second = (one.value for one in ranks(_rank, make_llama))
    assert first[0] == second[0] < 64 * 256
    assert all("length=256 needs about" in one[1] for one in (first, second))
    assert (first[2], second[2]) == (0, 0) and (first[3], second[3]) == (0, 1)
    assert first[4] == second[4] and "on rank 1 are not those of rank 0" in first[4]


class Raising(Measure):
    name = "raising"
    what: str

    def run(self, model, length):
        if self.what == "full":
            raise memory.TooLittleMemory("full") from torch.OutOfMemoryError("full")
        if self.what == "foreseen":
            raise memory.TooLittleMemory("found before it ran, on all ranks alike")
        raise IndexError("on this rank alone, for all one knows")


def test_a_rank_without_memory_ends_the_run_where_the_others_would_wait(make_llama, tokenizer, tmp_path, monkeypatch):
    def run(what):
        return train(make_llama(), tokenizer, tmp_path, [EvaluationCallback([Raising(what=what)], [64], every=1)])

    monkeypatch.setattr(callback, "in_step", lambda model, trainer: InStep(model, model, torch.device("cpu")))
    with pytest.raises(IndexError):
        run("odd")
    assert run("foreseen").state.global_step == 4
    with pytest.raises(memory.TooLittleMemory, match="full"):
        run("full")


def test_lengths_that_do_not_fit_are_left_out_and_named_once(make_llama, tokenizer, tmp_path, monkeypatch, caplog):
    """As in the command: what fits is measured, to the same figures as without the long lengths."""
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
    # Batches are smaller where there is less memory, which may round otherwise.
    assert len(found) == 2 and found == [pytest.approx(row, rel=1e-4) for row in short]
    assert {"passkey/1000", "perplexity/1000", "needle/kv/1000", "topics/first/1000"} <= found[0].keys()
    assert all(result.lengths == [1000] for result in watch.results[0][1].values())
    for name in asked["tasks"]:
        logged = [each for each in caplog.messages if f"{name} is not measured at 8000, 16000" in each]
        assert len(logged) == 1 and "length=8000" in logged[0]


class Sometimes(Passkey):
    """Runs out of memory at 220 tokens while `full`."""

    full: bool = True

    def run(self, model, length):
        if length == 220 and self.full:
            raise memory.TooLittleMemory("full") from torch.OutOfMemoryError("full")
        return super().run(model, length)


def test_a_length_that_runs_out_of_memory_takes_only_longer_ones_along(make_llama, tokenizer, caplog):
    model, measure = make_llama(), Sometimes(trials=1, progress=False)
    measure.prepare(tokenizer, [240, 220, 200])
    watch = EvaluationCallback([], [])
    with caplog.at_level("WARNING"):
        assert [part.lengths for part in watch._parts(measure, model, 1)] == [[200]]
        assert [part.lengths for part in watch._parts(measure, model, 1)] == [[200]]
    assert caplog.messages == ["step 1: passkey is not measured at 220, 240, the training goes on: full"]
    # Memory may come back, and the longer ones with it.
    measure.full = False
    assert [part.lengths for part in watch._parts(measure, model, 1)] == [[200], [220], [240]]
    # Ranks that go in step would wait for one that stops; what is foreseen is foreseen by all of them.
    measure.full = True
    with pytest.raises(memory.TooLittleMemory):
        watch._parts(measure, InStep(model, model, torch.device("cpu")), 1)
