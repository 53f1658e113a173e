"""Helpers for a training loop: batches by interval count, the step of the ratios, the gradient check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from pose_plugin.beacon.layer import BeaconLayer
from pose_plugin.beacon.register import find_tuner
from pose_plugin.utils.errors import PoSEError


def interval_count(tokens: int, interval: int) -> int:
    """Return how many intervals a text is read in, ⌈tokens / l⌉: the key to group a batch by."""
    return -(-tokens // interval)


def group_by_intervals(
    lengths: Sequence[int], interval: int, batch_size: int, ranks: int = 1, seed: int = 0, epoch: int = 0
) -> list[int]:
    """Return an order of the data in which rows that are read at the same time have the same number of intervals.

    Ranks that run different numbers of forwards hang under ZeRO-3. So each group of batch_size·ranks entries has one
    interval count. If the texts of a count do not fill its last group, some are repeated. Texts within one interval
    train no beacon.

    Args:
        lengths: tokens of each text.
        batch_size: rows per rank.
        seed, epoch: of the shuffle; no global generator is used.

    Returns:
        Indices into `lengths`, a multiple of batch_size·ranks of them.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    chunk = batch_size * ranks
    counts = np.array([interval_count(int(length), interval) for length in lengths])
    chunks: list[np.ndarray] = []
    for count in np.unique(counts):
        members = rng.permutation(np.flatnonzero(counts == count))
        filled = np.resize(members, -(-len(members) // chunk) * chunk)
        chunks += np.split(filled, len(filled) // chunk)
    return [int(index) for at in rng.permutation(len(chunks)) for index in chunks[at]]


class IntervalSampler(Sampler[int]):
    """`group_by_intervals` as a sampler, with a new shuffle each epoch.

    See there for the arguments. accelerate gives batch i to rank i mod ranks, so the batches of one group are read at
    the same time.
    """

    def __init__(self, lengths: Sequence[int], interval: int, batch_size: int, ranks: int = 1, seed: int = 0) -> None:
        self.lengths, self.interval, self.batch_size = lengths, interval, batch_size
        self.ranks, self.seed, self.epoch = ranks, seed, 0
        self._count = len(group_by_intervals(lengths, interval, batch_size, ranks))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = group_by_intervals(self.lengths, self.interval, self.batch_size, self.ranks, self.seed, self.epoch)
        return iter(order)

    def __len__(self) -> int:
        return self._count


def set_ratio_step(model: Any, step: int) -> None:
    """Set the global step that training ratios are drawn for. Call it before each step of the optimizer.

    It must be the same on every rank, and after a resume, as the trainer's global step is.
    """
    find_tuner(model).set_step(step)


def beacon_gradient_norm(model: Any, gradient: Callable[[Any], Any] | None = None) -> float:
    """Return the gradient norm over all trainable beacon parameters; 0.0 if none has a gradient.

    Args:
        model: a PEFT model with a Beacon adapter, after backward.
        gradient: from a parameter to its gradient; None reads `.grad`. Under DeepSpeed ZeRO that is empty: give
            deepspeed.utils.safe_get_full_grad.
    """
    total = 0.0
    for parameter in trained_parameters(find_tuner(model)):
        found = gradient(parameter) if gradient else parameter.grad
        if found is not None:
            total += float(torch.linalg.vector_norm(found.detach().float())) ** 2
    return total**0.5


def trained_parameters(tuner: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the trainable parameters of all Beacon layers of a tuner."""
    for layer in tuner.model.modules():
        if isinstance(layer, BeaconLayer):
            for name in layer.adapter_layer_names:
                yield from (each for each in getattr(layer, name).parameters() if each.requires_grad)


def check_beacon_gradients(model: Any, gradient: Callable[[Any], Any] | None = None) -> float | None:
    """Check that beacons have a gradient after the first backward; without one, the loss falls but nothing is trained.

    Labels before the first beacon of their text give it none, so a step that has no others says nothing.

    Args:
        model, gradient: as for `beacon_gradient_norm`.

    Returns:
        The norm; None if no label since `set_ratio_step` was behind a beacon. Then call it again after a later step.

    Raises:
        PoSEError: labels were behind a beacon and the gradient is zero or not finite.
    """
    labels = find_tuner(model).labels_behind_beacons
    if not labels:
        return None
    norm = beacon_gradient_norm(model, gradient)
    if not 0 < norm < float("inf"):
        raise PoSEError(
            f"gradient: the beacons' gradient norm is {norm} after a step with {labels} labels behind a beacon, so "
            "they would not be trained. Usual causes: checkpointing with use_reentrant=True, a loss of your own that "
            "leaves these labels out, or an adapter that was loaded with is_trainable=False"
        )
    return norm
