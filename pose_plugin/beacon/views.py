"""The cache that the unmodified model gets while one pass runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache

from pose_plugin.beacon.layout import Pass
from pose_plugin.utils.errors import PoSEError

KeysValues = tuple[torch.Tensor, torch.Tensor]


class PlainCache(Cache):
    """A cache that describes its layers as full attention, for transformers code that asks."""

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __bool__(self) -> bool:
        # `len` counts layers, so an empty cache would be false and be replaced where code says `cache or new`.
        return True


class Enough(Exception):
    """The last layer has written its keys and values, and nothing else of the pass is wanted."""


class IntervalView(PlainCache):
    """The keys and values that one pass sees: the cache that the unmodified model gets.

    Everything that a pass depends on is on this object, and writing twice is the same as writing once. So gradient
    checkpointing, which runs a layer again in the backward pass, sees what the first run saw.
    """

    def __init__(self, given: Pass, past: list[list[KeysValues]], last_layer: int | None = None) -> None:
        super().__init__(layers=[])
        self.given = given
        self.past = past
        self.last_layer = last_layer  # after which the pass may end; None if its outputs are wanted
        self.written: dict[int, KeysValues] = {}
        self.sealed = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Return keys and values of memory, overlap, tail and this pass, each (batch, heads, rows, head size)."""
        if not self.sealed:
            self.written[layer_idx] = (key_states, value_states)
        # Most intervals are read for their keys and values only. What the last layer makes of them, a third of the
        # work in a model of three layers, would be thrown away. A compiled layer cannot be left like this.
        if layer_idx == self.last_layer and not torch.compiler.is_compiling():
            raise Enough
        # Joined here, layer by layer, because joining all layers when the view is made would double the memory. The
        # past may come from a file, with another dtype or device; this pass decides.
        past = self.past[layer_idx] if self.past else []
        for keys, values in past:
            _require_shape(keys, key_states, layer_idx)
            _require_shape(values, value_states, layer_idx)
        parts = [(k.to(key_states), v.to(value_states)) for k, v in past] + [(key_states, value_states)]
        return join(keys for keys, _ in parts), join(values for _, values in parts)

    def seal(self) -> dict[int, KeysValues]:
        """End writing and return what was written. A later recomputation is read, not kept."""
        self.sealed = True
        written, self.written = self.written, {}
        return written

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the cached rows of the window. Unlike BeaconCache, this counts rows that are there."""
        return self.given.start + len(self.given.tail)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()


def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of shape (batch, heads, rows, head size) along the rows."""
    parts = list(tensors)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _require_shape(past: torch.Tensor, new: torch.Tensor, layer: int) -> None:
    # Not left to torch, whose message about sizes names nothing that the user wrote.
    if past.shape[:2] != new.shape[:2] or past.shape[3] != new.shape[3]:
        raise PoSEError(
            f"cache: layer {layer} holds (batch, heads, rows, head size) {tuple(past.shape)}, but this model makes "
            f"{tuple(new.shape)}; condense the text again with this model"
        )
