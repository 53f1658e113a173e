"""`SFTTrainer(peft_config=BeaconConfig(…))` and the plain Trainer, on one process and on two."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")

from tests.forked import LIMIT, CaseError, forked, good_ranks, ranks
from tests.integration import distributed
from tests.integration.records import layer_kinds, moved, unbind_all, watch_draws, weights_of
from tests.integration.trl_runs import make_model, words

LENGTHS = (20, 40, 40, 70, 70, 90, 100, 110)  # intervals of 16 in a window of 64: from 2 to 7 a text


def trainer_of(
    folder: Path, framework: str = "trl", adapter: dict[str, Any] | None = None, quantised: bool = False, **config: Any
) -> Any:
    """Four steps of two rows."""
    import torch
    from datasets import Dataset

    from pose_plugin import BeaconConfig

    world = int(os.environ.get("WORLD_SIZE", "1"))
    values = {
        "output_dir": str(folder / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 2 // world,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        **config,
    }
    picker = random.Random(0)
    rows = [{"text": words(picker, count)} for count in LENGTHS * 2]
    beacon = BeaconConfig(**{"interval": 16, "ratios": [2, 4, 8], "headroom": 0, **(adapter or {})})
    if framework == "trl":
        from trl import SFTConfig, SFTTrainer

        args: Any = SFTConfig(**{"max_length": 128, **values})
        model, tokenizer = make_model(folder, extended=False)
        if quantised:
            model = four_bit(folder)
        torch.manual_seed(0)
        data = Dataset.from_list(rows)
        return SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=beacon)
    from peft import get_peft_model
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model, tokenizer = make_model(folder, extended=False)
    tokens = [{"input_ids": tokenizer.encode(row["text"])} for row in rows]
    return Trainer(
        get_peft_model(model, beacon),
        args=TrainingArguments(**values),
        train_dataset=Dataset.from_list(tokens),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )


def four_bit(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=asked, dtype=torch.float32)


def learn(folder: Path, framework: str = "trl", resume: str | None = None, **config: Any) -> dict[str, Any]:
    from pose_plugin.beacon import find_tuner

    strategy = config.pop("strategy", None)
    if strategy:
        distributed.on_cpu(strategy)
    trainer = trainer_of(folder, framework, **config)
    drawn, before = watch_draws(find_tuner(trainer.model)), weights_of(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return {
        "moved": moved(trainer.model, before),
        "kinds": layer_kinds(trainer.model),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "drawn": drawn,
        "callbacks": [type(each).__name__ for each in trainer.callback_handler.callbacks],
        "names": sorted(n for n, p in trainer.model.named_parameters() if p.requires_grad),
        "stage": distributed.stage(trainer),
        "world": trainer.args.world_size,
    }


def run(folder: Path, *args: Any, **kwargs: Any) -> Any:
    return forked(functools.partial(learn, folder, *args, **kwargs))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    distributed.import_frameworks()
    folder = tmp_path_factory.mktemp("beacon")
    forked(make_base, folder)
    return folder


def make_base(folder: Path) -> None:
    make_model(folder, extended=False)


@pytest.fixture(scope="module")
def single(home) -> Any:
    return run(home, save_strategy="steps", save_steps=2)


def test_sft_trainer_binds_by_itself(single):
    found = single.value
    assert [found["callbacks"].count(name) for name in ("BeaconCallback", "LostSteps")] == [1, 1]
    assert found["names"] and all("beacon_" in name for name in found["names"])
    assert "the first step with a label behind a beacon left a gradient" in single.output
    assert len(found["losses"]) == 4


def test_rows_of_a_batch_have_the_same_number_of_intervals(home):
    def case() -> list[set[int]]:
        from pose_plugin.beacon import interval_count
        from pose_plugin.beacon.trainer import bind_beacon

        trainer = trainer_of(home)
        bind_beacon(trainer)
        batches = trainer.get_train_dataloader()
        return [{interval_count(int(n), 16) for n in batch["attention_mask"].sum(1)} for batch in batches]

    counts = forked(case).value
    assert all(len(each) == 1 for each in counts) and len(set.union(*counts)) > 3


def test_a_resumed_run_draws_and_learns_what_the_first_did(home, single):
    again = run(home, resume=str(home / "out" / "checkpoint-2"))
    assert again.value["drawn"] == single.value["drawn"][2:]
    assert again.value["losses"][-2:] == pytest.approx(single.value["losses"][-2:], abs=1e-4)


def test_plain_loss_without_checkpointing_gives_the_same_run(home, single):
    """TRL's default is to checkpoint."""
    other = run(home, loss_type="nll", gradient_checkpointing=False)
    assert other.value["drawn"] == single.value["drawn"]
    assert other.value["losses"] == pytest.approx(single.value["losses"], abs=1e-4)


def test_the_transformers_trainer(home):
    found = run(home, "transformers").value
    assert found["callbacks"].count("BeaconCallback") == 1 and len(found["drawn"]) == 4


def test_a_four_bit_base(home, single):
    """With and without checkpointing; the base stays as it was quantised, and what is learned is much the same."""
    pytest.importorskip("bitsandbytes")
    found = run(home, quantised=True, output_dir=str(home / "four_bit")).value
    assert found["kinds"] == ["Linear4bit"] and single.value["kinds"] == ["Linear"]
    assert found["names"] == single.value["names"]
    assert set(found["moved"]) <= set(found["names"])
    # All of a layer's but what the last one's queries and outputs get, which is nothing.
    assert len(found["moved"]) == len(found["names"]) - 2
    assert found["drawn"] == single.value["drawn"]
    assert found["losses"] == pytest.approx(single.value["losses"], abs=0.1) and found["losses"][0] > 0
    plain = run(home, quantised=True, output_dir=str(home / "four_bit"), gradient_checkpointing=False).value
    assert plain["losses"] == pytest.approx(found["losses"], abs=1e-5)


REFUSED = {
    "packing": ({"packing": True}, "packing=True"),
    "padding free": ({"padding_free": True, "max_length": None}, "padding_free=True"),
    "reentrant": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "use_reentrant",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_step(home, name):
    changes, message = REFUSED[name]
    with pytest.raises(CaseError, match=message):
        run(home, **changes)


def test_a_run_whose_beacons_get_no_gradient_is_stopped(home):
    """What any fault that loses the gradient looks like; reentrant checkpointing is one."""

    def case() -> None:
        from pose_plugin.beacon.cache import BeaconCache

        close = BeaconCache.close

        def cut(self: Any, *args: Any) -> None:
            close(self, *args)
            self.pieces = [[(k.detach(), v.detach()) for k, v in layers] for layers in self.pieces]

        BeaconCache.close = cut  # type: ignore[method-assign]
        trainer_of(home).train()

    with pytest.raises(CaseError, match="gradient norm is 0"):
        forked(case)


def test_texts_within_one_interval(home):
    """In layout v2, beacons within the interval are read as well, so such a run goes on."""
    short = {"interval": 32, "ratios": [2]}
    with pytest.raises(CaseError, match=r"longest text has 30 tokens.*max_length=30 cuts texts there"):
        run(home, adapter=short, max_length=30)
    within = run(home, adapter={**short, "layout": "v2"}, max_length=30).output
    assert "left a gradient of norm" in within and "no beacon was trained" not in within


def test_texts_that_would_stop_the_run_later(home):
    def case(judged: Any, adapter: dict[str, Any], strategy: str = "no") -> str:
        from pose_plugin.beacon.trainer import bind_beacon
        from pose_plugin.utils.errors import PoSEError

        trainer = trainer_of(home, adapter=adapter)
        trainer.args.eval_strategy = strategy
        long = trainer.train_dataset.filter(lambda row: len(row["input_ids"]) > 100)
        trainer.eval_dataset = {"long": long} if judged == "long" else long.select([]) if judged else None
        try:
            bind_beacon(trainer)
        except PoSEError as error:
            return str(error)
        return ""

    ask = functools.partial(forked, case)

    full = {"window": 32, "ratios": [2, 4]}  # holds 16·4 + 16 tokens
    assert "train_dataset: a text of 111 tokens would stop the run. training text too long" in ask(None, full).value
    half = {"ratio": 2}  # holds 48·2 + 16 tokens, so 112
    assert ask("long", half, "steps").value == ""
    half = {"window": 48, "ratio": 2}
    found = ask("long", half, "steps").value
    assert "eval_dataset long: a text of 111 tokens would stop the run. window: 48 positions are full" in found
    assert ask("long", half).value == ask("empty", half, "steps").value == ""


def test_beacons_keep_their_dtype_over_a_four_bit_base(home):
    """TRL casts what is trained over such a base to bf16."""
    pytest.importorskip("bitsandbytes")

    def case() -> list[set[str]]:
        from pose_plugin.beacon.trainer import bind_beacon

        trainer = trainer_of(home, quantised=True, adapter={"dtype": "float32"})
        found = [{str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}]
        bind_beacon(trainer)
        return [*found, {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}]

    assert forked(case).value == [{"torch.bfloat16"}, {"torch.float32"}]


def test_evaluation_that_condenses_nothing_is_warned_about(home):
    """Its loss is the base's, and stays so however long beacons are trained."""

    def case(longest: int) -> float:
        trainer = trainer_of(home, "transformers", max_steps=1)
        trainer.train()
        few = trainer.train_dataset.filter(lambda row: longest - 20 < len(row["input_ids"]) <= longest)
        found = trainer.evaluate(few)["eval_loss"]
        with trainer.model.disable_adapter():
            return abs(found - trainer.evaluate(few)["eval_loss"])

    raw, condensed = forked(case, 50), forked(case, 100)
    assert raw.value == 0 and "no evaluation text was condensed" in raw.output
    assert condensed.value > 1e-4 and "no evaluation text was condensed" not in condensed.output


def test_texts_that_are_read_again_are_counted(home):
    """Two or four rows have each of five numbers of intervals."""

    def case(rows: int) -> None:
        trainer_of(home, "transformers", max_steps=1, per_device_train_batch_size=rows).train()

    assert "an epoch reads" not in forked(case, 2).output
    assert "beacons: an epoch reads 40 rows instead of 16" in forked(case, 8).output


def test_trainers_are_left_as_they_were(home):
    def case() -> tuple[bool, bool]:
        from transformers import Trainer

        unbind_all()
        before = Trainer.train
        trainer = trainer_of(home)
        during = Trainer.train is before
        del trainer
        gc.unfreeze()
        gc.collect()
        return during, Trainer.train is before

    assert forked(case).value == (False, True)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_two_ranks_draw_and_learn_what_one_process_does(home, single, strategy):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    environment = distributed.environment(distributed.Case("trl", strategy, "lora"))
    case = functools.partial(
        learn, home, output_dir=str(home / strategy), strategy=strategy, gradient_checkpointing=False
    )
    both = [outcome.value for outcome in good_ranks(case, **environment)]
    assert [each["world"] for each in both] == [2, 2]
    assert {each["stage"] for each in both} == {{"ddp": None, "zero2": 2, "zero3": 3}[strategy]}
    # Of each rank the lengths are its own rows', the ratios are the same.
    ratios = [[found for _, found in each["drawn"]] for each in (*both, single.value)]
    assert ratios[0] == ratios[1] == ratios[2]
    assert both[0]["losses"] == pytest.approx(single.value["losses"], abs=2e-4)
    saved = [distributed.saved_values(home / folder) for folder in ("out", strategy)]
    assert saved[0].keys() == saved[1].keys()


def without_gradient(folder: Path, ranks_without: list[str]) -> list[str]:
    """A run of one step in which these ranks see no gradient, as of rows without a label behind the first interval."""
    import torch

    from pose_plugin.beacon.trainer import GradientWatch

    if os.environ["RANK"] in ranks_without:
        GradientWatch.norm = lambda self, parameter: torch.zeros(())  # type: ignore[method-assign]
    distributed.on_cpu("ddp")
    trainer = trainer_of(folder, max_steps=1, gradient_checkpointing=False, output_dir=str(folder / "none"))
    trainer.train()
    return [type(each).__name__ for each in trainer.callback_handler.callbacks]


def test_one_rank_without_a_gradient_is_no_fault_and_where_none_has_one_all_stop(home):
    environment = distributed.environment(distributed.Case("trl", "ddp", "lora"))
    found = good_ranks(without_gradient, home, ["1"], **environment)
    judged = "the first step with a label behind a beacon left a gradient of norm"
    assert [one.output.count(judged) for one in found] == [1, 0]
    for error in ranks(without_gradient, home, ["0", "1"], **environment):
        assert isinstance(error, CaseError) and str(error).startswith("PoSEError: gradient: the beacons' gradient norm")


def test_zero3_with_checkpointing_is_refused_rather_than_trained_without_gradient(home):
    """TRL's defaults."""
    pytest.importorskip("deepspeed")
    environment = distributed.environment(distributed.Case("trl", "zero3", "lora"))
    case = functools.partial(learn, home, output_dir=str(home / "no"), strategy="zero3")
    for found in ranks(case, **environment):
        assert isinstance(found, CaseError) and "use ZeRO-2" in str(found)


def test_the_launcher_and_the_example(tmp_path):
    """`accelerate launch` with the committed DDP file, two processes on CPU."""
    root = Path(__file__).parents[2]
    script = root / "example_configs" / "beacon" / "trl_beacon.py"
    rows = [{"text": f"Line {at} of a text. " * 20} for at in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(distributed.CONFIGS / "accelerate" / "ddp.yaml"), "--mixed_precision", "no"]
    arguments = ["--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out")]
    arguments += ["--steps", "2", "--batch-size", "1"]
    variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(root)}
    with distributed.taken_port() as port:
        command += ["--main_process_port", port, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=root, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("saved to ") == 2  # each rank says it
    assert (done.stdout + done.stderr).count("the first step with a label behind a beacon left a gradient") == 1
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["interval"]) == ("POSE_PLUGIN_BEACON", 32)
