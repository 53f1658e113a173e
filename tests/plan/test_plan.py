"""`pose-plugin plan`: what it reads from a YAML, what it reports, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import Trainer, TrainingArguments

from pose_plugin.cli.evaluate import add_arguments
from pose_plugin.cli.evaluate_models import parse_extension
from pose_plugin.cli.main import main
from pose_plugin.cli.parser import Parser
from pose_plugin.plan import dropped
from pose_plugin.plan.advice import notes_of, rows_needed
from pose_plugin.plan.config_reader import from_values, from_yaml
from pose_plugin.plan.plan import as_dict, make_plan
from pose_plugin.plan.report import text
from pose_plugin.utils.errors import PoSEError
from tests.plan.test_architecture import LLAMA3_8B

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "example_configs").glob("*/*.yaml"))
# Those of accelerate are not Axolotl YAMLs.
EXAMPLES = [path for path in EXAMPLES if path.parent.name != "accelerate"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B))
    return str(folder)


def values(base, **changes):
    return {
        "base_model": base,
        "sequence_len": 8192,
        "pose": {"target_length": 32768, "rope": {"type": "base", "theta": 8e6}},
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 1000,
        "bf16": True,
        **changes,
    }


def plan_of(base, gpus=8, gpu_gib=None, steps=None, rows=None, **changes):
    inputs = from_values(values(base, **changes), gpus=gpus, steps=steps, rows=rows)
    return make_plan(inputs, gpu_gib, draws=200)


def asked(note):
    """Return the models and the extension of the command in a note, by the parser that will read it."""
    words = shlex.split(note.partition("pose-plugin evaluate ")[2])
    parser = Parser()
    add_arguments(parser)
    args = parser.parse_args(words)
    return args.models, parse_extension(*args.extend)


def test_a_small_stretch_with_yarn_is_measured_first(base):
    def advice(target, rope, **pose):
        notes = plan_of(base, pose={"target_length": target, "rope": rope, **pose}).notes
        return [note for note in notes if "--extend" in note]

    (note,) = advice(32768, "yarn")
    assert "YaRN at 4 times the window" in note and "not shown to be worth it" in note
    assert asked(note) == ([base], (32768, {"type": "yarn"}))
    # The settings that change the frequencies belong to the command, and a name may have a space.
    (note,) = advice(32768, {"type": "yarn", "beta_fast": 16, "beta_slow": 1, "original_length": 8192})
    assert asked(note)[1] == (32768, {"type": "yarn", "beta_fast": 16, "original_length": 8192})
    inputs = replace(plan_of(base, pose={"target_length": 32768}).inputs, base="my base; true")
    (note,) = notes_of(inputs, plan_of(base, pose={"target_length": 32768}).rope)
    assert asked(note)[0] == ["my base; true"]
    assert advice(65536, "yarn") and not advice(131072, "yarn")
    assert not advice(32768, "linear") and not advice(32768, "yarn", sampler="none")


def test_other_ropes_need_training(base):
    def advised(rope, **pose):
        notes = plan_of(base, pose={"target_length": 32768, "rope": rope, **pose}).notes
        return [note.partition(" ")[0] for note in notes if "needs training" in note]

    assert advised("linear") == ["linear"] and advised("ntk") == ["ntk"]
    assert not advised("yarn") and not advised("linear", sampler="none")


@pytest.mark.parametrize("rope", ["yarn", "linear"])
def test_a_stretch_at_which_nothing_was_shown_to_work(base, rope):
    def advised(target, **pose):
        notes = plan_of(base, pose={"target_length": target, "rope": rope, **pose}).notes
        return any("nothing was shown to work at 64 times the window" in note for note in notes)

    assert advised(64 * 8192) and not advised(32 * 8192) and not advised(64 * 8192, sampler="none")


def test_numbers_of_a_plan(base):
    plan = plan_of(base)
    found = as_dict(plan)
    assert (found["window"], found["target"], found["rows_of_step"], found["rows"]) == (8192, 32768, 64, 64_000)
    assert found["tokens"] == {
        "step": 64 * 8192,
        "all": 64_000 * 8192,
        "all_full_length": 64_000 * 32768,
    }
    assert "theta 500000" in found["rope"]["before"] and "8e+06" in found["rope"]["after"]
    assert found["parameters"] == {"all": 8_030_261_248, "trained": 8_030_261_248}
    assert found["memory_bytes"]["total"] == plan.memory.total
    assert found["memory_bytes_full_length"] > plan.memory.total


@pytest.mark.parametrize(
    "rope, change",
    [("none", "nothing: their frequencies stay as they are"), ("yarn", "their frequencies are stretched")],
)
def test_the_layers_show_what_changes(base, rope, change):
    pose = {"target_length": 8192 if rope == "none" else 32768, "train_length": 4096, "rope": rope}
    (line,) = [line for line in text(plan_of(base, pose=pose)).splitlines() if "32 × full_attention" in line]
    assert line.endswith(change)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rl": "dpo"}, "rl='dpo'"),
        ({"pose": {"target_length": 32768, "content": "window"}}, "pose.content=window .* sequence_len=8192"),
        (
            {"pose": {"target_length": 32768, "train_length": 9000}},
            "train_length=9000 is longer than sequence_len=8192",
        ),
        ({"streaming": True, "sample_packing": True}, "streaming=True with sample_packing=True"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
    ],
)
def test_what_the_run_will_refuse(base, changes, message):
    with pytest.raises(PoSEError, match=message):
        plan_of(base, **changes)


@pytest.mark.parametrize(
    "changes, warning",
    [
        ({"pose": {"target_length": 32768, "train_length": 2048}}, "reads only the first pose.train_length=2048"),
        ({"batch_flattening": True}, "batch_flattening=True has no effect"),
        ({"batch_size": 16, "gradient_accumulation_steps": ...}, "batch_size=16 .* read only 2 of every 16 rows"),
        (
            {"test_datasets": [{"path": "x"}], "eval_sequence_len": "32769"},
            "eval_sequence_len=32769 tokens are longer than pose.target_length=32768",
        ),
        ({"pose": {"target_length": 8192, "rope": "none"}}, "train_length=8192 no document can have a jump"),
        ({"pose": {"target_length": 32768, "chunks": 1}}, "chunks=1, .* no document can have a jump.*Use chunks: 2"),
        ({"pose": {"target_length": 32768, "unskipped_ratio": 1}}, "unskipped_ratio=1, .*Lower unskipped_ratio"),
        ({"pose": {"target_length": 32768, "train_length": 1}}, "train_length=1 no document .*Lengthen train_length"),
    ],
)  # fmt: skip
def test_what_the_run_will_warn_of(base, tmp_path, changes, warning):
    path = tmp_path / "run.yaml"
    given = {key: value for key, value in values(base, **changes).items() if value is not ...}
    path.write_text(yaml.safe_dump({**given, "plugins": ["pose_plugin"]}))
    assert any(re.search(warning, each) for each in make_plan(from_yaml(path), draws=50).warnings)


def test_buckets_hold_every_distance_once_and_agree_with_the_coverage(base):
    plan = plan_of(base)
    assert [(each.first, each.last) for each in plan.buckets] == [
        (1, 4095), (4096, 8191), (8192, 16383), (16384, 24575), (24576, 32767),
    ]  # fmt: skip
    for each in plan.buckets:
        chances = plan.seen.probability[each.first : each.last + 1]
        assert each.chance == pytest.approx(chances.mean()) and each.rarest == chances.min()
        assert each.rows == pytest.approx(each.chance * 64_000)
    assert plan.buckets[0].chance > 0.99


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, {"method": "full", "stage": 0, "trained_bytes": 2, "master": False}),
        ({"bf16": False, "fp16": False}, {"weight_bytes": 4, "trained_bytes": 4}),
        ({"deepspeed": str(ROOT / "example_configs/deepspeed/zero3.json")}, {"stage": 3, "master": True}),
        ({"deepspeed": "deepspeed_configs/zero2.json"}, {"stage": 2}),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}},
         {"stage": 3, "offload": False, "master": False}),
        ({"fsdp_version": 1, "fsdp_config": {"offload_params": True}}, {"stage": 3, "offload": True, "master": True}),
        ({"bf16": None, "bfloat16": True}, {"weight_bytes": 2}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
            {"stage": 2, "offload": True},
        ),
        ({"optimizer": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "adamw_torch_4bit"}, {"optimizer": "adamw_4bit"}),
        ({"optimizer": "muon"}, {"optimizer": "adamw"}),
        ({"optimizer": "paged_lion_8bit"}, {"optimizer": "lion_8bit"}),
        ({"optimizer": "paged_adamw_32bit"}, {"optimizer": "adamw"}),
        ({"adapter": "lora", "quantize_moe_experts": True, "load_in_4bit": True}, {"quantised_experts": True}),
        ({"gradient_checkpointing": True, "liger_fused_linear_cross_entropy": True},
         {"checkpointing": True, "fused_loss": True}),
        ({"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_target_modules": ["q_proj"]},
         {"method": "qlora", "lora_rank": 32, "lora_targets": ["q_proj"], "trained_bytes": 4, "quantised": "nf4"}),
        ({"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
         {"method": "qlora", "quantised": "nf4-single"}),
        ({"adapter": "lora", "load_in_8bit": True, "lora_r": 4, "lora_target_linear": True},
         {"method": "8bit", "quantised": "int8", "lora_targets": "all-linear"}),
        ({"adapter": "beacon", "beacon": {"interval": 1024}, "pose": None},
         {"method": "beacon", "lora_rank": 0, "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        ({"attn_implementation": "eager"}, {"eager": True}),
        ({"eager_attention": True}, {"eager": True}),
        # Axolotl takes the faster of two of its older keys.
        ({"eager_attention": True, "sdp_attention": True}, {"eager": False}),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, {"stage": 3, "offload": True}),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_params.json"}, {"stage": 3, "offload": False}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"stage": 2, "master": True}),
        ({"fsdp_config": {"sharding_strategy": "no_shard"}}, {"stage": 0, "master": True}),
        ({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, {"stage": 3}),
        ({"fsdp_version": 2, "fsdp_config": {"sharding_strategy": "NO_SHARD"}}, {"stage": 3}),
    ],
)  # fmt: skip
def test_what_is_read_from_a_yaml(base, changes, expected):
    run = from_values(values(base, **changes), gpus=4).run
    assert {name: getattr(run, name) for name in expected} == expected
    assert (run.gpus, run.rows, run.window) == (4, 2, 8192)


def test_gpus_that_read_the_same_rows(base):
    plan = plan_of(base, gpus=8, tensor_parallel_size=2, context_parallel_size=1)
    assert plan.rows_of_step == 2 * 4 * 4 and "32 rows (2 rows × 4 × 4 groups of 2 GPUs)" in text(plan)
    assert any("memory is estimated without tensor_parallel_size=2" in note for note in plan.notes)
    assert plan_of(base, gpus=8, tensor_parallel_size=2, max_steps=None, rows=3200).inputs.steps == 100
    with pytest.raises(PoSEError, match="tensor_parallel_size=2 needs a multiple of 2 GPUs, but 1 are given"):
        plan_of(base, gpus=1, tensor_parallel_size=2)


def test_steps_from_rows_epochs_and_local_data(base, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 96 + "\n")
    data = {"max_steps": None, "num_epochs": 2, "datasets": [{"path": str(tmp_path / "rows.jsonl")}]}
    assert from_values(values(base, **data), gpus=2).steps == 12
    assert from_values(values(base, **data), gpus=2, rows=1600).steps == 200
    assert from_values(values(base, **data), gpus=2, steps=7).steps == 7
    packed = from_values(values(base, **data, sample_packing=True), gpus=2)
    assert "there may be fewer" in packed.notes[0] and "more" not in packed.notes[0]
    # Seen in Axolotl 0.19 and 0.21; see test_rows_of_type_completion.
    both = {**data, "sample_packing": True, "datasets": [{**data["datasets"][0], "type": "completion"}]}
    (note,) = from_values(values(base, **both)).notes
    assert "there may be more" in note and "64 rows" in note and "there may be fewer" in note
    cut = {**data, "datasets": [{**data["datasets"][0], "type": "completion"}]}
    assert "there may be more" in from_values(values(base, **cut)).notes[0]
    assert from_values(values(base, **cut), rows=96).notes == from_values(values(base, **cut)).notes
    held = from_values(values(base, max_steps=None, val_set_size=0.5), rows=96)
    assert held.steps == 6 and "holds part of the 96 rows out" in held.notes[0]
    (note,) = from_values(values(base), rows=96).notes
    assert note == "the number of steps is set to 1000, so the 96 rows of the data do not change it"
    part = {**data, "datasets": [{**data["datasets"][0], "split": "train"}, {**data["datasets"][0], "shards": 8}]}
    assert from_values(values(base, **part)).rows is None
    assert from_values(values(base, **part)).notes == [
        "shards: 8 takes a part of the data, so its rows are not counted"
    ]
    elsewhere = {**data, "datasets": [{"path": "someone/data", "type": "chat_template"}]}
    unknown = from_values(values(base, **elsewhere))
    assert unknown.steps is None and unknown.chat
    assert "the number of steps is not known here" in " ".join(make_plan(unknown, draws=50).warnings)


def test_rows_that_are_too_long_are_not_trained(base, tmp_path, monkeypatch):
    """Chats are in tests/integration/test_chat.py, next to what Axolotl leaves of them."""
    file = tmp_path / "rows.jsonl"

    def read(lengths, **changes):
        row = changes.pop("row", lambda length: {"input_ids": [0] * length})
        file.write_text("".join(json.dumps(row(length)) + "\n" for length in lengths))
        data = [{"path": str(file), "type": changes.pop("type", None)}]
        found = from_values(values(base, sequence_len=64, max_steps=None, datasets=data, **changes))
        return found.rows, found.notes

    rows, (note,) = read([64, 65, 9, 70])
    assert rows == 2 and note.startswith("about 2 of the 4 rows are not trained: those of more than sequence_len=64")
    assert read([64, 65], excess_length_strategy="truncate") == (2, [])
    rows, notes = read([65, 65])
    assert rows is None and "there is no row to train on in" in notes[-1]
    texts = {"row": lambda length: {"text": "a" * length}}
    for kind, count, said in (("completion", 2, False), ("alpaca", 2, True), ("chat_template", 2, True)):
        rows, notes = read([9, 99], type=kind, **texts)
        assert rows == count and any("there may be fewer rows, without those" in note for note in notes) == said, kind
    # Of a large file, some rows stand for the others.
    monkeypatch.setattr(dropped, "_READ", 30_000)
    rows, (note,) = read([65, 9] * 500)
    assert rows == pytest.approx(500, abs=100) and note.startswith(f"about {1000 - rows} of the 1000 rows")


@pytest.mark.parametrize("apart, most", [(True, -1), (True, 7), (False, None)])
def test_steps_and_rows_are_those_of_the_trainer(base, tmp_path, apart, most):
    """The last step of an epoch reads what is left; Axolotl gives transformers the steps of all epochs together."""
    settings = {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "num_epochs": 3, "max_steps": most}
    plan = from_values(values(base, **settings), rows=10, apart=apart)
    read = []

    class Counts(torch.nn.Linear):
        def forward(self, number, **_):
            read.append(len(number))
            return {"loss": super().forward(number[:, None].float()).sum()}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=-1 if apart and most == -1 else plan.steps, num_train_epochs=3, use_cpu=True,
        per_device_train_batch_size=1, gradient_accumulation_steps=4, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Counts(1, 1), arguments, train_dataset=[{"number": i} for i in range(10)])
    trainer.train()
    assert (plan.steps, plan.rows) == (trainer.state.global_step, sum(read))
    assert plan.steps == {(True, -1): 9, (True, 7): 7, (False, None): math.ceil(3 * 10 / 4)}[apart, most]
    assert as_dict(make_plan(plan, draws=50))["rows"] == plan.rows


@pytest.mark.axolotl
@pytest.mark.parametrize(
    "given", [{"batch_size": 16}, {"batch_size": 16, "gradient_accumulation_steps": None}, {"micro_batch_size": 3}]
)
def test_batch_size_as_axolotl_reads_it(base, given, monkeypatch):
    """With batch_size alone, Axolotl accumulates nothing, and yet counts its steps as if it did."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from axolotl.utils.config import normalize_config, validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.trainer import calculate_total_num_steps
    from datasets import Dataset

    run = {"micro_batch_size": 2, "bf16": False, "learning_rate": 1e-5, "num_epochs": 3, **given}
    run |= {"base_model": base, "sequence_len": 64, "datasets": [{"path": "rows.jsonl", "type": "completion"}]}
    plan = from_values(run, gpus=2, rows=100)
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = validate_config(DictDefault(run))
    normalize_config(cfg)
    rows = Dataset.from_dict({"input_ids": [[1]] * 100, "labels": [[1]] * 100})
    assert (plan.accumulate, plan.steps) == (cfg.gradient_accumulation_steps, calculate_total_num_steps(cfg, rows))


@pytest.mark.axolotl
def test_rows_of_type_completion():
    """Axolotl itself does what the notes say: it cuts a text into up to 64 pieces, and packs them."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
    from axolotl.prompt_strategies.completion import load
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.samplers import MultipackBatchSampler
    from torch.utils.data import SequentialSampler

    from tests.models import make_tokenizer

    strategy = load(make_tokenizer(), DictDefault({"sequence_len": 50, "train_on_inputs": False}), {"field": "text"})

    def pieces(*lengths):
        """Return the lengths of the pieces; each text ends with one more token."""
        made = strategy.tokenize_prompt({"text": [" ".join(["w40"] * length) for length in lengths]})["input_ids"]
        return list(map(len, made))

    assert pieces(*[10] * 12) == [11] * 12
    assert pieces(*[199] * 3) == [50] * 12
    assert pieces(6400) == [50] * 64
    # 12 short texts become 3 rows, fewer than their lines; 3 long ones become 12, more.
    lengths = np.array(pieces(*[10] * 12, *[199] * 3))
    sampler = MultipackBatchSampler(
        SequentialSampler(range(len(lengths))),
        lengths=lengths,
        batch_max_len=50,
        batch_size=1,
        group_size=100,
        bin_size=100,
        drop_last=False,
        num_processes=1,
    )
    packs = [pack for batch in sampler for pack in batch]
    assert sorted(int(lengths[pack].sum()) for pack in packs) == [44] * 3 + [50] * 12


LORA = {"adapter": "lora", "lora_r": 8, "lora_target_linear": True}
FAR = {"pose": {"target_length": 131072, "rope": "yarn"}}


@pytest.mark.parametrize(
    "changes, options, text",
    [
        ({"max_steps": 20}, {"gpus": 1}, "160 rows in all are fewer"),
        ({"max_steps": 20}, {"gpus": 1}, "will be in fewer than 100 rows"),
        ({"pose": {"target_length": 32768, "sampler": "none", "rope": "yarn"}}, {}, "are in no row, the nearest 8192"),
        ({**LORA, **FAR}, {}, "leaves embeddings and norms frozen"),
        ({**LORA, **FAR, "lora_modules_to_save": ["embed_tokens"]}, {}, "leaves norms frozen"),
        ({}, {"gpu_gib": 24}, "and has 24. To save memory: gradient_checkpointing"),
        ({"learning_rate": 1e-5}, {}, "learning_rate=1e-05 is rounded away in every weight above 0.0051"),
        ({"bf16": "auto"}, {}, "bf16=auto keeps the trained weights in bf16"),
        ({"bf16": None}, {}, "bf16=auto, the default, keeps"),
        ({"fsdp_version": 2, "fsdp_config": {}}, {}, "Use deepspeed: …/zero3.json instead of FSDP 2"),
        ({"optimizer": "optimi_adamw", "optim_args": {"kahan_sum": False}}, {}, "small steps are rounded away"),
        ({"sequence_len": 16384}, {}, "is longer than the base's own, 8192"),
        ({"pose": None}, {}, "there is no `pose:` block"),
        ({"pose": {"target_length": 32768, "sampler": "turns", "rope": "yarn"}}, {}, "sampler=turns needs chats"),
        ({"pose": {"target_length": 32768, "rope": "yarn", "content": "skip", "train_length": 2048},
          "datasets": [{"path": "x", "type": "chat_template"}]}, {}, "takes pieces out of chats"),
    ],
)  # fmt: skip
def test_warnings(base, changes, options, text):
    warnings = plan_of(base, **options, **changes).warnings
    assert any(text in warning for warning in warnings), warnings


def test_a_run_like_the_papers_has_no_warnings(base):
    assert plan_of(base, gpu_gib=80, learning_rate=2e-5, deepspeed={"zero_optimization": {"stage": 3}},
                   gradient_checkpointing=True, liger_fused_linear_cross_entropy=True).warnings == []  # fmt: skip


NARROW = "keeps the trained weights in bf16"


@pytest.mark.parametrize(
    "changes",
    [
        {"deepspeed": {"zero_optimization": {"stage": 1}}},
        {"bf16": False},
        {"bf16": "auto", "fp16": True},
        {"learning_rate": 0.01},
        {"optimizer": "optimi_adamw"},
        {"optimizer": "adamw_torch_8bit", "optim_args": {"bf16_stochastic_round": True}},
        {"optimizer": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True,other=1"},
        {"optimizer": "adamw_anyprecision", "optim_args": "use_kahan_summation=True"},
        {"fsdp_version": 1, "fsdp_config": {}},
        {"adapter": "lora", "lora_r": 8},
    ],
)
def test_no_warning_about_steps_that_are_not_lost(base, changes):
    assert not any(NARROW in each for each in plan_of(base, **{"learning_rate": 1e-5, **changes}).warnings)


def test_distances_in_no_row_get_one_warning(base):
    warnings = plan_of(base, pose={"target_length": 32768, "sampler": "none", "rope": "yarn"}, max_steps=2).warnings
    assert sum("are in no row" in each for each in warnings) == 1
    assert not any("will be in fewer than" in each for each in warnings)


def test_rows_that_a_stretch_needs(base):
    def few(steps):
        return [each for each in plan_of(base, gpus=1, max_steps=steps).warnings if "will be in fewer than" in each]

    needed = int(re.search(r"([\d,]+) rows would hold each of them in 100", few(20)[0])[1].replace(",", ""))
    steps = math.ceil(needed / plan_of(base, gpus=1).rows_of_step)
    assert few(steps - 1) and not few(steps)
    # The plan says so whether the rows are too few, enough or not known.
    for changes in ({"max_steps": 20}, {}, {"max_steps": None}):
        plan = plan_of(base, gpus=1, **changes)
        assert f"\nNeeded     {needed:,} rows, so that" in text(plan) and as_dict(plan)["rows_needed"] == needed


@pytest.mark.parametrize("window, target", [(8192, 131072), (4096, 262144), (8192, 2**20)])
def test_the_rows_needed_are_those_of_the_closed_form(base, window, target):
    pose = {"target_length": target, "train_length": window, "rope": "yarn"}
    needed = 100 * (target - window + 1) / (window - 1)
    inputs = from_values(values(base, pose=pose, micro_batch_size=1), steps=math.ceil(needed / 4 * 1.04))
    plan = make_plan(inputs)
    assert 1 <= rows_needed(plan) / needed < 1.04
    assert not any("will be in fewer than" in warning for warning in plan.warnings)


@pytest.mark.parametrize("pose", [{"sampler": "none"}, {"chunks": 1}])
def test_without_skips_no_rows_are_needed(base, pose):
    plan = plan_of(base, pose={"target_length": 32768, "rope": "yarn", **pose})
    assert as_dict(plan)["rows_needed"] is None and "Needed" not in text(plan)


def test_which_distance_decides_how_many_rows_are_needed(base):
    chances = np.full(32768, 0.5)
    plan = plan_of(base)
    plan = replace(plan, seen=replace(plan.seen, probability=chances))
    chances[-8192:] = 0.01  # the last window does not count
    assert rows_needed(plan) == 200
    chances[-8193] = 0.25
    assert rows_needed(plan) == 400
    # The simulation may have missed a few distances, but not many.
    chances[5] = 0
    assert rows_needed(plan) is None and "Needed     not known here: 200 simulated rows lack" in text(plan)
    chances[5:16384] = 0
    assert rows_needed(plan) == 400


def test_overrides_of_the_models_config(base):
    """They change the planned model, and contradict the `pose:` block as in the run."""
    shorter = plan_of(base, overrides_of_model_config={"num_hidden_layers": 16, "max_position_embeddings": 32768})
    assert as_dict(shorter)["parameters"]["all"] < as_dict(plan_of(base))["parameters"]["all"] * 0.6
    for theirs, match in (
        ({"max_position_embeddings": 16384}, "max_position_embeddings=16384 contradicts"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_parameters.rope_theta=5.0 contradicts"),
        ("long", "overrides_of_model_config='long'"),
    ):
        with pytest.raises(PoSEError, match=match):
            plan_of(base, overrides_of_model_config=theirs)


def test_warnings_of_the_rope_are_passed_on(tmp_path):
    sliding = {**LLAMA3_8B, "model_type": "mistral", "sliding_window": 40960, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(sliding))
    warnings = plan_of(str(tmp_path), pose={"target_length": 65536, "rope": "yarn"}).warnings
    assert any("sliding_window=40960" in warning for warning in warnings)


def test_a_model_type_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA3_8B, "model_type": "unheard"}))
    assert any("model_type='unheard'" in warning for warning in plan_of(str(tmp_path)).warnings)


# -- the command ---------------------------------------------------------------------------------------------------


def test_command_prints_and_draws(base, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values(base)))
    line = ["plan", str(config), "--gpus", "8", "--gpu-memory", "80", "--draws", "100"]
    assert main([*line, "--output", str(tmp_path / "new" / "plan.png")]) == 0
    out = capsys.readouterr().out
    for piece in ("trained: 8192 tokens, target: 32768", "theta 500000", "1000 steps, 64,000 rows", "Estimated",
                  "of 80 GiB", "24576–32767", "Written:"):  # fmt: skip
        assert piece in out
    assert (tmp_path / "new" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 64_000


def test_options_alone_make_the_plan_that_a_yaml_makes(base, capsys):
    line = ["plan", "--base", base, "--target-length", "32768", "--train-length", "8192", "--rope", "base:8e6",
            "--gpus", "8", "--rows-of-gpu", "2", "--accumulate", "4", "--steps", "1000", "--draws", "200",
            "--json"]  # fmt: skip
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(as_dict(plan_of(base))))
    assert main([*line, "--method", "qlora", "--zero", "3", "--checkpointing"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "qlora" and found["parameters"]["trained"] == 41_943_040


@pytest.mark.parametrize(
    "line, text",
    [
        (["nowhere.yaml"], "nowhere.yaml is not a file"),
        ([], "--base, --target-length, --train-length missing"),
        (["{yaml}", "--target-length", "5"], "--target-length cannot be combined with"),
        (["{yaml}", "--method", "qlora"], "--method cannot"),
        # Also with the value that it has if it is not given.
        (["{yaml}", "--method", "full"], "--method cannot"),
        (["{yaml}", "--rows-of-gpu", "1"], "--rows-of-gpu cannot"),
        (["{yaml}", "--zero", "0"], "--zero cannot"),
        (["{yaml}", "--gpus", "0"], "--gpus: '0' is not"),
        (["{yaml}", "--base", "{wrong}"], "transformers cannot read this config: "),
        (["{yaml}", "--base", "{layers}"], "rope_theta=[10000.0, 5000000.0] has one value per layer"),
        (["{yaml}", "--base", "{empty}"], "transformers cannot build a model from the base's config.json: "),
        (["{yaml}", "--output", "plan.gif"], "must end in one of"),
        (["{yaml}", "--output", "{yaml}/plan.png"], "yaml.yaml cannot be used (File exists)"),
        (["{hub}"], "config.json of someone/model cannot be read from someone/model"),
        (["{hub}", "--base", "/nowhere"], "config.json of someone/model cannot be read from /nowhere"),
        (["{broken}"], "is not valid YAML"),
        (["{bad}"], "pose.target_lenght=5 is not a known key"),
        (["--base", "{base}", "--target-length", "9", "--train-length", "8", "--rope", "base:x"], "--rope base:x"),
        (["--base", "{base}", "--target-length", "4096", "--train-length", "2048"], "target_length"),
    ],
)
def test_refused(base, tmp_path, capsys, line, text):
    files = {"base": base}
    for name, content in {
        "yaml": yaml.safe_dump(values(base)),
        "hub": yaml.safe_dump(values("someone/model")),
        "broken": "a: [1",
        "bad": yaml.safe_dump(values(base, pose={"target_lenght": 5})),
    }.items():
        files[name] = str(tmp_path / f"{name}.yaml")
        Path(files[name]).write_text(content)
    changes = {"wrong": {"hidden_size": "wide"}, "layers": {"rope_theta": [1e4, 5e6]}, "empty": {"vocab_size": -1}}
    for name, changed in changes.items():
        files[name] = str(tmp_path / name)
        Path(files[name]).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA3_8B, **changed}))
    assert main(["plan", *(word.format(**files) for word in line)]) == 2
    assert text in capsys.readouterr().err


def test_a_yaml_without_a_base_or_a_window(base, tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1")
    with pytest.raises(PoSEError, match="has no base_model"):
        from_yaml(tmp_path / "x.yaml")
    with pytest.raises(PoSEError, match="neither sequence_len nor"):
        from_values({"base_model": base, "pose": {"target_length": 9}})


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"sequence_len": "1e30"}, "sequence_len='1e30' cannot work: .* at most 2147483647"),
        ({"learning_rate": float("nan")}, "learning_rate=nan cannot work"),
        ({"micro_batch_size": -2}, "micro_batch_size=-2 cannot work"),
        ({"adapter": "lora", "lora_r": 0.5}, "lora_r=0.5"),
        ({"adapter": "lora", "lora_modules_to_save": "norm"}, r"lora_modules_to_save='norm'"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "stage=4 cannot work: .*at most 3"),
        ({"deepspeed": [1]}, r"deepspeed=\[1\] is not a block"),
        ({"deepspeed": {"zero_optimization": {"stage": "auto"}}}, "stage='auto'"),
        ({"fsdp_config": "full"}, "fsdp_config='full' is not"),
        ({"datasets": {"path": "a.jsonl"}}, "datasets=.* is not a list of blocks"),
    ],
)
def test_values_of_a_wrong_type_are_named(base, changes, text):
    with pytest.raises(PoSEError, match=text):
        from_values(values(base, **changes))


def test_target_modules_that_are_no_regular_expression(base):
    with pytest.raises(PoSEError, match=r"target modules: '\(' is not a regular expression"):
        make_plan(from_values(values(base, adapter="lora", lora_r=8, lora_target_modules="(")), draws=20)


def test_a_held_out_part_larger_than_the_data_and_steps_below_zero(base, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 96)
    data = {"max_steps": -1, "datasets": [{"path": str(tmp_path / "rows.jsonl")}]}
    assert from_values(values(base, **data)).steps == 12
    assert from_values(values(base, **data, val_set_size=0.5)).steps == 6
    for most in (96, 0.995, 95.5):
        with pytest.raises(PoSEError, match=f"val_set_size={most} leaves none of the 96 rows"):
            from_values(values(base, **data, val_set_size=most))
    gone = {"max_steps": None, "datasets": [{"path": "gone.jsonl"}]}
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = from_values(values(base, max_steps=None, datasets=[{"path": str(tmp_path / "empty.jsonl")}]))
    assert empty.steps is None and "there is no row to train on in" in empty.notes[0]
    found = from_values(values(base, **gone))
    assert found.steps is None and "gone.jsonl is not on this machine" in found.notes[0]
    assert not from_values(values(base, **gone), steps=5).notes
    # A name of the Hub is not a local file.
    assert not from_values(values(base, max_steps=None, datasets=[{"path": "someone/data"}])).notes


@pytest.mark.parametrize(
    "content",
    [
        b"base_model: x # \xe9\n",
        b"",
        b"base_model: x\n---\nbase_model: y\n",
        b"base_model: x\n\tsequence_len: 8\n",
        b"base_model: !!python/object:os.system x\n",
    ],
)
def test_yamls_that_are_not_text_or_have_no_base(tmp_path, content):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(PoSEError, match=r"is not valid YAML|has no base_model"):
        from_yaml(tmp_path / "x.yaml")


def test_a_config_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PoSEError, match=r"config\.json is not valid JSON"):
        from_values({"base_model": str(tmp_path), "sequence_len": 9})
