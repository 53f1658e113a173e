"""Several processes: one verdict for all of them, and forwards beside training that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.utils.errors import PoSEError


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order. Every rank must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def all_problems(problems: list[str]) -> list[str]:
    """Every rank's problems, each said once, with the ranks that saw it where not all did."""
    found = gather(problems)
    world = len(found)
    result = []
    for problem in sorted({problem for each in found for problem in each}):
        saw = [str(rank) for rank, each in enumerate(found) if problem in each]
        result.append(problem if len(saw) == world else f"{problem} (only on rank {', '.join(saw)} of {world})")
    return result


@contextmanager
def together() -> Iterator[None]:
    """Where one rank fails, all stop: one that trained on would wait for the others for ever.

    Nothing inside may communicate.

    Raises:
        PoSEError: on ranks that found nothing, if another did. The rank's own exception otherwise.
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
            raise PoSEError(f"rank {rank} of {len(found)} stopped, and so does this one: {text}")


@contextmanager
def beside_training(model: Any) -> Iterator[None]:
    """For forwards that are no part of a step.

    - ZeRO-3 takes the order in which the first forwards use the weights for that of every step, and fetches them ahead.
      A loss that gathers a weight by itself (TRL's chunked one does) would then find it in flight, and the first step
      would die. So what it has noted is forgotten.
    - FSDP2 leaves the outermost module's weights whole until a backward. An optimizer made in between would take these
      for the weights and train copies that nobody reads, without a word. So they are divided again.

    Args:
        model: as it will be trained, DeepSpeed's engine where there is one.
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
