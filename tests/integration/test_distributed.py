"""Two ranks on CPU: what they compute is what one process computes, with the right frequencies, and saved complete."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.forked import LIMIT, CaseError, Once, forked, good_ranks, ranks
from tests.integration import distributed, launched, trl_runs
from tests.integration.distributed import CASES, Case, twin, whole_modules
from tests.models import make_llama, make_tokenizer
from tests.pages import blocks

# Kind of run and ZeRO stage, as accelerate names them.
KINDS = {
    "ddp": ("MULTI_CPU", None),
    "zero2": ("DEEPSPEED", 2),
    "zero3": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
}
BY_A_TRAINER = [case for case in CASES if case.framework != "loop"]


def params(cases):
    """Return the parameters of a test; those of Axolotl run with each of its versions."""
    return [pytest.param(case, marks=pytest.mark.axolotl) if case.framework == "axolotl" else case for case in cases]


def needs(case):
    for package, needed in {
        "deepspeed": case.strategy.startswith("zero"),
        "axolotl": case.framework == "axolotl",
    }.items():
        if needed and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed here")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """case → (folder, what each rank saw); each run is made once, and one that failed is not tried again."""
    home = tmp_path_factory.mktemp("distributed")
    trl_runs.make_model(home)
    distributed.import_frameworks()
    runs = Once()

    def make(case):
        folder = home / str(case)
        folder.mkdir()
        (folder / "base").symlink_to(home / "base")
        work = getattr(distributed, case.framework)
        if case.strategy == "single":
            return folder, [forked(work, folder, case)]
        return folder, good_ranks(work, folder, case, **distributed.environment(case))

    def get(case):
        needs(case)
        return runs.get(case, lambda: make(case))

    return get


@pytest.fixture(params=params(CASES), ids=str)
def case(request):
    needs(request.param)
    return request.param


def test_the_run_is_what_it_claims_to_be(run, case):
    for rank in run(case)[1]:
        assert rank.value["world"] == 2
        assert rank.value["divided"] is (case.strategy in ("zero3", "fsdp2"))
        if case.framework != "loop":
            assert (rank.value["kind"], rank.value["stage"]) == KINDS[case.strategy]
            # zero3_init_flag: no rank ever held the whole model.
            # 4-bit weights are made from whole ones.
            at_birth = case.strategy == "zero3" and case.adapter != "qlora"
            assert rank.value["divided_at_birth"] is at_birth


def test_losses_are_those_of_one_process(run, case):
    alone = run(twin(case))[1][0].value
    assert len(alone["losses"]) == 4 and len(set(alone["losses"])) == 4
    for rank in run(case)[1]:
        assert rank.value["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        # Newer versions take the mean of the ranks' means here, and rows are of unlike length.
        assert rank.value.get("eval_losses") == pytest.approx(alone.get("eval_losses"), abs=1e-3)
        for got, expected in zip(rank.value["logits"], alone["logits"], strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


def test_frequencies_are_exact_and_alike(run, case):
    alone = run(twin(case))[1][0].value["frequencies"]
    assert {dtype for dtype, _ in alone.values()} == {"torch.float32"}
    for rank in run(case)[1]:
        assert rank.value["frequencies"] == alone


def test_every_rank_is_tested_and_one_says_so(run, case):
    found = run(case)[1]
    if case.framework == "loop":
        assert found[0].value["after_jump"] == found[1].value["after_jump"] > 0.01
    else:
        assert [rank.output.count("[pose_plugin] self-test passed") for rank in found] == [1, 0]


# Elsewhere rank 0 saves by itself.
@pytest.mark.parametrize("case", params(case for case in BY_A_TRAINER if case.strategy in ("zero3", "fsdp2")), ids=str)
def test_no_rank_leaves_a_save_of_divided_weights_before_it_is_complete(run, case):
    """Axolotl goes on to write the tokenizer on every rank, and rank 0 would read half of it."""
    for rank in run(case)[1]:
        assert rank.value["complete"] and all(rank.value["complete"])


def test_what_is_saved_reloads_to_what_was_trained(run, case):
    folder, ranks = run(case)
    out = folder / "out"
    for place in (out, out / "checkpoint-2", out / "checkpoint-4")[: 1 if case.framework == "loop" else 3]:
        assert json.loads((place / "config.json").read_text())["max_position_embeddings"] == trl_runs.TARGET
        assert json.loads((place / "pose.json").read_text())["target_length"] == trl_runs.TARGET
        tensors = distributed.saved_tensors(place)
        assert tensors and all(tensors.values()), "an empty tensor was saved"
        names = " ".join(tensors)
        if case.adapter != "full":
            assert all(part in names for part in ["lora_B", *whole_modules(case)])
    if case.adapter == "qlora":
        # Its logits depend on how the base is loaded; its own numbers do not.
        alone = run(twin(case))[0]
        expected, got = (forked(distributed.saved_values, place / "out").value for place in (alone, folder))
        assert expected.keys() == got.keys()
        for name, values in expected.items():
            # Adam divides by a gradient's size, so rounding may move single numbers by a whole step.
            distance = np.linalg.norm(np.subtract(got[name], values))
            assert distance < 5e-3 * np.linalg.norm(values), name
        return
    loaded = forked(distributed.reloaded, folder, case.adapter).value
    assert loaded["frequencies"] == ranks[0].value["frequencies"]
    for got, expected in zip(loaded["logits"], ranks[0].value["logits"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)


def checked(folder):
    """`pose-plugin check` in this process: what differs, and the distance of the logits."""
    from pose_plugin.checkpoints import check, reload_worker

    check._run_worker = lambda request, python, timeout: reload_worker.answer(request)
    found = [check.check_folder(folder / place) for place in ("out", "out/checkpoint-2", "out/checkpoint-4")]
    return [(report.differing(), report.numbers["logits"]) for report in found]


# A loop of one's own takes a probe by itself.
@pytest.mark.parametrize("case", params(BY_A_TRAINER), ids=str)
def test_what_is_saved_passes_the_check(run, case):
    """What all ranks answered together at each save is what one process answers after a reload."""
    for differing, distance in forked(checked, run(case)[0]).value:
        assert differing == [] and distance < (0.1 if case.adapter == "qlora" else 1e-4)


WAY_OUT = {
    "mask": ("SelfTestError: PoSE self-test", "chunk 2 does not see chunk 1", "(only on rank 1 of 2)"),
    "frequencies": ("RopeMismatchError: ", "inv_freq[0] is 2, but yarn"),
}


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("fault", distributed.FAULTS)
def test_what_one_rank_finds_stops_all(run, tmp_path, strategy, fault):
    case = Case("trl", strategy, "full")
    needs(case)
    trl_runs.make_model(tmp_path)
    found = ranks(faulty, tmp_path, case, fault, **distributed.environment(case))
    for rank, error in enumerate(found):
        assert isinstance(error, CaseError)
        for words in WAY_OUT[fault]:
            assert words in str(error), f"rank {rank}: {error}"
    # The rank that saw it says so itself; the other names it.
    if fault == "frequencies":
        assert str(found[0]).startswith("PoSEError: rank 1 of 2 failed, so this rank stops too: RopeMismatchError: ")
        assert str(found[1]).startswith("RopeMismatchError: ")
    assert not (tmp_path / "out" / "checkpoint-2").exists()


def faulty(folder, case, fault):
    return distributed.trl(folder, case, fault=fault)


def test_what_one_rank_finds_stops_a_loop_of_ones_own(tmp_path):
    trl_runs.make_model(tmp_path)
    for error in ranks(faulty_loop, tmp_path):
        assert isinstance(error, CaseError)
        for words in WAY_OUT["mask"]:
            assert words in str(error)


def faulty_loop(folder):
    from tests.integration.fully_sharded import train

    return train(folder, Case("loop", "fsdp2", "lora"), fault=distributed.lose_the_mask)


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def after_training(folder, case):
    """Rank 1 is in the middle of writing the tokenizer while rank 0 completes a save, as Axolotl and scripts that save
    it on every rank may be. Then rank 0 saves alone, as other scripts do."""
    from pose_plugin.training.callback import PoSECallback

    distributed.on_cpu(case.strategy)
    trainer = trl_runs.sft(folder, max_steps=1, per_device_train_batch_size=1, eval_strategy="no")
    trainer.train()
    if os.environ["RANK"] == "0":
        ours = next(each for each in trainer.callback_handler.callbacks if isinstance(each, PoSECallback))
        complete = ours.complete

        def meanwhile(*args):
            (folder / "saved").touch()
            wait_for(folder / "torn")
            complete(*args)

        ours.complete = meanwhile
        trainer.save_model()
        (folder / "completed").touch()
        ours.complete = complete
        wait_for(folder / "whole")
        trainer.save_model(str(folder / "alone"))
    else:
        trainer.save_model()
        wait_for(folder / "saved")
        file = folder / "out" / "tokenizer_config.json"
        whole = file.read_text()
        file.write_text(whole[: len(whole) // 2])
        (folder / "torn").touch()
        wait_for(folder / "completed")
        assert file.read_text() == whole[: len(whole) // 2]
        file.write_text(whole)
        (folder / "whole").touch()
    # Both are here at the end.
    torch.distributed.barrier()


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_what_ranks_write_and_save_by_themselves(tmp_path, strategy):
    case = Case("trl", strategy, "full")
    needs(case)
    trl_runs.make_model(tmp_path)
    first, _ = good_ranks(after_training, tmp_path, case, **distributed.environment(case))
    assert "no model card" not in first.output
    for name in ("out", "alone"):
        folder = tmp_path / name
        assert json.loads((folder / "pose.json").read_text())["target_length"] == trl_runs.TARGET
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == trl_runs.TARGET
        assert "a context window of 512 tokens" in (folder / "README.md").read_text()


def test_weights_from_the_meta_device_bring_no_frequencies(run):
    for rank in run(Case("loop", "fsdp2", "full"))[1]:
        assert "inv_freq[0] is 0, but yarn" in rank.value["wrong"]
        assert "call pose_plugin.rope.restore_rope(model)" in rank.value["wrong"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_bf16_leaves_the_frequencies_alone(run, tmp_path, strategy):
    """DeepSpeed casts the whole module, rotary buffers included; by 2⁻⁹ a position near 500 would be off by one."""
    case = Case("trl", strategy, "full")
    needs(case)
    expected = run(Case("trl", "single", "full"))[1][0].value
    trl_runs.make_model(tmp_path)
    variables = {**distributed.environment(case), "ACCELERATE_MIXED_PRECISION": "bf16"}
    for rank in good_ranks(in_bf16, tmp_path, case, **variables):
        assert rank.value["frequencies"] == expected["frequencies"]
        # FSDP2 keeps float32 weights and computes in bf16.
        assert rank.value["dtype"] == ("torch.float32" if strategy == "fsdp2" else "torch.bfloat16")
        # FSDP2 returns the loss itself in bf16, whose steps are 1/32 here.
        near = 1 / 64 + 2e-3 if strategy == "fsdp2" else 2e-3
        assert rank.value["losses"] == pytest.approx(expected["losses"], abs=near)


def in_bf16(folder, case):
    return distributed.trl(folder, case, bf16=True)


@pytest.mark.parametrize("case", params(BY_A_TRAINER), ids=str)
def test_a_resumed_run_goes_on_where_it_stopped(run, case):
    needs(case)
    if case.strategy == "fsdp2" and case.adapter != "full":
        version = tuple(map(int, metadata.version("accelerate").split(".")[:2]))
        if version < (1, 15):
            pytest.skip("accelerate before 1.15 cannot load an adapter's checkpoint under FSDP2: KeyError, or wrong")
    folder, straight = run(case)
    for rank, resumed in enumerate(good_ranks(resume, folder, case, **distributed.environment(case))):
        for name in ("losses", "eval_losses"):
            assert resumed.value[name] == pytest.approx(straight[rank].value[name], abs=1e-5)
        assert resumed.value["frequencies"] == straight[rank].value["frequencies"]
        for got, expected in zip(resumed.value["logits"], straight[rank].value["logits"], strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


def resume(folder, case):
    return getattr(distributed, case.framework)(folder, case, resume=str(folder / "out" / "checkpoint-2"), out="again")


def test_shards_are_merged_beside_the_extended_config(run, tmp_path):
    """SHARDED_STATE_DICT, accelerate's default for FSDP2, saves neither a config nor whole weights."""
    case = Case("trl", "fsdp2", "full")
    trl_runs.make_model(tmp_path)
    variables = {**distributed.environment(case), "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    ran = good_ranks(distributed.trl, tmp_path, case, **variables)
    out = tmp_path / "out"
    assert not list(out.glob("*.safetensors"))
    assert f"accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 {out}" in " ".join(ran[0].output.split())
    for folder in (out, out / "checkpoint-2", out / "checkpoint-4"):
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == trl_runs.TARGET

    def merge():
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(out / "checkpoint-4" / "pytorch_model_fsdp_0"), str(out))

    forked(merge)
    loaded = forked(distributed.reloaded, tmp_path, "full").value
    assert loaded["frequencies"] == ran[0].value["frequencies"]
    for got, expected in zip(loaded["logits"], ran[0].value["logits"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
    # And it resumes.
    again = good_ranks(resume, tmp_path, case, **variables)
    assert again[0].value["losses"] == pytest.approx(ran[0].value["losses"], abs=1e-5)


def test_the_launcher_and_the_example(tmp_path):
    """The very files, through the real command: norms are trained in full beside the adapter, and saved."""
    needs(Case("trl", "zero3", "lora"))
    row = {"input_ids": list(range(2, 202)), "attention_mask": [1] * 200, "labels": list(range(2, 202))}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    config = distributed.CONFIGS / "accelerate" / "zero3.yaml"
    with distributed.taken_port() as port:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)),
                *("--num_processes", "2", "--mixed_precision", "no", "--main_process_port", port),
                # On a GPU: example_configs/trl/sft.py, without what a CPU needs.
                *("-m", "tests.integration.distributed", "zero3", str(distributed.CONFIGS / "trl" / "sft.py")),
                *("--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out"), "--lora"),
                *("--steps", "2", "--batch-size", "1", "--target-length", "512"),
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=distributed.ROOT,
            env={**os.environ, "PYTHONPATH": str(distributed.ROOT), "TRANSFORMERS_VERBOSITY": "info"},
        )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "Detected DeepSpeed ZeRO-3: activating zero.init()" in output
    assert output.count("[pose_plugin] self-test passed") == 1
    assert output.count("[pose_plugin] this process drew") == 2
    tensors = distributed.saved_tensors(tmp_path / "out")
    assert all(tensors.values()) and any("lora_A" in name for name in tensors)
    assert any("norm" in name for name in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 512


def test_a_resume_with_another_number_of_ranks(tmp_path):
    """Four ranks begin and two go on; test_launch_lines.py runs four ranks on two machines."""
    trl_runs.make_model(tmp_path)
    single, variables = Case("trl", "single", "full"), distributed.environment(launched.DDP)
    alone = forked(launched.four_rows, tmp_path, single, None, "alone").value
    good_ranks(launched.four_rows, tmp_path, launched.DDP, None, "many", world=4, **variables)
    checkpoint = str(tmp_path / "many" / "checkpoint-2")
    for rank in good_ranks(launched.four_rows, tmp_path, launched.DDP, checkpoint, "fewer", **variables):
        assert rank.value["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    record = json.loads((tmp_path / "fewer" / "pose.json").read_text())
    assert (record["trained"]["steps"], record["trained"]["processes"]) == (4, 2)


MEASURED = {
    "every": 2,
    "at_start": True,
    "tasks": ["passkey", "perplexity", "needle", "longppl", "gap", "short"],
    "lengths": [400],
    "trials": 2,
    "max_windows": 2,
    "short_context": 128,
}


@pytest.fixture(scope="module")
def measured_alone(tmp_path_factory):
    """The folder with base and text, what is asked for, and what one process measures."""
    folder = tmp_path_factory.mktemp("measured")
    trl_runs.make_model(folder)
    (folder / "text.txt").write_text("w30 w41 w52 w63 w74 " * 90)
    asked = {**MEASURED, "texts": [str(folder / "text.txt")], "evaluator": str(folder / "base")}
    found = forked(evaluated, folder, Case("trl", "single", "full"), asked, "alone").value["measured"]
    assert [row["step"] for row in found] == [0, 2, 4]
    names = {f"{name}/400" for name in ("passkey", "perplexity", "needle/kv", "longppl", "gap_loss")}
    assert found[0].keys() >= names | {"short_perplexity/64"}
    return folder, asked, found


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_evaluation_with_divided_weights(run, measured_alone, strategy):
    """Both ranks measure what one process measures, and train on bit by bit as without."""
    case = Case("trl", strategy, "full")
    plain, (folder, asked, expected) = run(case)[1], measured_alone
    found = good_ranks(evaluated, folder, case, asked, strategy, **distributed.environment(case))
    for rank, one in enumerate(found):
        assert len(one.value["measured"]) == len(expected)
        for row, wanted in zip(one.value["measured"], expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4)
        for name in ("losses", "eval_losses", "logits", "frequencies"):
            assert one.value[name] == plain[rank].value[name], name


def evaluated(folder, case, asked, out="out"):
    from pose_plugin.evaluation.measures.longppl import LongPPL

    # No token of a random model depends on far text, so every token is taken for a key token.
    ask = LongPPL.ask
    every = {"alpha": -99.0, "beta": -99.0}
    LongPPL.ask = lambda self, *rest: ask(self.model_copy(update=every), *rest)
    return distributed.trl(folder, case, out=out, pose={"evaluate": asked})


# --- docs/distributed.md --------------------------------------------------------------------------------------------

PAGE = distributed.ROOT / "docs" / "distributed.md"


def test_the_snippet_of_the_page(tmp_path):
    _, snippet = blocks(PAGE, "python")

    def case():
        from pose_plugin import PoSECollator

        model, tokenizer = trl_runs.make_model(tmp_path)
        weights, expected = model.state_dict(), distributed.frequencies(model)
        model.to("meta")
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
        for buffer in model.buffers():
            buffer.zero_()
        exec(snippet, {"model": model, "collator": PoSECollator(tokenizer, target_length=trl_runs.TARGET)})
        assert distributed.frequencies(model) == expected

    forked(case)


def test_the_snippet_for_split_rows(tmp_path):
    """One number, the factor, decides how far the RoPE, the saved maximum and the tokenizer reach."""
    snippet, _ = blocks(PAGE, "python")
    base = tmp_path / "base"
    make_llama(max_position_embeddings=32768).save_pretrained(base)
    make_tokenizer().save_pretrained(base)

    def case():
        import functools

        import trl
        from datasets import Dataset

        on_cpu = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "max_steps": 1}
        trl.SFTConfig = functools.partial(trl.SFTConfig, str(tmp_path / "out"), per_device_train_batch_size=2, **on_cpu)
        names = {"tokenizer": make_tokenizer(), "dataset": Dataset.from_list(trl_runs.texts())}
        exec(snippet.replace("Qwen/Qwen3-8B", str(base)), names)
        widths = []
        names["trainer"].model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        names["trainer"].train()
        names["trainer"].save_model()
        return widths[0]

    assert forked(case).value % 16 == 0
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 2**20 and saved["rope_parameters"]["rope_theta"] == 10000.0
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 2**20
