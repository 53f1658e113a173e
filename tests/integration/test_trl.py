"""Real runs of TRL and the transformers Trainer on CPU: what reached the model, what was saved, what is refused."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from pose_plugin.cli.main import main
from tests.conftest import REPLACES
from tests.forked import CaseError, forked, good_ranks
from tests.integration import trl_runs
from tests.integration.records import reloaded_without_us, unbind_all
from tests.integration.trl_runs import ROWS, STEPS, TARGET, WINDOW

ROOT = Path(__file__).parents[2]


def plain(folder):
    return trl_runs.run(trl_runs.sft(folder, save_strategy="steps", save_steps=2))


def workers(count):
    def case(folder):
        return trl_runs.run(trl_runs.sft(folder, dataloader_num_workers=count, dataloader_persistent_workers=True))

    return case


def options(**config):
    def case(folder):
        return trl_runs.run(trl_runs.sft(folder, **config))

    return case


def lora(folder):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    return trl_runs.run(trl_runs.sft(folder, peft=adapter, save_strategy="steps", save_steps=4))


def assistant_only(folder):
    trainer = trl_runs.sft(folder, rows=trl_runs.chats(), chat_template=trl_runs.CHAT, assistant_only_loss=True)
    seen = [(b["labels"].tolist(), b["input_ids"].tolist()) for b in trainer.get_train_dataloader()]
    return {**trl_runs.run(trainer), "labels": seen}


def transformers_trainer(folder, collate=None):
    """Without TRL: tokenised rows, TrainingArguments, Trainer."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from pose_plugin import PoSECollator

    model, tokenizer = trl_runs.make_model(folder)
    data = Dataset.from_list([{"input_ids": [*tokenizer(row["text"])["input_ids"], 2]} for row in trl_runs.texts()])
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer,
        data_collator=PoSECollator(tokenizer, collate, target_length=TARGET, train_length=WINDOW),
    )
    return trl_runs.run(trainer)


def flattening(folder):
    from transformers import DataCollatorWithFlattening

    return transformers_trainer(folder, DataCollatorWithFlattening())


def packed_before(count=trl_runs.ROWS):
    """Rows as `trl.pack_dataset` leaves them: three documents each, and where they end."""
    picker = random.Random(0)
    rows = [[picker.randrange(30, 100) for _ in range(60)] for _ in range(count)]
    return [{"input_ids": row, "labels": row, "seq_lengths": [20, 25, 15]} for row in rows]


# The runs, and whether their rows are packed: then no mask reaches the model.
CASES = {
    "plain": (plain, False),
    "two workers": (workers(2), False),
    "lora": (lora, False),
    "wrapped": (options(packing=True, packing_strategy="wrapped"), False),
    "bfd": (options(packing=True), True),
    "bfd eager": (options(packing=True, attention="eager"), True),
    "padding free": (options(padding_free=True, max_length=None), True),
    "packed before": (options(rows=packed_before()), True),
    "assistant only": (assistant_only, False),
    "no checkpointing": (options(gradient_checkpointing=False), False),
    "nll loss": (options(loss_type="nll"), False),
    "bf16": (options(bf16=True), False),
    "content skip": (
        options(max_length=None, pose={"train_length": 12, "content": "skip"}),
        False,
    ),
    "transformers": (transformers_trainer, False),
    "transformers flattening": (flattening, True),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Each run is made once, when it is first asked for."""
    done = {}

    def get(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            done[name] = folder, forked(CASES[name][0], folder)
        return done[name]

    return get


def positions(steps):
    """Tokens → positions of an epoch's documents."""
    return dict(document for step in steps for document in step)


def epochs(result):
    half = len(result["steps"]) // 2
    return positions(result["steps"][:half]), positions(result["steps"][half:])


@pytest.mark.parametrize("name", CASES)
def test_a_run(outcome, name):
    folder, ran = outcome(name)
    result, packed = ran.value, CASES[name][1]
    # In training: positions out of the whole target, with a mask exactly where a row is one document.
    assert len(result["losses"]) == len(result["steps"])
    assert result["masked"] == {not packed} or "padding free" in name or "flattening" in name
    seen = [place for step in result["steps"] for _, places in step for place in places]
    assert WINDOW < max(seen) < TARGET
    assert max(seen) <= result["trained"]["farthest"]
    for step in result["steps"]:
        for tokens, places in step:
            assert places[0] == 0 and list(places) == sorted(set(places)) and len(tokens) <= WINDOW
    # It learns: the rows are seen twice.
    half = len(result["losses"]) // 2
    assert sum(result["losses"][half:]) < sum(result["losses"][:half])
    # In evaluation: plain positions.
    assert len(result["eval_losses"]) == 2
    assert result["evaluation"]
    assert max(place for batch in result["evaluation"] for row in batch for place in row) < WINDOW
    # The run was checked, and nothing stays patched.
    assert "self-test passed" in ran.output
    passed = next(line for line in ran.output.splitlines() if "self-test passed" in line)
    assert ("in other documents" in passed) == packed
    assert not result["rule_left"]
    # What is saved names the target.
    saved = folder / "out"
    assert json.loads((saved / "config.json").read_text())["max_position_embeddings"] == TARGET
    assert json.loads((saved / "tokenizer_config.json").read_text())["model_max_length"] == TARGET
    assert json.loads((saved / "pose.json").read_text())["target_length"] == TARGET


def test_every_epoch_draws_anew(outcome):
    first, second = epochs(outcome("plain")[1].value)
    assert first.keys() == second.keys() and len(first) == ROWS
    assert all(first[tokens] != second[tokens] for tokens in first)


@pytest.mark.parametrize(
    "name",
    [
        "two workers",
        "lora",
        "bfd",
        "padding free",
        "bf16",
        "transformers",
        "transformers flattening",
    ],
)
def test_the_same_documents_have_the_same_positions_in_every_run(outcome, name):
    expected, seen = epochs(outcome("plain")[1].value), positions(outcome(name)[1].value["steps"])
    for tokens, places in seen.items():
        assert places in (expected[0][tokens], expected[1][tokens])
    # Packed epochs may end within a step; the others halve exactly.
    if not CASES[name][1]:
        assert epochs(outcome(name)[1].value) == expected
    assert seen.keys() == expected[0].keys()


def test_workers_change_nothing(outcome):
    expected, found = outcome("plain")[1].value, outcome("two workers")[1].value
    assert found["steps"] == expected["steps"] and found["trained"] == expected["trained"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)


@pytest.mark.parametrize("step", [2, 4, 6], ids=["within epoch 0", "between epochs", "within epoch 1"])
def test_a_resumed_run_has_the_positions_of_the_uninterrupted_one(outcome, step):
    folder, ran = outcome("plain")
    assert json.loads((folder / "out" / f"checkpoint-{step}" / "pose.json").read_text())

    def resumed():
        trainer = trl_runs.sft(folder, save_strategy="steps", save_steps=2, output_dir=str(folder / "again"))
        return trl_runs.run(trainer, resume=str(folder / "out" / f"checkpoint-{step}"), save=False)

    result = forked(resumed).value
    assert result["steps"] == ran.value["steps"][step:]
    assert result["losses"] == pytest.approx(ran.value["losses"], abs=1e-5)


def test_resuming_with_other_settings_is_told(outcome):
    folder, _ = outcome("plain")

    def resumed():
        trainer = trl_runs.sft(folder, pose={"seed": 7, "chunks": 3}, output_dir=str(folder / "other"), max_steps=3)
        return trainer.train(str(folder / "out" / "checkpoint-2")).global_step

    output = forked(resumed).output
    assert "with other settings than it was trained with: chunks=2 → 3, seed=0 → 7" in output


def test_a_resumed_adapter(outcome):
    folder, ran = outcome("lora")

    def resumed():
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
        trainer = trl_runs.sft(folder, peft=adapter, output_dir=str(folder / "again"))
        return trl_runs.run(trainer, resume=str(folder / "out" / "checkpoint-4"), save=False)

    assert forked(resumed).value["steps"] == ran.value["steps"][4:]


def test_assistant_only_loss(outcome):
    """Labels are TRL's own: answers only, whatever the positions are."""
    result = outcome("assistant only")[1].value
    labelled = 0
    for labels, ids in result["labels"]:
        for row_labels, row_ids in zip(labels, ids, strict=True):
            assert row_labels[0] == -100
            assert {label for label in row_labels if label != -100} <= set(row_ids)
            labelled += sum(label != -100 for label in row_labels)
    # Two answers of six words and an end a row.
    assert labelled == ROWS * 2 * 7


def test_content_skip_reads_all_of_the_documents(outcome):
    result = outcome("content skip")[1].value
    seen = {token for step in result["steps"] for tokens, _ in step for token in tokens}
    assert {len(tokens) for step in result["steps"] for tokens, _ in step} == {12}
    heads = {int(word[1:]) for row in trl_runs.texts() for word in row["text"].split()[:12]}
    assert seen - heads, "only the first twelve tokens of the rows were read"


def quiet():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_saved_folders_load_without_this_package(outcome):
    """Past the old window of 64, in an interpreter in which the package cannot be imported."""
    full, adapter = outcome("plain"), outcome("lora")
    folders = [full[0] / "out", adapter[0] / "out", adapter[0] / "out" / "checkpoint-4", adapter[0] / "base"]
    answers = reloaded_without_us(adapter[0] / "base", folders)
    assert [length for _, length in answers] == [TARGET, TARGET, TARGET, WINDOW]
    whole, last, earlier, untrained = (np.array(logits) for logits, _ in answers)
    np.testing.assert_allclose(whole, full[1].value["logits"], atol=1e-5)
    np.testing.assert_allclose(last, adapter[1].value["logits"], atol=1e-5)
    assert all(np.abs(other - last).max() > 1e-4 for other in (earlier, untrained))


# --- several processes ----------------------------------------------------------------------------------------


def one_rank(folder):
    """The two ranks together train the rows that a step of one process trains."""
    return trl_runs.run(trl_runs.sft(folder, per_device_train_batch_size=1, ddp_backend="gloo"))


def test_two_processes_share_the_positions_of_one(outcome, tmp_path):
    trl_runs.make_model(tmp_path)
    ranks = [found.value for found in good_ranks(one_rank, tmp_path, ACCELERATE_USE_CPU="true")]
    assert ranks[0]["losses"], "rank 0 logs"
    expected = epochs(outcome("plain")[1].value)
    for epoch in range(2):
        union = {}
        for rank in ranks:
            assert len(rank["steps"]) == 2 * STEPS
            for step in rank["steps"][epoch * STEPS : (epoch + 1) * STEPS]:
                union |= {tuple(tokens): tuple(places) for tokens, places in step}
        assert union == expected[epoch]


@pytest.fixture
def example_data(tmp_path):
    """Rows in the form of the quick start's data, shorter and fewer."""
    path = tmp_path / "rows.jsonl"
    rows = [[(start * 7 + i * 3) % 500 + 2 for i in range(200)] for start in range(12)]
    path.write_text(
        "".join(json.dumps({"input_ids": r, "attention_mask": [1] * 200, "labels": r}) + "\n" for r in rows)
    )
    return path


@pytest.mark.parametrize("extra", [["--evaluate", "--trials", "2"], ["--lora"]], ids=["full", "lora"])
def test_the_example(example_data, tmp_path, forks, extra):
    """test_distributed.py starts it on two ranks through `accelerate launch`."""
    command = [
        *(sys.executable, str(ROOT / "example_configs/trl/sft.py"), "--data", str(example_data)),
        *("--output", str(tmp_path / "out"), "--steps", "2", "--batch-size", "2", "--target-length", "512"),
        *extra,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    output = done.stdout + done.stderr
    assert output.count("this process drew") == 1
    assert output.count("self-test passed") == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 512
    assert (tmp_path / "out" / "adapter_config.json").exists() is ("--lora" in extra)
    for word in ("passkey before: 128: ", "passkey after:  128: "):
        assert (word in done.stdout) is ("--evaluate" in extra)


# --- refused --------------------------------------------------------------------------------------------------


def refused(case, *words):
    with pytest.raises(CaseError) as caught:
        forked(case)
    text = str(caught.value)
    for word in words:
        assert word in text, text[:600]


def test_a_model_that_was_not_extended(tmp_path):
    refused(
        lambda: trl_runs.run(trl_runs.sft(tmp_path, extended=False)),
        "PoSEError: the model (llama) has max_position_embeddings=64, below target_length=512",
        "extend_context(config, target_length=512, rope='yarn')",
    )


def test_a_trainer_of_preferences(tmp_path):
    def case():
        import trl
        from datasets import Dataset

        from pose_plugin import PoSECollator

        model, tokenizer = trl_runs.make_model(tmp_path)
        trl.DPOTrainer(
            model=model,
            args=trl.DPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=Dataset.from_list([{"prompt": "w1", "chosen": "w2 w3", "rejected": "w4"}] * 2),
            processing_class=tokenizer,
            data_collator=PoSECollator(tokenizer, target_length=TARGET),
        )

    refused(case, "PoSEError: DPOTrainer cannot be combined with PoSECollator", "SFTTrainer and")


@pytest.mark.parametrize("key", ["cp_size", "sp_size"])
def test_rows_split_over_devices(tmp_path, key):
    """accelerate needs more devices than there are for its context and sequence parallelism, so the value is set."""

    def case():
        from types import SimpleNamespace

        trainer = trl_runs.sft(tmp_path)
        trainer.accelerator.state.parallelism_config = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, key: 2})
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)

    refused(case, f"PoSEError: {key}=2 splits rows")


def test_a_trainer_makes_ready_for_packed_rows(tmp_path):
    """A cache that the user left on would mix documents; a collator that is not told of packs refuses them."""

    def case():
        alone = trl_runs.sft(tmp_path).data_collator.packs
        trainer = trl_runs.sft(tmp_path, packing=True, max_steps=1, eval_strategy="no")
        trainer.model.config.use_cache = True
        trainer.train()
        return alone, trainer.data_collator.packs, trainer.model.config.use_cache

    assert forked(case).value == (False, True, False)


def test_padding_free_rows_with_a_foreign_collator(tmp_path):
    from transformers import default_data_collator

    refused(
        lambda: trl_runs.sft(tmp_path, packing=True, collate=default_data_collator),
        "PoSEError: padding_free and packing_strategy='bfd' need TRL's own collator",
        "use packing_strategy='wrapped'",
    )


def test_rows_packed_before_for_a_plain_trainer(tmp_path):
    """It keeps the borders, although remove_unused_columns removes what is no input of the model."""

    def case():
        from datasets import Dataset
        from transformers import Trainer, TrainingArguments

        from pose_plugin import PoSECollator

        model, tokenizer = trl_runs.make_model(tmp_path)
        args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], max_steps=2)
        collator = PoSECollator(tokenizer, target_length=TARGET, train_length=WINDOW)
        data = Dataset.from_list(packed_before())
        return trl_runs.run(Trainer(model, args, train_dataset=data, data_collator=collator), save=False)

    lengths = {len(tokens) for step in forked(case).value["steps"] for tokens, _ in step}
    assert lengths == {20, 25, 15}


def test_an_attention_function_that_cannot_be_packed(tmp_path):
    def case():
        trainer = trl_runs.sft(tmp_path, packing=True)
        trainer.model.config._attn_implementation = "sage"
        trainer.train()

    refused(case, "PoSEError: attn_implementation=sage")


def test_a_mask_that_is_lost_stops_the_run(tmp_path):
    def case():
        trainer = trl_runs.sft(tmp_path)
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
        )
        trainer.train()

    refused(case, "SelfTestError: PoSE self-test", "chunk 2 does not see chunk 1")


# --- patches --------------------------------------------------------------------------------------------------


def test_constructors_are_as_they_were_when_the_last_collator_is_gone():
    from transformers import Trainer
    from trl import SFTTrainer

    from pose_plugin import PoSECollator
    from tests.models import make_tokenizer

    def case():
        unbind_all()
        before = Trainer.__init__, SFTTrainer.__init__
        collator = PoSECollator(make_tokenizer(), target_length=64)
        assert Trainer.__init__ is not before[0] and SFTTrainer.__init__ is not before[1]
        del collator
        gc.collect()
        assert (Trainer.__init__, SFTTrainer.__init__) == before

    forked(case)


def test_the_rule_is_undone_when_training_dies(tmp_path):
    def case():
        from transformers import TrainerCallback, masking_utils

        class Dies(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                assert masking_utils.find_packed_sequence_indices is not original
                raise KeyError("out of memory")

        original = masking_utils.find_packed_sequence_indices
        trainer = trl_runs.sft(tmp_path, packing=True)
        trainer.add_callback(Dies())
        with pytest.raises(KeyError, match="out of memory"):
            trainer.train()
        assert masking_utils.find_packed_sequence_indices is original

    forked(case)


def test_one_collator_for_two_trainers(tmp_path):
    """Packed first, then not: the second must not go on with the first one's way of stacking."""

    def case():
        packed = trl_runs.sft(tmp_path, packing=True)
        collator = packed.data_collator
        packed.train()
        from transformers import masking_utils

        original = masking_utils.find_packed_sequence_indices
        plain = trl_runs.sft(tmp_path, share=collator)
        assert plain.data_collator is collator
        result = trl_runs.run(plain, save=False)
        assert masking_utils.find_packed_sequence_indices is original
        return result["masked"]

    assert forked(case).value == {True}


def test_a_rope_that_the_model_was_not_built_with(tmp_path):
    with pytest.raises(CaseError, match="rope=ntk, but the model was built with rope=yarn"):
        forked(lambda: trl_runs.sft(tmp_path, pose={"rope": "ntk"}).train())


def test_the_record_names_the_rope_of_the_model(tmp_path):
    def case():
        trainer = trl_runs.sft(tmp_path, max_steps=1, eval_strategy="no")
        trainer.model.config.pose_plugin = {**trainer.model.config.pose_plugin, "rope": "llama3"}
        trainer.save_model(str(tmp_path / "out"))

    forked(case)
    assert json.loads((tmp_path / "out" / "pose.json").read_text())["rope"] == {"type": "llama3"}


@pytest.mark.parametrize("pose", [{"chunks": 1}, {"unskipped_ratio": 1.0}], ids=str)
def test_a_run_without_jumps_says_so(tmp_path, pose):
    def case():
        return trl_runs.sft(tmp_path, pose=pose, max_steps=1, eval_strategy="no").train().global_step

    output = forked(case).output
    assert "no document can have a jump" in output and "no document had a jump" in output


def test_a_target_of_millions_trains(tmp_path):
    def case():
        trainer = trl_runs.sft(tmp_path, pose={"target_margin": 2**25}, max_steps=1, eval_strategy="no")
        return trainer.train().global_step

    assert forked(case).value == 1


def test_qwen35_trains_and_reloads(tmp_path):
    """Layers with linear attention, and rotary positions on three axes, which text uses alike."""
    pytest.importorskip("transformers.models.qwen3_5")
    if REPLACES:
        pytest.skip("flash-linear-attention replaces this model and needs a GPU")

    def case():
        import torch
        from datasets import Dataset
        from transformers import AutoConfig, AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        from pose_plugin import PoSECollator, extend_context
        from tests.models import make_tokenizer

        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        base = AutoConfig.for_model(
            "qwen3_5_text", vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
            rope_parameters={**rope, "mrope_interleaved": True},
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(extend_context(base, target_length=TARGET, rope="yarn"))
        tokenizer = make_tokenizer()
        trainer = SFTTrainer(
            model,
            args=SFTConfig(
                str(tmp_path / "out"),
                max_steps=1,
                max_length=64,
                use_cpu=True,
                bf16=False,
                report_to=[],
                per_device_train_batch_size=2,
            ),
            train_dataset=Dataset.from_list(trl_runs.texts()),
            processing_class=tokenizer,
            data_collator=PoSECollator(tokenizer, train_length=64),
        )
        trainer.train()
        trainer.save_model()
        return trainer.state.global_step

    assert forked(case).value == 1
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["max_position_embeddings"] == TARGET and saved["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert main(["check", str(tmp_path / "out")]) == 0
    assert main(["export", str(tmp_path / "out"), "--engine", "vllm"]) == 0
