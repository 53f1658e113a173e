"""What an evaluation forward will take, before it starts: a clear message instead of a crash half-way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from pose_plugin.evaluation.model import innermost
from pose_plugin.evaluation.sharded import InStep
from pose_plugin.utils.distributed import gather
from pose_plugin.utils.errors import PoSEError

GROUP = Path("/sys/fs/cgroup")
"""Where a container's limits are."""
LOGIT_BYTES = 64 * 2**20
"""Logits are made this many bytes at a time."""


class TooLittleMemory(PoSEError):
    """A length does not fit on this device; what was measured before stays."""


Row = TypeVar("Row")
Result = TypeVar("Result")


def estimate_bytes(
    config: Any, batch: int, length: int, element_size: int, attention: str | None = None, chunk: int | None = None
) -> int:
    """Memory of one forward without gradients, in bytes, weights not counted. An upper guess, not a promise.

    Args:
        config: a transformers config; sizes it does not name count as nothing.
        batch: sequences in the forward.
        length: tokens of each.
        element_size: bytes of one activation, 2 in bfloat16.
        attention: the attention implementation; "eager" builds [heads, length, length] scores twice.
        chunk: tokens read at a time; the cache is whole, activations are those of a chunk, and each chunk has a mask.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(config, "hidden_size", 0)
    heads = getattr(config, "num_attention_heads", 0) or 0
    layers = getattr(config, "num_hidden_layers", 0)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    key_values = (getattr(config, "num_key_value_heads", None) or heads) * head_dim * 2 * layers
    # One layer at a time: residual, norm, queries, keys, values, attention's output; three of the MLP.
    layer = 8 * hidden + 3 * (getattr(config, "intermediate_size", 0) or 4 * hidden)
    # The cache of greedy decoding is counted in, though most forwards have none.
    rows = min(chunk or length, length)
    tokens = batch * (rows * layer + length * key_values) * element_size
    # A cache grows by being copied, one layer at a time.
    tokens += 0 if chunk is None else batch * length * key_values * element_size // max(layers, 1)
    mask = 0 if chunk is None else 4 * batch * rows * length
    scores = 2 * batch * heads * rows * length * 4 if attention == "eager" else 0
    return tokens + mask + scores + LOGIT_BYTES


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, the container's limit included; None where it cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        limit, used = ((GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return free
        counts = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        # Files that were read count as used and make room for whoever asks: who has read much is not full.
        cached = sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
        return min(free, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return free


CHUNKS = (4096, 2048, 1024, 512, 256)
"""Tokens read at a time where a text does not fit at once, the largest that fits."""


@dataclass(frozen=True)
class Fit:
    """How a text is read: `batch` sequences in one forward, `chunk` tokens at a time (None: all at once)."""

    batch: int
    chunk: int | None
    bytes: int


def fitting(model: Any, device: torch.device, length: int, wanted: int) -> Fit:
    """The largest batch up to `wanted` that should fit; where not even one sequence does, the largest chunk of it.

    Raises:
        TooLittleMemory: not even one sequence of `length` tokens fits, read in the smallest chunks. Ranks that go in
            step find the same.
    """
    parameter = next(model.parameters(), None)
    config, free = getattr(innermost(model), "config", None), available_bytes(device)
    if config is None or parameter is None:
        return Fit(wanted, None, 0)
    attention = getattr(config, "_attn_implementation", None)
    size = max(parameter.element_size(), 2)
    tries: list[tuple[int, int | None]] = [(wanted, None)]
    while tries[-1][0] > 1:
        tries.append((tries[-1][0] // 2, None))
    tries += [(1, chunk) for chunk in CHUNKS if chunk < length]
    whole = model.gathered_bytes if isinstance(model, InStep) else 0
    fits = [Fit(batch, chunk, whole + estimate_bytes(config, batch, length, size, attention, chunk))
            for batch, chunk in tries]  # fmt: skip
    first = next((i for i, fit in enumerate(fits) if free is None or fit.bytes <= free), len(fits))
    if isinstance(model, InStep):
        # The rank with the least room sets the pace.
        first = max(gather(first))
    if first < len(fits):
        return fits[first]
    needed, free = fits[-1].bytes, 0 if free is None else free
    way_out = 'load the model with attn_implementation="sdpa", ' if attention == "eager" else ""
    raise TooLittleMemory(
        f"length={length} needs about {needed / 2**30:.1f} GiB for one sequence, and only "
        f"{free / 2**30:.1f} GiB are free on {device}; {way_out}use shorter lengths, "
        "a smaller dtype or a device with more memory"
    )


def require_room(config: Any, length: int, device: torch.device) -> None:
    """Checks, before prompts of that length are made and weights are loaded, that one could be read at all.

    Args:
        config: a transformers config.
        length: tokens.

    Raises:
        TooLittleMemory: not even in the smallest chunks, at two bytes a value.
    """
    free = available_bytes(device)
    needed = estimate_bytes(config, 1, length, 2, chunk=min(CHUNKS))
    if free is not None and needed > free:
        raise TooLittleMemory(
            f"length={length} needs about {needed / 2**30:.1f} GiB beside the weights, read in small pieces, and "
            f"{free / 2**30:.1f} GiB are free on {device}; use shorter lengths or a device with more memory"
        )


def in_batches(rows: Sequence[Row], size: int, run: Callable[[Sequence[Row]], Result]) -> Iterator[Result]:
    """`run` on `size` rows at a time; where the device runs out of memory, on half as many from there on.

    Raises:
        TooLittleMemory: out of memory with a single row, or where other ranks would wait for this one.
    """
    start = 0
    while start < len(rows):
        try:
            result = run(rows[start : start + size])
        except torch.OutOfMemoryError as error:
            alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            if size == 1 or not alone:
                raise TooLittleMemory(
                    f"evaluation ran out of memory with batch_size={size}; use less, or shorter lengths"
                ) from error
            size = size // 2
            torch.cuda.empty_cache()
            continue
        yield result
        start += size
