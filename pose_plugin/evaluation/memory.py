"""Memory of an evaluation: how many tokens are read at a time, forecast first and halved if the device runs out.

The forecast matters where running out cannot be handled: on a CPU the system kills the process, and with divided
weights the other ranks would wait forever.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from pose_plugin.evaluation.model import continues, device_of, end_of_short, evaluating, prefill
from pose_plugin.evaluation.questions import Answerer
from pose_plugin.evaluation.results import Work
from pose_plugin.evaluation.sharded import InStep
from pose_plugin.utils.distributed import gather
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap

GROUP = Path("/sys/fs/cgroup")
"""Where the limits of a container are."""
# Of cgroup v2, and of v1: the limit, how much is used, and for what.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
LOGIT_BYTES = 64 * 2**20
"""Logits are made this many bytes at a time."""
AT_ONCE = 16384
"""Tokens of a forward, unless the user sets a batch size."""
SMALLEST = 256
"""Fewest tokens read at a time."""
PROBE = 512
"""Tokens of the forward that is timed."""

Item = TypeVar("Item")
Found = TypeVar("Found")


class TooLittleMemory(PoSEError):
    """A length does not fit on this device; what was measured before is kept."""


def in_batches(
    model: Any,
    items: Sequence[Item],
    length: int,
    run: Callable[[Sequence[Item], int | None], list[Found]],
    batch_size: int | None = None,
) -> list[Found]:
    """Return what `run` finds for each item, as many items at a time as fit in memory.

    Args:
        items: texts or prompts, `length` tokens each.
        run: of some items and the tokens to read at a time (None: all), one result per item.
        batch_size: items at a time; default: about 16k tokens.

    Raises:
        TooLittleMemory: not even one item fits, read in the smallest pieces.
    """
    tokens = tokens_at_once(model, length, batch_size)
    found: list[Found] = []
    whole = fewest_tokens(getattr(unwrap(model), "config", None), length) == length
    # accelerate's find_executable_batch_size would do this, but accelerate is not required by this package, and it
    # begins again from the first item.
    while len(found) < len(items):
        batch = items[len(found) :][: max(1, tokens // length)]
        if tokens < length and not continues(model):
            raise TooLittleMemory(
                f"length={length}: it does not fit in memory whole, and {type(unwrap(model)).__name__} has layers that "
                "forget what is before each piece; use shorter lengths or a device with more memory"
            )
        try:
            found += run(batch, tokens if tokens < length else None)
        except torch.OutOfMemoryError as error:
            # Another rank in the same forward would wait forever for one that begins again.
            in_company = isinstance(model, InStep) or any(hasattr(each, "device_mesh") for each in model.parameters())
            if in_company or tokens <= SMALLEST or (whole and tokens // 2 < length):
                raise TooLittleMemory(
                    f"length={length}: out of memory with {tokens} tokens at a time; use shorter lengths"
                ) from error
            tokens //= 2
            torch.cuda.empty_cache()
    return found


def tokens_at_once(model: Any, length: int, batch_size: int | None = None) -> int:
    """Return how many tokens to read at a time: several texts, or a part of one.

    Args:
        model: a causal language model; ranks in step get the same number.
        length: of a text in tokens.
        batch_size: texts that are wanted at a time.

    Raises:
        TooLittleMemory: not even the smallest part of one text fits.
    """
    wanted = length * (batch_size or max(1, AT_ONCE // length))
    least = fewest_tokens(getattr(unwrap(model), "config", None), length)
    tries = [wanted >> k for k in range(wanted.bit_length()) if wanted >> k >= least]
    needed = [bytes_needed(model, length, tokens) for tokens in tries]
    free = available_bytes(device_of(model))
    first = next((i for i, need in enumerate(needed) if free is None or need <= free), len(tries))
    if isinstance(model, InStep):
        # The rank with the least memory decides for all.
        first = max(gather(first))
    if first == len(tries):
        raise _too_little(length, needed[-1], free, device_of(model))
    return tries[first]


def require_room(config: Any, length: int, device: torch.device) -> None:
    """Raise TooLittleMemory if a text cannot be read even in the smallest pieces, before weights are loaded."""
    free, needed = available_bytes(device), estimate_bytes(config, length, fewest_tokens(config, length))
    if free is not None and needed > free:
        raise _too_little(length, needed, free, device)


def fewest_tokens(config: Any, length: int) -> int:
    """Return the fewest tokens that a text may be read in at a time.

    That is the whole text if its length decides the frequencies (longrope, dynamic NTK): by pieces, the first ones
    would be rotated as in a short text.
    """
    limit = end_of_short(config)
    return min(SMALLEST, length) if limit is None or length <= limit else length


def _too_little(length: int, needed: int, free: int | None, device: torch.device) -> TooLittleMemory:
    return TooLittleMemory(
        f"length={length} needs about {needed / 2**30:.1f} GiB besides the weights, and {(free or 0) / 2**30:.1f} GiB "
        f"are free on {device}; use shorter lengths, a smaller dtype or a device with more memory"
    )


def bytes_needed(model: Any, length: int, tokens: int) -> int:
    """Return the forecast of `estimate_bytes` for a live model; weights that are gathered for a forward count."""
    config, parameter = getattr(unwrap(model), "config", None), next(model.parameters(), None)
    if config is None or parameter is None:
        return 0
    gathered = model.gathered_bytes if isinstance(model, InStep) else 0
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return gathered + estimate_bytes(config, length, tokens, max(parameter.element_size(), 2), eager)


def estimate_bytes(config: Any, length: int, tokens: int, element_size: int = 2, eager: bool = False) -> int:
    """Return an upper guess of the memory of a forward without gradients, in bytes, weights not included.

    Args:
        config: a transformers config; sizes it does not name count as nothing.
        length: of each text in tokens.
        tokens: read at a time; below `length` the text is read in pieces with a key-value cache.
        element_size: bytes of one activation, 2 in bfloat16.
        eager: whether attention makes [heads, tokens, length] scores, twice.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    heads = getattr(config, "num_attention_heads", 0) or 0
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    key_values = (getattr(config, "num_key_value_heads", None) or heads) * head_dim * 2 * layers
    # One layer at a time: residual, norm, queries, keys, values, attention's output; three of the MLP.
    layer = 8 * hidden + 3 * (getattr(config, "intermediate_size", 0) or 4 * hidden)
    batch, rows = max(1, tokens // length), min(tokens, length)
    # Not every forward keeps a cache; greedy decoding does.
    values = batch * (rows * layer + length * key_values)
    mask = 0
    if rows < length:
        # A cache grows by being copied, one layer at a time, and each piece has a mask.
        values += length * key_values // max(layers, 1)
        mask = 4 * rows * length
    scores = 2 * batch * heads * rows * length * 4 if eager else 0
    return values * element_size + mask + scores + LOGIT_BYTES


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device, the container's limit included; None if it is unknown."""
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
    return min(free, *map(_left_in_group, _GROUP_FILES))


def _left_in_group(files: tuple[str, str, str]) -> int:
    """Return the bytes that the container's limit leaves, sys.maxsize if these files do not state one."""
    try:
        limit, used, stat = ((GROUP / name).read_text() for name in files)
        counts = dict(line.split() for line in stat.splitlines())
        # Cached files count as used, but make room for whoever needs it. In v1, "total_" includes groups within.
        names = ("inactive_file", "active_file", "slab_reclaimable")
        cached = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in names)
        return int(limit) - int(used) + cached
    except (OSError, ValueError):  # no such file, or the limit is "max"
        return sys.maxsize


def forecast(model: Any, works: Sequence[tuple[str, Work]], batch_size: int | None = None) -> str:
    """Return a line per named piece of work, to read: how long it takes and how much memory.

    One short forward is timed and extrapolated.
    """
    config = unwrap(model).config.get_text_config()
    # A table of learned positions ends at its maximum.
    probe = min(PROBE, getattr(config, "max_position_embeddings", None) or PROBE)
    speed = operations(model, probe) / max(_seconds(model, probe), 1e-6)
    lines, total = [], 0.0
    for name, work in works:
        what = f"  {name:<11} {work.length:>8} tokens × {work.sequences:>5}"
        if not work.sequences:
            lines.append(f"  {name:<11} not estimated")
            continue
        try:
            tokens = tokens_at_once(model, work.length, batch_size)
        except TooLittleMemory as error:
            lines.append(f"{what}  does not fit: {error}")
            continue
        seconds = work.sequences * (operations(model, work.length) + work.steps * operations(model, 1)) / speed
        total += seconds
        size = f"{bytes_needed(model, work.length, tokens) / 2**30:6.2f} GiB besides the weights"
        read = f", read {tokens} tokens at a time" if tokens < work.length else ""
        lines.append(f"{what}  about {duration(seconds)}, {size}{read}")
    return "\n".join([*lines, f"  together about {duration(total)}"])


def operations(model: Any, length: int) -> float:
    """Return about how many floating-point operations a forward has: 2 per weight and token, and attention."""
    config = unwrap(model).config.get_text_config()
    hidden, layers = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    embedding = getattr(config, "vocab_size", 0) * hidden
    weights = sum(parameter.numel() for parameter in model.parameters())
    return 2.0 * max(weights - embedding, embedding) * length + 2.0 * layers * hidden * length**2


def _seconds(model: Any, length: int) -> float:
    device, vocabulary = device_of(model), unwrap(model).config.get_text_config().vocab_size
    ids = (torch.arange(length, device=device) % vocabulary)[None]
    with evaluating(model):
        # The first forward also compiles kernels and fills caches.
        prefill(model, ids)
        start = time.perf_counter()
        # Copying the answer waits until the device has it.
        prefill(model, ids)[0].cpu()
    return time.perf_counter() - start


def duration(seconds: float) -> str:
    """Return a rounded time to read, e.g. "12 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def require_fits(model: Any, length: int) -> None:
    """Raise TooLittleMemory if a length does not fit in memory, or in the context that a server states."""
    if isinstance(model, Answerer):
        model.require_fits(length)
    else:
        tokens_at_once(model, length)
