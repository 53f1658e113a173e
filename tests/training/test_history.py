"""What the record says the saved weights have seen: resumed, with the best checkpoint loaded, or after no step."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from pose_plugin import PoSECollator, extend_context
from pose_plugin.checkpoints import read_record
from pose_plugin.training.history import History, last_checkpoint, whole_checkpoint
from tests.models import make_llama, make_tokenizer

TARGET = 256
# Each process fetches the batch after next; a resumed run fetches it again.
AHEAD = 2


def trainer_of(folder, rows=12, **arguments):
    plain = make_llama()
    data = [{"input_ids": list(range(3, 30)), "labels": list(range(3, 30))} for _ in range(rows)]
    values = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 2, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": 5, "learning_rate": 1e-3,
    }  # fmt: skip
    return Trainer(
        type(plain)(extend_context(plain.config, TARGET)),
        TrainingArguments(str(folder), **{**values, **arguments}),
        train_dataset=data,
        eval_dataset=data[:2],
        data_collator=PoSECollator(make_tokenizer(), target_length=TARGET, train_length=32),
    )


def trained(folder):
    return read_record(folder)["trained"]


def test_a_resumed_run_counts_what_came_before(tmp_path):
    trainer_of(tmp_path, max_steps=4).train()
    before = trained(tmp_path / "checkpoint-4")
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    after = trained(tmp_path)
    assert (before["steps"], after["steps"]) == (4, 6)
    assert 12 <= after["first_process"]["documents"] <= 12 + AHEAD
    assert after["first_process"]["tokens"] == 27 * after["first_process"]["documents"]
    assert after["first_process"]["farthest"] >= before["first_process"]["farthest"]


@pytest.mark.parametrize("skip", [True, False])
def test_a_resumed_stream_counts_each_row_once(tmp_path, skip):
    """transformers reads it from its beginning, so skipped rows pass through the collator again."""
    kind = Dataset.from_list([{"input_ids": list(range(3, 30))}] * 24).to_iterable_dataset
    for steps in (4, 6):
        trainer = trainer_of(tmp_path, max_steps=steps, ignore_data_skip=not skip)
        trainer.train_dataset = kind()
        trainer.train(resume_from_checkpoint=steps == 6)
        assert (
            2 * steps
            <= trained(tmp_path / f"checkpoint-{steps}")["first_process"]["documents"]
            <= 2 * steps + 2 * AHEAD
        )


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_step_after_the_last_one_counts_if_it_trains(tmp_path, schedule):
    """transformers makes another step if the checkpoint of the last one is resumed, and again at the next resume."""
    trainer_of(tmp_path, max_steps=2, lr_scheduler_type=schedule).train()
    for last in (3, 4):
        trainer = trainer_of(tmp_path, max_steps=2, lr_scheduler_type=schedule)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model(str(tmp_path / f"checkpoint-{last}"))
        trainer.state.save_to_json(str(tmp_path / f"checkpoint-{last}" / "trainer_state.json"))
        assert trainer.state.global_step == last
        assert trained(tmp_path / f"checkpoint-{last}")["steps"] == (2 if schedule == "linear" else last)


def test_a_second_run_of_one_process_counts_its_own(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, rows=4)
    for _ in range(2):
        trainer.train()
    trainer.save_model()
    assert trained(tmp_path)["first_process"]["documents"] == 4


def test_attempts_with_too_large_a_batch_do_not_count(tmp_path):
    trainer = trainer_of(
        tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=-1, num_train_epochs=1,
        save_strategy="no",
    )  # fmt: skip
    step = trainer.training_step

    def short_of_memory(model, inputs, *args, **kwargs):
        if inputs["input_ids"].shape[0] > 3:
            raise RuntimeError("CUDA out of memory.")
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = short_of_memory
    trainer.train()
    trainer.save_model()
    assert trained(tmp_path)["first_process"]["documents"] == 12
    assert (trained(tmp_path)["steps"], trained(tmp_path)["rows_a_step"]) == (4, 3)


def test_the_record_of_the_best_checkpoint(tmp_path):
    """The loss of an enormous learning rate rises, so the first checkpoint is the best."""
    trainer = trainer_of(
        tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        learning_rate=10.0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 2
    trainer.save_model()
    assert trained(tmp_path)["steps"] == 2
    assert trained(tmp_path)["first_process"] == trained(tmp_path / "checkpoint-2")["first_process"]
    assert trained(tmp_path / "checkpoint-6")["steps"] == 6


def test_a_run_of_no_steps_is_reported(tmp_path, caplog):
    trainer = trainer_of(tmp_path, save_strategy="no")
    trainer.get_train_dataloader = lambda: NoBatches()
    with caplog.at_level(logging.WARNING, "pose_plugin"):
        trainer.train()
    trainer.save_model()
    assert any("steps=0" in message for message in caplog.messages)
    assert trained(tmp_path)["steps"] == 0


class NoBatches:
    """A loader that promises batches and has none, as Axolotl's multipack sampler may."""

    dataset = [0] * 12
    batch_sampler = None

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(())


def test_a_checkpoint_that_was_interrupted_is_not_resumed(tmp_path, caplog):
    for step, state in ((2, '{"epoch": 1}'), (10, '{"epoch": 2}'), (12, '{"epo'), (14, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    names = [str(tmp_path / f"checkpoint-{step}") for step in (10, 14)]
    assert last_checkpoint(tmp_path) == names[1] and last_checkpoint(tmp_path / "checkpoint-2") is None
    # Axolotl names the last one.
    with caplog.at_level(logging.WARNING, "pose_plugin"):
        assert whole_checkpoint(names[0], str(tmp_path)) == names[0]
        assert not caplog.messages
        assert whole_checkpoint(names[1], str(tmp_path)) == names[0]
    assert f"{tmp_path / 'checkpoint-14'} was interrupted" in caplog.text


def test_a_checkpoint_that_is_not_there_is_left_to_transformers(tmp_path):
    """Its name may be misspelt: neither an earlier one nor the beginning is what was asked for."""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"epoch": 1}')
    for name in ("checkpoint-1", "checkpoint-20"):
        assert whole_checkpoint(str(tmp_path / name), str(tmp_path)) == str(tmp_path / name)


def test_a_run_whose_first_checkpoint_was_interrupted_starts_from_the_beginning(tmp_path, caplog):
    half = tmp_path / "out" / "checkpoint-1"
    half.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "pose_plugin"):
        assert whole_checkpoint(str(half), str(tmp_path / "out")) is None
        assert "from the beginning" in caplog.text
    # That of another run is what the user asked for: transformers raises.
    assert whole_checkpoint(str(half), str(tmp_path)) == str(half)


def counting(**counts):
    """Return a collator that has drawn this much."""
    return SimpleNamespace(trained=lambda: counts, restart_counts=lambda: None)


def test_a_best_checkpoint_without_a_record(tmp_path):
    """It may be on the disk of another machine."""
    history = History(counting(documents=5, farthest=9))
    history.begin()
    history.loaded(str(tmp_path), 2)
    assert history.of_loaded_weights == {"steps": 2}


@pytest.mark.parametrize("record", [{}, {"target_length": 64, "trained": None}])
def test_a_checkpoint_without_counts(tmp_path, record):
    """Folders that were saved by earlier versions."""
    if record:
        (tmp_path / "pose.json").write_text(json.dumps(record))
    history = History(counting(documents=5, farthest=9))
    history.checkpoint = str(tmp_path)
    history.begin()
    assert history.drawn() == {"documents": 5, "farthest": 9}
