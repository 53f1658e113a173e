"""Weights that are divided among processes (ZeRO-3, FSDP2): every rank runs the same forwards at the same time.

A forward gathers each weight from all ranks, so a rank that ran one forward more than the others would wait forever.
Prompts, windows and the number of decoded tokens follow from settings alone; what could differ by rank (free memory,
the answer that settles a prompt) is decided together or by rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pose_plugin.utils.distributed import gather
from pose_plugin.utils.errors import PoSEError

Value = TypeVar("Value")


class InStep:
    """A divided model with its own attributes and the forward that gathers its weights.

    Args:
        model: what transformers or PEFT made, its weights divided.
        wrapped: what has to be called; DeepSpeed's engine if it is used.
        device: of inputs. With weights kept on the CPU it is not that of the parameters.
    """

    def __init__(self, model: Any, wrapped: Any, device: torch.device) -> None:
        self.model, self.wrapped, self.device = model, wrapped, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def modules(self) -> Any:
        """The engine's own mode counts too."""
        return self.wrapped.modules()

    def eval(self) -> InStep:
        self.wrapped.eval()
        return self

    @property
    def gathered_bytes(self) -> int:
        """About the bytes that are gathered at once on a rank: two layers, input and output embeddings."""
        config = self.model.config.get_text_config()
        sizes = [_size(parameter) for parameter in self.model.parameters()]
        layers = max(1, getattr(config, "num_hidden_layers", 1) or 1)
        width = getattr(config, "vocab_size", 0) * getattr(config, "hidden_size", 0)
        element = max((parameter.element_size() for parameter in self.model.parameters()), default=4)
        return element * (2 * sum(sizes) // layers + 2 * width)


def _size(parameter: Any) -> int:
    """Return the number of values of the whole weight; DeepSpeed leaves an empty tensor."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def agreed(model: Any, value: Value) -> Value:
    """Return rank 0's value if ranks go in step, else the value itself."""
    return gather(value)[0] if isinstance(model, InStep) else value


def divided(model: Any) -> str | None:
    """Return "ZeRO-3", "FSDP" (the first version), "FSDP2", or None for a model that is whole on every rank."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "ZeRO-3"
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in names:
        return "FSDP"
    return "FSDP2" if "FSDPModule" in names else None


def in_step(model: Any, trainer: Any) -> Any:
    """Return the model as the measures can run it: itself, or an `InStep` if its weights are divided.

    Raises:
        PoSEError: FSDP 1, whose outer wrapper must do all, and divided weights without a transformers trainer.
    """
    kind = divided(model)
    if kind is None:
        return model
    if kind == "FSDP":
        raise PoSEError(
            "evaluation while training (pose.evaluate, EvaluationCallback) cannot run under FSDP 1; set "
            "fsdp_version: 2, train with ZeRO-3, or measure saved checkpoints with `pose-plugin evaluate CHECKPOINT …`"
        )
    if trainer is None:
        raise PoSEError(
            f"evaluation while training under {kind} needs a transformers Trainer, which knows how to call the model; "
            "in your own training loop, measure saved checkpoints with `pose-plugin evaluate CHECKPOINT …`"
        )
    return InStep(model, trainer.model_wrapped, trainer.args.device)


def require_same_plan(model: Any, plan: str) -> None:
    """Check that ranks in step will measure the same.

    Raises:
        PoSEError: on every rank, if the plans differ, e.g. because a text file differs between machines.
    """
    if not isinstance(model, InStep):
        return
    found = gather(plan)
    other = [str(rank) for rank, each in enumerate(found) if each != found[0]]
    if other:
        raise PoSEError(
            f"evaluation while training: lengths, counts or texts on rank {', '.join(other)} are not those of rank 0, "
            "and divided weights need the same forwards on all ranks. Give every machine the same settings and files"
        )


@contextmanager
def undivided() -> Iterator[None]:
    """Within a distributed run, let transformers load a model whole on every rank: not divided (ZeRO-3), not empty
    (FSDP)."""
    from transformers import modeling_utils
    from transformers.integrations import deepspeed

    name, variable = "is_deepspeed_zero3_enabled", "FSDP_CPU_RAM_EFFICIENT_LOADING"
    # Each module has its own reference, and Axolotl replaces both.
    kept, given = [(module, getattr(module, name)) for module in (modeling_utils, deepspeed)], os.environ.get(variable)
    for module, _ in kept:
        setattr(module, name, lambda: False)
    if given is not None:
        os.environ[variable] = "false"
    try:
        yield
    finally:
        for module, function in kept:
            setattr(module, name, function)
        if given is not None:
            os.environ[variable] = given
