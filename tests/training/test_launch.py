"""A launch line that silently starts something else is named, with the fix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pose_plugin.training.launch import describe_launch, warnings_of_launch

VARIABLES = (
    *("WORLD_SIZE", "RANK", "MASTER_ADDR"),
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def trainer(processes: int, kind: str, device: str = "cpu", **state):
    accelerator = SimpleNamespace(
        num_processes=processes,
        distributed_type=SimpleNamespace(value=kind),
        device=SimpleNamespace(type=device),
        state=SimpleNamespace(**state),
    )
    return SimpleNamespace(accelerator=accelerator)


DEEPSPEED = {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}
FSDP = {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "given, text",
    [
        ((1, "NO"), "1 process on cpu, not distributed"),
        ((2, "MULTI_CPU"), "2 processes on cpu, DDP"),
        ((8, "MULTI_GPU", "cuda"), "8 processes on cuda, DDP"),
        ((2, "MULTI_XPU", "xpu"), "2 processes on xpu, MULTI_XPU"),
    ],
)
def test_what_a_run_is(given, text):
    assert describe_launch(trainer(*given)) == text


def test_how_a_run_is_sharded():
    assert describe_launch(trainer(4, "DEEPSPEED", "cuda", **DEEPSPEED)) == "4 processes on cuda, DeepSpeed ZeRO-3"
    assert describe_launch(trainer(4, "FSDP", "cuda", **FSDP)) == "4 processes on cuda, FSDP 2"


@pytest.mark.parametrize(
    "variables, run, parts",
    [
        (TORCHRUN, trainer(1, "NO"), ["WORLD_SIZE=2", "trains alone", "use_cpu=True"]),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
            trainer(1, "NO"),
            ["MASTER_ADDR=127.0.0.1", "1 process on cpu", "--multi_gpu --num_processes 2"],
        ),
        (
            {**TORCHRUN, "ACCELERATE_USE_FSDP": "true"},
            trainer(2, "MULTI_CPU"),
            ["ACCELERATE_USE_FSDP=true", "2 processes on cpu, DDP", "ZeRO-3"],
        ),
        (
            {**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true"},
            trainer(2, "MULTI_CPU"),
            ["ACCELERATE_USE_DEEPSPEED=true", "2 processes on cpu, DDP", "use_cpu: true"],
        ),
    ],
)
def test_a_run_that_is_not_what_was_asked_for(monkeypatch, variables, run, parts):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (text,) = warnings_of_launch(run)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "variables, run",
    [
        ({}, trainer(1, "NO")),
        ({"MASTER_ADDR": "node0"}, trainer(1, "NO")),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, trainer(1, "NO")),
        (TORCHRUN, trainer(2, "MULTI_CPU")),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "bf16"}, trainer(2, "MULTI_GPU", "cuda")),
        ({**TORCHRUN, "ACCELERATE_USE_FSDP": "true"}, trainer(2, "FSDP", "cuda", **FSDP)),
        ({**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true"}, trainer(2, "DEEPSPEED", **DEEPSPEED)),
    ],
)
def test_a_run_that_is_what_was_asked_for(monkeypatch, variables, run):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert warnings_of_launch(run) == []
