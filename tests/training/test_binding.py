"""How trainers are bound: methods of their classes are wrapped for a while, and a bound trainer shows its mixin."""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import pickle
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from pose_plugin import PoSECollator, extend_context
from pose_plugin.checkpoints import check_folder
from pose_plugin.training import binding
from pose_plugin.training.binding import PoSETrainerMixin, add_mixin, offer_trainer, wrap_while_alive
from pose_plugin.utils.errors import PoSEError
from tests.models import make_llama, make_tokenizer

TARGET = 256


class Thing:
    """Anything that is collected by the garbage collector."""


class Owner:
    def method(self, value):
        """Return the value."""
        return value


def doubled(method, owner, value):
    return 2 * method(owner, value)


def and_one(method, owner, value):
    return method(owner, value) + 1


PLACE = Owner, "method"


def test_a_method_is_wrapped_while_an_object_lives():
    original = Owner.method
    first, second = Thing(), Thing()
    for thing in (first, second):
        wrap_while_alive(thing, {PLACE: doubled})
    assert Owner().method(5) == 10, "two objects with the same wrapper wrap once"
    assert Owner.method.__doc__ == original.__doc__
    del first, thing
    gc.collect()
    assert Owner().method(5) == 10
    del second
    gc.collect()
    assert Owner.method is original and PLACE not in binding._wrapped


def test_two_wrappers_of_one_method_end_independently():
    original = Owner.method
    inner, outer = Thing(), Thing()
    wrap_while_alive(inner, {PLACE: doubled})
    wrap_while_alive(outer, {PLACE: and_one})
    assert Owner().method(5) == 11
    del inner
    gc.collect()
    assert Owner().method(5) == 6
    del outer
    gc.collect()
    assert Owner.method is original


def test_a_later_patch_of_another_package_stays(monkeypatch):
    thing = Thing()
    wrap_while_alive(thing, {PLACE: doubled})
    ours = Owner.method
    monkeypatch.setattr(Owner, "method", lambda owner, value: ours(owner, value) + 100)
    del thing
    gc.collect()
    assert Owner().method(5) == 105, "without wrappers ours changes nothing"
    monkeypatch.setattr(Owner, "method", ours)
    again = Thing()
    wrap_while_alive(again, {PLACE: and_one})
    assert Owner().method(5) == 6
    del again
    gc.collect()
    assert Owner().method(5) == 5 and PLACE not in binding._wrapped


def trainer_of(folder, kind=Trainer, collator=None, rows=None, **arguments):
    model = make_llama()
    if collator is not None:
        model = type(model)(extend_context(model.config, TARGET))
    rows = rows or [{"input_ids": list(range(3, 30 + i)), "labels": list(range(3, 30 + i))} for i in range(4)]
    values = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    return kind(
        model,
        TrainingArguments(str(folder), **values, **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator or PoSECollator(make_tokenizer(), target_length=TARGET, train_length=32).plain(),
    )


@pytest.fixture
def collator():
    return PoSECollator(make_tokenizer(), target_length=TARGET, train_length=32)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_collator_is_bound_as_well(tmp_path, copied):
    """Also when the first one is gone, e.g. in another process."""
    gc.collect()
    original = Trainer.__init__
    collator = copied(PoSECollator(make_tokenizer(), target_length=TARGET, train_length=32))
    gc.collect()
    trainer = trainer_of(tmp_path, collator=collator)
    assert trainer.data_collator is collator and trainer.pose_callback.collator is collator
    del collator, trainer
    gc.collect()
    assert Trainer.__init__ is original


@pytest.mark.parametrize("target", [TARGET // 2, TARGET * 2])
def test_a_collator_with_another_target_than_the_model_is_refused(tmp_path, target):
    collator = PoSECollator(make_tokenizer(), target_length=target, train_length=32)
    with pytest.raises(PoSEError, match=rf"target_length={target} of the collator.*target_length={TARGET}\)"):
        trainer_of(tmp_path, collator=collator)


def test_a_collator_without_a_target_takes_the_model_s(tmp_path):
    collator = PoSECollator(make_tokenizer(), train_length=32, seed=3, evaluate={"every": 5})
    with pytest.raises(PoSEError, match="no target_length yet"):
        collator([{"input_ids": [3, 4]}])
    trainer = trainer_of(tmp_path, collator=collator)
    given = PoSECollator(make_tokenizer(), target_length=TARGET, train_length=32, seed=3, evaluate={"every": 5})
    assert trainer.data_collator.settings == given.settings
    row = {"input_ids": list(range(3, 43))}
    assert collator([row])["position_ids"].tolist() == given([row])["position_ids"].tolist()


def test_a_target_that_nobody_names(tmp_path):
    with pytest.raises(PoSEError, match="config names none"):
        PoSECollator(make_tokenizer()).settle_target(make_llama().config)
    with pytest.raises(PoSEError, match=f"target_length={TARGET} is smaller than .* train_length=512"):
        trainer_of(tmp_path, collator=PoSECollator(make_tokenizer(), train_length=512))


def test_a_target_within_the_base_s_own_window():
    config = extend_context(make_llama(max_position_embeddings=2 * TARGET).config, TARGET, "none")
    assert config.max_position_embeddings == 2 * TARGET
    PoSECollator(make_tokenizer(), target_length=TARGET).settle_target(config)
    with pytest.raises(PoSEError, match=f"target_length={2 * TARGET} of the collator.*target_length={TARGET}"):
        PoSECollator(make_tokenizer(), target_length=2 * TARGET).settle_target(config)


def test_a_model_may_be_built_for_the_margin_too():
    config = extend_context(make_llama().config, TARGET + 64)
    PoSECollator(make_tokenizer(), target_length=TARGET, target_margin=64).settle_target(config)
    with pytest.raises(PoSEError, match="must reach equally far"):
        PoSECollator(make_tokenizer(), target_length=TARGET, target_margin=63).settle_target(config)


def test_a_bound_trainer_shows_its_mixin(tmp_path, collator):
    trainer = trainer_of(tmp_path, collator=collator)
    kind = type(trainer)
    assert kind.__mro__[1:3] == (PoSETrainerMixin, Trainer)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Trainer", "Trainer", Trainer.__module__)
    assert trainer.pose_callback in trainer.callback_handler.callbacks
    add_mixin(trainer)
    assert type(trainer) is kind, "a second call changes nothing"
    assert copy.copy(trainer).pose_callback is trainer.pose_callback


def test_another_trainer_is_left_alone(tmp_path, collator):
    other = trainer_of(tmp_path)
    assert type(other) is Trainer
    assert "PoSECallback" not in [type(each).__name__ for each in other.callback_handler.callbacks]


def test_a_class_that_names_the_mixin_is_kept(tmp_path, collator):
    class Explicit(PoSETrainerMixin, Trainer):
        pass

    bound, plain = trainer_of(tmp_path, Explicit, collator), trainer_of(tmp_path, Explicit)
    assert type(bound) is type(plain) is Explicit
    assert bound.pose_callback is not None and plain.pose_callback is None
    # Without a PoSECollator, such a class trains and saves as its trainer does.
    plain.train()
    plain.save_model()
    assert (tmp_path / "config.json").exists() and not (tmp_path / "pose.json").exists()
    bound.train()
    bound.save_model()
    assert (tmp_path / "pose.json").exists()


def test_a_class_with_the_mixin_behind_the_trainer_is_refused(tmp_path, collator):
    """Its methods would never be called."""

    class Behind(Trainer, PoSETrainerMixin):
        pass

    with pytest.raises(PoSEError, match="Behind: write PoSETrainerMixin before"):
        trainer_of(tmp_path, Behind, collator)


def test_evaluation_is_plain_and_training_is_not(tmp_path, collator):
    trainer = trainer_of(tmp_path, collator=collator)
    rows = trainer.eval_dataset
    for loader in (trainer.get_eval_dataloader(), trainer.get_test_dataloader(rows)):
        for batch in loader:
            for places, mask in zip(batch["position_ids"], batch["attention_mask"], strict=True):
                assert places[mask.bool()].tolist() == list(range(int(mask.sum())))
    assert trainer.data_collator is collator
    assert max(int(batch["position_ids"].max()) for batch in trainer.get_train_dataloader()) > 32


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_frequencies_stay_whole_if_evaluation_casts_the_model(tmp_path, collator, dtype):
    trainer = trainer_of(tmp_path, collator=collator, **{f"{dtype}_full_eval": True})
    trainer.train()
    rotary = trainer.model.model.rotary_emb
    before, seen = rotary.inv_freq.clone(), []
    rotary.register_forward_pre_hook(lambda module, args: seen.append(module.inv_freq.clone()))
    trainer.evaluate()
    assert next(trainer.model.parameters()).element_size() == 2
    assert seen and all(torch.equal(each, before) for each in [*seen, rotary.inv_freq])
    # Its answers are compared with those of a reload, which has whole frequencies.
    trainer.save_model()
    assert check_folder(tmp_path).passed


def test_a_collator_that_the_user_sets_later_is_left_alone(tmp_path, collator):
    trainer = trainer_of(tmp_path, collator=collator)
    trainer.data_collator = later = collator.plain()
    loader = trainer.get_eval_dataloader()
    assert getattr(loader.collate_fn, "data_collator", loader.collate_fn) is later


def test_a_collator_that_is_set_before_training_is_bound(tmp_path, collator):
    trainer = trainer_of(tmp_path)
    trainer.model = type(trainer.model)(extend_context(trainer.model.config, TARGET))
    trainer.data_collator = collator
    trainer.train()
    trainer.save_model()
    assert trainer.pose_callback.collator is collator and collator.trained()["documents"]
    assert (tmp_path / "pose.json").exists()


def test_a_collator_that_replaces_the_bound_one_is_refused(tmp_path, collator):
    """The run would record the settings of the first."""
    trainer = trainer_of(tmp_path, collator=collator)
    for later in (collator.plain(), PoSECollator(make_tokenizer(), target_length=TARGET, sampler="randpos")):
        trainer.data_collator = later
        with pytest.raises(PoSEError, match="data_collator was replaced by another one"):
            trainer.train()


class Around:
    def __init__(self, collate):
        self.collate = collate

    def __call__(self, features):
        return self.collate(features)


HIDING = [
    lambda collate: lambda features: collate(features),
    lambda collate: functools.partial(lambda collate, features: collate(features), collate),
    lambda collate: collate.__call__,
    Around,
    lambda collate: Around(Around(collate)).__call__,
]


@pytest.mark.parametrize("hide", HIDING, ids=["function", "partial", "method", "object", "deep"])
def test_a_collator_that_hides_ours_is_refused(tmp_path, collator, hide):
    with pytest.raises(PoSEError, match="hides a PoSECollator"):
        trainer_of(tmp_path, collator=hide(collator))
    later = trainer_of(tmp_path)
    later.data_collator = hide(collator)
    with pytest.raises(PoSEError, match="hides a PoSECollator"):
        later.train()


def test_a_collator_that_hides_another_one_is_not(tmp_path, collator):
    """Also if a PoSECollator is what the same function may return."""
    plain = collator.plain()
    trainer_of(tmp_path, collator=Around(lambda features: plain(features)))


@pytest.mark.parametrize("first", [True, False])
def test_rows_that_do_not_pass_through_the_collator_are_reported(tmp_path, collator, caplog, first):
    """By the first rank, as accelerate gives the others a stream's batches that it has made."""
    trainer = trainer_of(tmp_path, collator=collator)
    trainer.get_train_dataloader = trainer.get_eval_dataloader
    trainer.is_world_process_zero = lambda: first
    with caplog.at_level(logging.WARNING, "pose_plugin"):
        trainer.train()
    assert any("documents=0" in message for message in caplog.messages) is first


class Cutting(list):
    """Rows that are tokenised when they are read, as long as the tokenizer lets them be."""

    def __init__(self, tokenizer):
        super().__init__([None] * 4)
        self.tokenizer, self.lengths = tokenizer, []

    def __getitem__(self, number):
        ids = list(range(3, 63))[: self.tokenizer.model_max_length]
        self.lengths.append(len(ids))
        return {"input_ids": ids, "labels": ids}


def test_the_tokenizer_keeps_its_limit_until_the_end(tmp_path, collator):
    """Rows that are cut to it while the run trains would otherwise grow to the target."""
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 32
    rows = Cutting(tokenizer)
    trainer = trainer_of(tmp_path, collator=collator, rows=rows)
    trainer.processing_class = tokenizer
    trainer.train()
    trainer.save_model()
    assert set(rows.lengths) == {32} and tokenizer.model_max_length == TARGET
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == TARGET


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_columns_that_the_collator_reads_reach_it(tmp_path, collator, make):
    """`remove_unused_columns` removes what is no input of the model: borders of packed documents, masks of the loss."""
    rows = make([{"input_ids": list(range(3, 33)), "seq_lengths": [10, 20], "assistant_masks": [0] * 25 + [1] * 5}] * 2)
    trainer = trainer_of(tmp_path, collator=collator, rows=rows)
    for batch in (next(iter(trainer.get_train_dataloader())), next(iter(trainer.get_eval_dataloader(rows)))):
        assert batch["position_ids"][:, 10].tolist() == [0, 0] and "attention_mask" not in batch
        assert batch["labels"].tolist() == [[-100] * 25 + list(range(28, 33))] * 2


def test_a_stream_of_packed_rows_is_refused(tmp_path, collator):
    """Its columns are unknown before its first row, so the trainer is not set up for packed rows."""
    rows = IterableDataset.from_generator(
        lambda: iter([{"input_ids": list(range(3, 33)), "seq_lengths": [10, 20]}] * 2)
    )
    with pytest.raises(PoSEError, match="a column seq_lengths"):
        trainer_of(tmp_path, collator=collator, rows=rows).train()


def test_a_trained_prompt_is_refused(tmp_path, collator):
    trainer = trainer_of(tmp_path, collator=collator)
    trainer.model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True, peft_type="PREFIX_TUNING")}
    with pytest.raises(PoSEError, match="peft_type=PREFIX_TUNING trains a prompt"):
        trainer.train()


def test_train_may_be_called_twice(tmp_path, collator):
    trainer = trainer_of(tmp_path, collator=collator)
    assert [trainer.train().global_step, trainer.train().global_step] == [1, 1]


class Curious(TrainerCallback):
    def __init__(self):
        self.trainers = []

    def bind_trainer(self, trainer):
        self.trainers.append(trainer)


def test_callbacks_get_the_trainer_before_training(tmp_path, collator):
    trainer, later = trainer_of(tmp_path, collator=collator), Curious()
    trainer.add_callback(later)
    trainer.train()
    assert later.trainers == [trainer]


def test_callbacks_without_the_method_are_skipped():
    asked = Curious()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[TrainerCallback(), asked]))
    offer_trainer(trainer)
    assert asked.trainers == [trainer]


def test_a_push_while_training_uploads_the_record(tmp_path, collator, monkeypatch):
    uploaded = []

    class Hub:
        def upload_folder(self, folder_path, **_):
            files = {file.name: file.read_bytes() for file in Path(folder_path).iterdir() if file.is_file()}
            uploaded.append(files)
            done = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer = trainer_of(tmp_path, collator=collator)
    trainer.args.push_to_hub, trainer.args.save_strategy, trainer.args.save_steps = True, SaveStrategy.STEPS, 1
    trainer.push_in_progress, trainer.hub_model_id = None, "someone/model"  # as init_hf_repo leaves them
    trainer.train()
    assert len(uploaded) == 1 and json.loads(uploaded[0]["pose.json"])["target_length"] == TARGET
    for name in ("pose.json", "pose_probe.json", "config.json", "model.safetensors"):
        assert uploaded[0][name] == (tmp_path / "checkpoint-1" / name).read_bytes()
