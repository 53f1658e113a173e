"""What runs of any framework record: the documents that reached the model, and the ratios that beacons drew."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

Document = tuple[tuple[int, ...], tuple[int, ...]]


def spans(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray | None) -> Iterator[tuple[int, int, int]]:
    """Yield (row, begin, end) of every document: one per row if there is a mask, else cut where positions restart.

    Args:
        tokens, positions, mask: shape (batch, length).
    """
    for row in range(len(tokens)):
        if mask is not None:
            used = np.flatnonzero(mask[row])
            yield row, int(used[0]), int(used[-1]) + 1
            continue
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(positions[row]) < 1) + 1).tolist(), len(tokens[row])]):
            # Padding looks like a document; w0 pads and is in no text.
            if tokens[row, begin:end].any():
                yield row, begin, end


def documents_of(tokens: Any, positions: Any, mask: Any = None) -> list[Document]:
    """Return (tokens, positions) of every document of a batch, given as tensors or arrays."""
    tokens, positions, mask = (None if each is None else np.asarray(each) for each in (tokens, positions, mask))
    return [
        (tuple(tokens[row, begin:end].tolist()), tuple(positions[row, begin:end].tolist()))
        for row, begin, end in spans(tokens, positions, mask)
    ]


def watch_draws(tuner: Any) -> list[tuple[int, list[int]]]:
    """Return a list that fills with (tokens, ratios) of every training forward of a Beacon model."""
    import torch

    plan, drawn = tuner.plan, []

    def watched(cache: Any, tokens: int, *args: Any, **kwargs: Any) -> list[int]:
        found = plan(cache, tokens, *args, **kwargs)
        if tuner.training and torch.is_grad_enabled():
            drawn.append((tokens, found))
        return found

    tuner.plan = watched
    return drawn


def weights_of(model: Any) -> dict[str, Any]:
    """Return a copy of all weights by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def moved(model: Any, before: dict[str, Any]) -> list[str]:
    """Return the names of the weights in `before` that have changed since."""
    import torch

    now = dict(model.named_parameters())
    return [name for name, weight in before.items() if not torch.equal(weight, now[name])]


def layer_kinds(model: Any) -> list[str]:
    """Return the kinds of the layers below a Beacon model's projections, e.g. ["Linear4bit"]."""
    wrapped = [module for module in model.modules() if type(module).__name__ == "BeaconLinear"]
    return sorted({type(module.get_base_layer()).__name__ for module in wrapped})


def unbind_all() -> None:
    """Undo the class-level bindings of objects that earlier tests of this process may still hold."""
    from pose_plugin.training import binding

    gc.unfreeze()
    gc.collect()
    for place, entry in binding._wrapped.items():
        setattr(*place, entry.original)
    binding._wrapped.clear()
