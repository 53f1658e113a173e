"""How long an evaluation will take and how much memory, told before it starts: one short forward, extrapolated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pose_plugin.evaluation.memory import TooLittleMemory, fitting
from pose_plugin.evaluation.model import device_of, evaluating, innermost, last_logits

PROBE = 512
"""Tokens of the forward that is timed."""


@dataclass(frozen=True)
class Work:
    """`sequences` forwards of `length` tokens, and `steps` single tokens decoded in each."""

    task: str
    length: int
    sequences: int
    steps: int = 0


@dataclass(frozen=True)
class Estimate:
    """`seconds` and `bytes` are None where they cannot be told, `problem` says why a length does not fit."""

    work: Work
    seconds: float | None
    bytes: int | None
    chunk: int | None
    problem: str | None = None

    def line(self) -> str:
        """One row for the terminal."""
        what = f"{self.work.task:<11} {self.work.length:>8} tokens × {self.work.sequences:>5}"
        if self.problem:
            return f"{what}  does not fit: {self.problem}"
        size = "        ?" if not self.bytes else f"{self.bytes / 2**30:6.2f} GiB"
        read = f", read {self.chunk} tokens at a time" if self.chunk else ""
        return f"{what}  about {duration(self.seconds)}, {size} besides the weights{read}"


def operations(model: Any, length: int) -> float:
    """Floating-point operations of a forward, about: 2 a weight and token, and attention over the past."""
    config = innermost(model).config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    embedding = getattr(config, "vocab_size", 0) * getattr(config, "hidden_size", 0)
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return 2.0 * max(weights - embedding, embedding) * length + 2.0 * layers * width * length**2


def estimates(
    model: Any, works: Sequence[Work], batch_size: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> list[Estimate]:
    """What each piece of work will take. Runs two short forwards and times the second.

    Args:
        works: see Work.
        batch_size: as the measures take it.
        clock: for tests.
    """
    if not works:
        return []
    config, device = innermost(model).config.get_text_config(), device_of(model)
    # Not beyond a table of positions: what cannot be read is found when it is measured, length by length.
    tokens = min(PROBE, max(work.length for work in works), getattr(config, "max_position_embeddings", None) or PROBE)
    ids = (torch.arange(tokens, device=device) % config.vocab_size)[None]
    with evaluating(model):
        last_logits(model, ids, 1)
        _settle(device)
        start = clock()
        last_logits(model, ids, 1)
        _settle(device)
    speed = operations(model, tokens) / max(clock() - start, 1e-6)
    found = []
    for work in works:
        try:
            fit = fitting(model, device, work.length, batch_size or max(1, 16384 // work.length))
        except TooLittleMemory as error:
            found.append(Estimate(work, None, None, None, str(error)))
            continue
        once = operations(model, work.length) + work.steps * operations(model, 1)
        found.append(Estimate(work, work.sequences * once / speed, fit.bytes, fit.chunk))
    return found


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
