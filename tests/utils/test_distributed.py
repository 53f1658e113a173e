"""Ranks agree on errors. Forked processes run each case over gloo."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pose_plugin.utils.distributed import all_problems, gather, outside_training, together
from pose_plugin.utils.errors import PoSEError, RopeMismatchError
from tests.forked import CaseError, good_ranks, ranks


def joined(case, *args):
    dist.init_process_group("gloo")
    try:
        return case(dist.get_rank(), *args)
    finally:
        dist.destroy_process_group()


def test_alone_nothing_changes():
    assert gather({"a": 1}) == [{"a": 1}]
    assert all_problems(["b", "a", "b"]) == ["a", "b"]
    with together():
        pass
    with pytest.raises(KeyError), together():
        raise KeyError("x")


def test_problems_of_all_ranks_name_the_ranks_that_saw_them():
    def case(rank):
        return all_problems([["everywhere", "first"], ["everywhere"], ["last", "everywhere"]][rank])

    for outcome in good_ranks(joined, case, world=3):
        assert outcome.value == ["everywhere", "first (only on rank 0 of 3)", "last (only on rank 2 of 3)"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_of_one_rank_stops_both(who):
    def case(rank):
        with together():
            if rank == who:
                raise RopeMismatchError("inv_freq is wrong")
        return "went on"

    found = ranks(joined, case)
    assert all(isinstance(one, CaseError) for one in found)
    assert str(found[who]).startswith("RopeMismatchError: inv_freq is wrong")
    assert str(found[1 - who]).startswith(
        f"PoSEError: rank {who} of 2 failed, so this rank stops too: RopeMismatchError: inv_freq is wrong"
    )


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_rank_that_is_interrupted_leaves_no_other_waiting(kind):
    """It sends nothing; its lost connection ends the others."""

    def case(rank):
        with together():
            if rank == 1:
                raise kind
        return "went on"

    first, second = ranks(joined, case)
    assert str(first).startswith("RuntimeError: ") and "peer" in str(first).splitlines()[0]
    assert str(second).startswith(kind.__name__)


def test_ranks_without_errors_continue():
    def case(rank):
        with together():
            pass
        return rank

    assert [outcome.value for outcome in good_ranks(joined, case)] == [0, 1]


def test_the_failing_rank_raises_its_own_exception():
    with pytest.raises(ZeroDivisionError) as caught, together():
        raise ZeroDivisionError
    assert not isinstance(caught.value, PoSEError)


def test_an_optimizer_made_after_a_forward_trains_the_real_weights():
    """FSDP2 leaves the outermost weights whole after a forward without a backward."""

    def case(rank, guarded):
        from contextlib import nullcontext

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad(), outside_training(model) if guarded else nullcontext():
            model(torch.ones(1, 4))
        return [type(parameter).__name__ for parameter in model.parameters()]

    assert {tuple(o.value) for o in good_ranks(joined, case, True)} == {("DTensor", "DTensor")}
    # Without the block, torch leaves copies. If this line ever fails, `outside_training` can do less.
    assert {tuple(o.value) for o in good_ranks(joined, case, False)} == {("Parameter", "Parameter")}


def test_the_order_that_deepspeed_recorded_is_discarded():
    class Coordinator:
        def __init__(self, invalid):
            self.invalid, self.calls = invalid, 0

        def is_invalid_trace(self):
            return self.invalid

        def _invalidate_trace(self):
            self.calls += 1

    for invalid, calls in ((True, 0), (False, 1)):
        engine = torch.nn.Linear(1, 1)
        coordinator = Coordinator(invalid)
        offload = type("Offload", (), {"get_param_coordinator": lambda self, c=coordinator: c})()
        engine.optimizer = type("Optimizer", (), {"parameter_offload": offload})()
        with pytest.raises(KeyError), outside_training(engine):
            raise KeyError
        assert coordinator.calls == calls


def test_deepspeed_still_has_the_methods_that_are_called():
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed here")
    origin = importlib.util.find_spec("deepspeed").origin
    zero = Path(origin).parent / "runtime" / "zero"
    assert "def get_param_coordinator" in (zero / "parameter_offload.py").read_text()
    source = (zero / "partitioned_param_coordinator.py").read_text()
    assert "def is_invalid_trace" in source and "def _invalidate_trace" in source
