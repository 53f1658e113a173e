"""Axolotl on a machine without a GPU, or without a network."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

import torch

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

# Seconds that Axolotl's telemetry gets for its last messages once a run was refused.
PATIENCE = 3.0


_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def turn_gpu_kernels_off(cfg: Any) -> None:
    """Without a GPU, turn off the LoRA kernels that Axolotl turns on by itself; keys of the YAML stay."""
    # A Ray driver has no GPU, its workers do.
    if torch.accelerator.is_available() or cfg.get("use_ray") or cfg.get("adapter") not in ("lora", "qlora"):
        return
    unset = [key for key in _LORA_KERNELS if cfg.get(key) is None]
    for key in unset:
        cfg[key] = False
    if unset:
        log.info("no GPU: set %s to false, as Axolotl's LoRA kernels need one", ", ".join(unset))


def _ranks_on_cpu(cfg: Any) -> bool:
    """Return whether several ranks of this run share the CPU under DDP. DeepSpeed chooses devices itself."""
    # Not `fsdp_version`, which Axolotl 0.21 sets by default.
    sharded = any(cfg.get(key) for key in ("deepspeed", "fsdp", "fsdp_config"))
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and not sharded and not torch.accelerator.is_available()


def prepare_cpu_ranks(cfg: Any) -> None:
    """Let several ranks run on a CPU: Axolotl expects a GPU per rank, and has no key for this."""
    if not _ranks_on_cpu(cfg):
        return
    from axolotl.utils import trainer

    # Without it accelerate finds no backend, and each rank would train alone.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    # Asks torch whether two GPUs reach each other, which newer torch answers with an error if there are none.
    trainer.check_cuda_p2p_ib_support = lambda: True
    if os.environ.get("RANK", "0") == "0":
        log.info("no GPU: all %s ranks train on the CPU (ACCELERATE_USE_CPU=true)", os.environ["WORLD_SIZE"])


def place_on_cpu(cfg: Any) -> None:
    """Undo Axolotl's choice of GPU `LOCAL_RANK`, after it has made it and before it loads the model."""
    if _ranks_on_cpu(cfg):
        cfg.device_map = {"": "cpu"}


def end_without_network() -> None:
    """Let a refused run end: at exit, Axolotl's telemetry waits for messages that a machine offline never sends."""
    # A second call changes nothing. Called after the telemetry's own registration, so it runs before that.
    atexit.unregister(_stop_waiting)
    atexit.register(_stop_waiting)


def _stop_waiting() -> None:
    manager = getattr(sys.modules.get("axolotl.telemetry.manager"), "TelemetryManager", None)
    client = getattr(sys.modules.get("posthog"), "default_client", None)
    if not isinstance(getattr(sys, "last_value", None), PoSEError) or manager is None or client is None:
        return
    end = time.monotonic() + PATIENCE
    while client.queue.unfinished_tasks and time.monotonic() < end:
        time.sleep(0.05)
    if client.queue.unfinished_tasks:
        atexit.unregister(manager.get_instance().shutdown)
        atexit.unregister(client.join)
