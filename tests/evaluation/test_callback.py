import random

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from pose_plugin.config import parse_settings
from pose_plugin.evaluation.callback import EvaluationCallback, from_settings
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.measures.passkey import Passkey
from pose_plugin.evaluation.measures.perplexity import Perplexity
from pose_plugin.evaluation.measures.short import Short
from pose_plugin.evaluation.results import Result, Row
from pose_plugin.utils.errors import PoSEError

TEXT = "The quick brown fox jumps over the lazy dog. " * 30


class Listener(TrainerCallback):
    """Stands for a logger: it comes before the callback under test, as the trainer's own loggers do."""

    def __init__(self):
        self.heard, self.closed = [], False

    def on_log(self, args, state, control, logs=None, **kwargs):
        assert not self.closed
        self.heard.append((state.global_step, dict(logs)))

    def on_train_end(self, args, state, control, **kwargs):
        self.closed = True


def train(model, tokenizer, folder, callbacks, **changes):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 400, (16, 12)).tolist()]
    settings = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    args = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, seed=5, **{**settings, **changes}
    )
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
    for callback in callbacks:
        if isinstance(callback, EvaluationCallback):
            callback.bind_trainer(trainer)
    trainer.train()
    return trainer


def test_metrics_reach_the_history_and_every_logger(make_llama, tokenizer, tmp_path):
    listener = Listener()
    measures = [Passkey(trials=2), Perplexity(texts=[TEXT])]
    callback = EvaluationCallback(measures, [200, 256], every=2, at_start=True)
    trainer = train(make_llama(), tokenizer, tmp_path, [listener, callback])
    names = {"passkey/200", "passkey/256", "passkey/k_max", "perplexity/200"}
    history = [row for row in trainer.state.log_history if "perplexity/200" in row]
    assert [row["step"] for row in history] == [0, 2, 4]
    assert all(names <= row.keys() for row in history)
    assert [step for step, logs in listener.heard if names <= logs.keys()] == [0, 2, 4]
    # The training loss of the same steps is still logged.
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4]
    assert [step for step, logs in listener.heard if "loss" in logs] == [2, 4]
    assert [step for step, _ in callback.results] == [0, 2, 4]
    assert history[-1]["perplexity/200"] == callback.results[-1][1]["perplexity"].by_length()[200].score
    assert history[0]["perplexity/200"] != history[-1]["perplexity/200"]
    # A random model finds none.
    assert (
        [row["passkey/k_max"] for row in history]
        == [0, 0, 0]
        == [found["passkey"].k_max() for _, found in callback.results]
    )


def test_at_the_end_only_and_once(make_llama, tokenizer, tmp_path):
    callback = EvaluationCallback([Passkey(trials=1)], [200])
    trainer = train(make_llama(), tokenizer, tmp_path, [Listener(), callback])
    assert [row["step"] for row in trainer.state.log_history if "passkey/200" in row] == [4]


def test_a_run_that_is_stopped_early_is_measured_at_its_end(make_llama, tokenizer, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    callback = EvaluationCallback([Passkey(trials=1)], [200])
    trainer = train(make_llama(), tokenizer, tmp_path, [Stop(), callback])
    assert [row["step"] for row in trainer.state.log_history if "passkey/200" in row] == [3]


def test_training_is_the_same_with_and_without(make_llama, tokenizer, tmp_path):
    """Dropout draws from torch's generator every step, so a number drawn in between would show."""
    weights, states = [], []
    for callbacks in ([], [EvaluationCallback([Passkey(trials=5)], [200], every=1, at_start=True)]):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        model = make_llama(attention_dropout=0.3)
        train(model, tokenizer, tmp_path, callbacks)
        assert model.training
        weights.append(model.state_dict())
        states.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert states[0][0].equal(states[1][0]) and states[0][1] == states[1][1]
    assert (states[0][2] == states[1][2]).all()


def test_a_callback_that_never_measures_or_does_not_know_its_trainer(make_llama, tokenizer, tmp_path):
    with pytest.raises(PoSEError, match="never measures"):
        EvaluationCallback([Passkey()], [200], at_end=False)
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=1)
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    trainer = Trainer(make_llama(), args, train_dataset=rows, processing_class=tokenizer)
    trainer.add_callback(EvaluationCallback([Passkey()], [200]))
    with pytest.raises(PoSEError, match="bind_trainer"):
        trainer.train()


def test_without_a_tokenizer_it_says_so(make_llama, tmp_path):
    with pytest.raises(PoSEError, match="no tokenizer"):
        train(make_llama(), None, tmp_path, [EvaluationCallback([Passkey()], [200], at_start=True)])


class Half(Measure):
    """A measure of the user, not in the registry."""

    name = "half"
    fails: bool = False

    def run(self, model, length):
        if self.fails:
            raise torch.OutOfMemoryError("full")
        return Result(self.name, "half", (Row(length, 0.5),))


class Broken(Half):
    name = "broken"
    fails: bool = True


def test_a_measurement_that_fails_does_not_end_the_training(make_llama, tokenizer, tmp_path, caplog):
    callback = EvaluationCallback([Broken(), Half()], [64], every=2)
    with caplog.at_level("WARNING"):
        trainer = train(make_llama(), tokenizer, tmp_path, [callback])
    assert trainer.state.global_step == 4 and "step 2: broken is not measured at 64" in caplog.text
    assert [row["half/64"] for row in trainer.state.log_history if "half/64" in row] == [0.5, 0.5]
    assert [(step, list(found)) for step, found in callback.results] == [(2, ["half"]), (4, ["half"])]


def test_default_lengths_that_a_measure_cannot_be_measured_at_are_left_out(make_llama, tokenizer, tmp_path, caplog):
    settings = parse_settings({"target_length": 512, "train_length": 64, "evaluate": {"tasks": "passkey", "trials": 1}})
    with caplog.at_level("INFO"):
        trainer = train(make_llama(), tokenizer, tmp_path, [from_settings(settings)], max_steps=1)
    logged = {key for row in trainer.state.log_history for key in row if key.startswith("passkey")}
    assert logged == {"passkey/128", "passkey/256", "passkey/512", "passkey/1024", "passkey/k_max"}
    assert "passkey is not measured at 64: length=64 is smaller" in caplog.text


def test_lengths_that_a_model_cannot_read_do_not_end_the_training(tokenizer, tmp_path, caplog):
    """A table of positions that ends says so by an IndexError."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=128, n_embd=16, n_layer=1, n_head=2))
    callback = EvaluationCallback([Passkey(trials=1), Short(texts=[TEXT], short_length=64)], [200])
    with caplog.at_level("WARNING"):
        trainer = train(model, tokenizer, tmp_path, [callback])
    assert trainer.state.global_step == 4 and "the training goes on: IndexErr" in caplog.text
    assert [row["step"] for row in trainer.state.log_history if "short_perplexity/64" in row] == [4]


def test_fsdp_1_is_refused_before_the_first_step(make_llama, tokenizer, tmp_path):
    FullyShardedDataParallel = type("FullyShardedDataParallel", (), {})
    model = make_llama()
    model.model.layers[0].__class__ = type("Layer", (type(model.model.layers[0]), FullyShardedDataParallel), {})
    with pytest.raises(PoSEError, match=r"cannot run under FSDP 1; set fsdp_version: 2.*pose-plugin evaluate"):
        train(model, tokenizer, tmp_path, [EvaluationCallback([Passkey()], [200])])
