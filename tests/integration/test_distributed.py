"""Two ranks on CPU: what they compute is what one process computes, with the right frequencies, and saved complete."""

from __future__ import annotations

import importlib.util
import json

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.forked import forked, good_ranks
from tests.integration import distributed, trl_runs
from tests.integration.distributed import CASES, Case

HERE = [case for case in CASES if case.framework == "trl"]


def needs(case):
    if case.strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed here")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """case → (folder, what each rank saw); each run is made once."""
    home = tmp_path_factory.mktemp("distributed")
    trl_runs.make_model(home)
    done = {}

    def get(case):
        needs(case)
        if case not in done:
            folder = home / str(case)
            folder.mkdir()
            (folder / "base").symlink_to(home / "base")
            work = getattr(distributed, case.framework)
            if case.strategy == "single":
                done[case] = folder, [forked(work, folder, case)]
            else:
                done[case] = folder, good_ranks(work, folder, case, **distributed.environment(case.strategy))
        return done[case]

    return get


@pytest.fixture(params=HERE, ids=str)
def case(request):
    needs(request.param)
    return request.param


def test_the_run_is_what_it_claims_to_be(run, case):
    kinds = {"ddp": ("MULTI_CPU", None), "zero2": ("DEEPSPEED", 2), "zero3": ("DEEPSPEED", 3)}
    for rank in run(case)[1]:
        assert rank.value["world"] == 2
        assert (rank.value["kind"], rank.value["stage"]) == kinds[case.strategy]
        # zero3_init_flag: no rank ever held the whole model.
        assert rank.value["divided_at_birth"] is rank.value["divided"] is (case.strategy == "zero3")


def test_losses_are_those_of_one_process(run, case):
    alone = run(Case(case.framework, "single", case.adapter))[1][0].value
    assert len(alone["losses"]) == 4 and len(set(alone["losses"])) == 4
    for rank in run(case)[1]:
        for name in ("losses", "eval_losses"):
            assert rank.value[name] == pytest.approx(alone[name], abs=1e-5)
        for got, expected in zip(rank.value["logits"], alone["logits"], strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


def test_frequencies_are_exact_and_alike(run, case):
    alone = run(Case(case.framework, "single", case.adapter))[1][0].value["frequencies"]
    assert {dtype for dtype, _ in alone.values()} == {"torch.float32"}
    for rank in run(case)[1]:
        assert rank.value["frequencies"] == alone


def test_every_rank_is_tested_and_one_says_so(run, case):
    said = [rank.output.count("[pose_plugin] self-test passed") for rank in run(case)[1]]
    assert said == [1, 0]


def test_what_is_saved_reloads_to_what_was_trained(run, case):
    folder, ranks = run(case)
    out = folder / "out"
    for place in (out, out / "checkpoint-2", out / "checkpoint-4"):
        assert json.loads((place / "config.json").read_text())["max_position_embeddings"] == trl_runs.TARGET
        assert json.loads((place / "pose.json").read_text())["target_length"] == trl_runs.TARGET
        tensors = distributed.saved_tensors(place)
        assert tensors and all(tensors.values()), "an empty tensor was saved"
        names = " ".join(tensors)
        if case.adapter == "lora":
            assert "lora_B" in names and "embed_tokens" in names and "norm" in names
    loaded = forked(distributed.reloaded, folder, case.adapter).value
    assert loaded["frequencies"] == ranks[0].value["frequencies"]
    for got, expected in zip(loaded["logits"], ranks[0].value["logits"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
