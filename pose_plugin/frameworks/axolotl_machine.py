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

# Seconds that Axolotl's telemetry gets for its last messages.
PATIENCE = 5.0

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


def _ranks_on_cpu() -> bool:
    """Return whether several ranks of this run share the CPU."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()


def prepare_cpu_ranks(cfg: Any) -> None:
    """Let several ranks run on a CPU: Axolotl expects a GPU per rank, and has no key for this.

    Raises:
        PoSEError: FSDP, which accelerate silently replaces by DDP without a GPU.
    """
    # A device that somebody names (ACCELERATE_TORCH_DEVICE) is theirs to set up.
    if not _ranks_on_cpu() or "ACCELERATE_TORCH_DEVICE" in os.environ:
        return
    # Not `fsdp_version`, which Axolotl 0.21 sets by default.
    if cfg.get("fsdp") or cfg.get("fsdp_config"):
        raise PoSEError(
            "fsdp_config needs a GPU per process, and this machine has none. Remove it, or use "
            "deepspeed: example_configs/deepspeed/zero3.json, which also shards on a CPU"
        )
    from axolotl.utils import trainer

    # Asks torch whether two GPUs reach each other, which newer torch answers with an error if there are none.
    trainer.check_cuda_p2p_ib_support = lambda: True
    if cfg.get("deepspeed"):
        _prepare_deepspeed(cfg)
    else:
        # Without it accelerate finds no backend, and each rank would train alone.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if os.environ.get("RANK", "0") == "0":
        how = "DeepSpeed over gloo" if cfg.get("deepspeed") else "ACCELERATE_USE_CPU=true"
        log.info("no GPU: all %s ranks train on the CPU (%s)", os.environ["WORLD_SIZE"], how)


def _prepare_deepspeed(cfg: Any) -> None:
    """Let DeepSpeed run on a CPU. ACCELERATE_USE_CPU would make accelerate leave DeepSpeed out."""
    import deepspeed
    from accelerate import PartialState

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its shared-memory all-reduce is compiled first, which takes a compiler and minutes. gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    choose = PartialState._prepare_backend

    def choose_gloo(state: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        backend, kind = choose(state, *args, **kwargs)
        return backend or "gloo", kind

    # Without a GPU accelerate chooses no backend, and each rank would train alone.
    PartialState._prepare_backend = choose_gloo
    # The trainer would make another state, without DeepSpeed.
    cfg["accelerator_config"] = {**(cfg.get("accelerator_config") or {}), "use_configured_state": True}


def place_on_cpu(cfg: Any) -> None:
    """Undo Axolotl's choice of GPU `LOCAL_RANK`, after it has made it and before it loads the model."""
    if _ranks_on_cpu() and "ACCELERATE_TORCH_DEVICE" not in os.environ:
        cfg.device_map = {"": "cpu"}


def end_without_network() -> None:
    """Let a run end on a machine without a network, where Axolotl's telemetry can wait forever.

    At exit its client stops the thread that sends, and then Axolotl waits until the queue is empty. Messages that came
    in while an earlier one was tried again are still in it.
    """
    # Exit functions run in reverse order, and Axolotl made its client before it called a plugin.
    atexit.unregister(_stop_waiting)
    atexit.register(_stop_waiting)


def _stop_waiting() -> None:
    manager = getattr(sys.modules.get("axolotl.telemetry.manager"), "TelemetryManager", None)
    client = getattr(sys.modules.get("posthog"), "default_client", None)
    if manager is None or client is None:
        return
    end = time.monotonic() + PATIENCE
    while client.queue.unfinished_tasks and time.monotonic() < end:
        time.sleep(0.05)
    if client.queue.unfinished_tasks:
        # The last line of a refused run is the reason.
        if not isinstance(getattr(sys, "last_value", None), PoSEError):
            log.warning(
                "Axolotl's telemetry could not send its last messages within %g s, so the run ends without them. On a "
                "machine without a network, AXOLOTL_DO_NOT_TRACK=1 turns it off",
                PATIENCE,
            )
        atexit.unregister(manager.get_instance().shutdown)
        atexit.unregister(client.join)
