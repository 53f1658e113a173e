"""Several ranks: they agree on errors, and forwards outside of training steps leave no trace."""

from __future__ import annotations

import datetime
import functools
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.utils.errors import PoSEError


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order. Every rank must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def meet(value: Any) -> list[Any]:
    """Return the value of every launched process in rank order, and wait for them as long as it takes.

    It works through the store in which the processes of a launch find each other. A process group would end after a
    while in which one rank has nothing to do, and code that looks for one would take the ranks for ranks in step.
    """
    store, rank, world = _store()
    turn = next(_turns)
    store.set(f"pose_plugin/{turn}/{rank}", pickle.dumps(value))
    return [pickle.loads(store.get(f"pose_plugin/{turn}/{each}")) for each in range(world)]


_turns = itertools.count()


@functools.cache
def _store() -> tuple[Any, int, int]:
    """Return the store of the launch, the rank and the number of processes."""
    found: tuple[Any, int, int] = next(torch.distributed.rendezvous("env://", timeout=datetime.timedelta(days=30)))
    return found


def all_problems(problems: list[str]) -> list[str]:
    """Return the problems of all ranks, each one once, with the ranks that saw it unless all did."""
    found = gather(problems)
    world = len(found)
    result = []
    for problem in sorted({problem for each in found for problem in each}):
        saw = [str(rank) for rank, each in enumerate(found) if problem in each]
        result.append(problem if len(saw) == world else f"{problem} (only on rank {', '.join(saw)} of {world})")
    return result


@contextmanager
def together() -> Iterator[None]:
    """Stop all ranks if one raises inside the block: the others would hang in their next collective operation.

    The block itself must not communicate.

    Raises:
        PoSEError: on ranks whose block succeeded, if another rank's failed. Otherwise the rank's own exception.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    found = gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(found):
        if text is not None:
            raise PoSEError(f"rank {rank} of {len(found)} failed, so this rank stops too: {text}")


@functools.cache
def let_cpu_ranks_resume() -> None:
    """Let torch load tensors onto "cpu:0".

    accelerate names the CPU of a rank so, and transformers loads the optimizer of a resumed DDP run onto it, but torch
    knows only "cpu".
    """

    def load(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    # Asked after torch's own CPU (10) and GPU (20).
    torch.serialization.register_package(30, lambda storage: None, load)


@contextmanager
def outside_training(model: Any) -> Iterator[None]:
    """Run forwards that are not part of a training step, without side effects on sharded models.

    - ZeRO-3 records the order in which the first forwards use the weights, and prefetches in that order in every step.
      A loss that gathers a weight itself (as TRL's chunked one does) would then find it in flight, and the first step
      would fail. This block discards the record.
    - FSDP2 keeps the outermost module's weights unsharded until a backward. An optimizer created in between would
      silently train these copies instead of the weights. This block reshards them.

    Args:
        model: as it will be trained; with DeepSpeed, its engine.
    """
    try:
        yield
    finally:
        offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
        if offload is not None and not offload.get_param_coordinator().is_invalid_trace():
            offload.get_param_coordinator()._invalidate_trace()
        if torch.distributed.is_available():
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
