"""What the unmodified model takes for its cache while one pass runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache

from pose_plugin.beacon.layout import Pass

KeysValues = tuple[torch.Tensor, torch.Tensor]


class PlainCache(Cache):
    """Answers for code that asks a cache what its layers are; here they are all full attention."""

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __bool__(self) -> bool:
        # `len` counts layers, so an empty cache would read as False and be replaced where code says `cache or new`.
        return True


class IntervalView(PlainCache):
    """One pass's window on a BeaconCache: what the unmodified model takes for its cache.

    Everything that a pass depends on is on this object, and writing twice is the same as writing once. So gradient
    checkpointing, which runs a layer again in the backward pass, sees what the first run saw.
    """

    def __init__(self, given: Pass, past: list[list[KeysValues]]) -> None:
        super().__init__(layers=[])
        self.given = given
        self.past = past
        self.written: dict[int, KeysValues] = {}
        self.sealed = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Keys and values of memory, tail and this pass, (batch, heads, rows, head size)."""
        if not self.sealed:
            self.written[layer_idx] = (key_states, value_states)
        # Pieces of the past are joined here, once, rather than when the view is made; a stream that was read in another
        # dtype or on another device is read in this one.
        past = self.past[layer_idx] if self.past else []
        parts = [(k.to(key_states), v.to(value_states)) for k, v in past] + [(key_states, value_states)]
        return join(keys for keys, _ in parts), join(values for _, values in parts)

    def seal(self) -> dict[int, KeysValues]:
        """Ends writing and hands over what was written. A later recomputation is read, not kept."""
        self.sealed = True
        written, self.written = self.written, {}
        return written

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached rows of the window: this view counts what is there, unlike BeaconCache."""
        return self.given.memory + len(self.given.tail)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()


def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """(batch, heads, rows, head size) of all, along the rows."""
    parts = list(tensors)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
