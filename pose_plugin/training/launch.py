"""Compare a run with what its launcher was asked for: some launch lines silently start something else."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from pose_plugin.utils.log import log

_KINDS = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "NO": "not distributed", "MULTI_CPU": "DDP", "MULTI_GPU": "DDP"}


def describe_launch(trainer: Any) -> str:
    """Return the number of processes and how they share the work, e.g. "2 processes on cpu, DeepSpeed ZeRO-3"."""
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type.value
    name = _KINDS.get(kind, kind)
    if kind == "DEEPSPEED":
        name += f" ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif kind == "FSDP":
        name += f" {accelerator.state.fsdp_plugin.fsdp_version}"
    count = accelerator.num_processes
    return f"{count} process{'es' if count > 1 else ''} on {accelerator.device.type}, {name}"


def warnings_of_launch(trainer: Any) -> list[str]:
    """Return a sentence for each way in which a run differs from what its launcher was asked for."""
    accelerator, real = trainer.accelerator, describe_launch(trainer)
    kind = accelerator.distributed_type.value
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    # What `accelerate launch` sets if it is asked for several processes and starts only one.
    lonely = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ
    cases = [
        (
            asked > accelerator.num_processes,
            f"WORLD_SIZE={asked}, but this run has {real}: each process trains alone on all rows, and all of them "
            "write into the same folder. Without a GPU set use_cpu=True (SFTConfig, TrainingArguments)",
        ),
        (
            lonely and accelerator.num_processes == 1,
            f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}: `accelerate launch` was asked for several processes, but "
            f"this run has {real}: without a GPU, --num_processes alone and --cpu start only one. Use torchrun "
            "--nproc_per_node 2, or accelerate launch --multi_gpu --num_processes 2, which on a CPU starts two CPU "
            "processes",
        ),
        (
            _is_on("ACCELERATE_USE_FSDP") and kind != "FSDP",
            f"ACCELERATE_USE_FSDP=true, but this run has {real}: accelerate shards only on GPUs, and here each process "
            "holds the whole model. Use DeepSpeed ZeRO-3, or a GPU per process",
        ),
        (
            _is_on("ACCELERATE_USE_DEEPSPEED") and kind != "DEEPSPEED",
            f"ACCELERATE_USE_DEEPSPEED=true, but this run has {real}: with ACCELERATE_USE_CPU accelerate leaves "
            "DeepSpeed out. Remove --cpu and use_cpu: true from the launch line and its config file",
        ),
    ]
    return [text for applies, text in cases if applies]


def report_launch(trainer: Any) -> None:
    """Log what a run is, once, and how it differs from what was asked for. Ranks that train alone all log it."""
    if trainer.is_world_process_zero():
        log.info("this run: %s", describe_launch(trainer))
        for warning in warnings_of_launch(trainer):
            log.warning(warning)


def let_cpu_ranks_gather(trainer: Any) -> None:
    """Let DeepSpeed ZeRO-1 and ZeRO-2 gather the weights on a CPU."""
    if trainer.is_deepspeed_enabled and trainer.args.device.type == "cpu":
        _gather_without_gradients()


@functools.cache
def _gather_without_gradients() -> None:
    from deepspeed.comm.torch import TorchBackend

    # After a step it writes into weights that require a gradient. gloo does so through views, which torch refuses
    # while gradients are recorded.
    TorchBackend.all_gather_into_tensor = torch.no_grad()(TorchBackend.all_gather_into_tensor)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
