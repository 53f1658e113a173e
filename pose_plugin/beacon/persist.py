"""A condensed text on disk: one safetensors file, read once and asked about anywhere the same model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.errors import PoSEError

FORMAT = "pose_plugin.beacon/1"


def save(cache: BeaconCache, path: str | Path) -> None:
    """Writes a cache.

    Args:
        cache: it must hold a text.
        path: of the file, e.g. "book.safetensors".

    Raises:
        PoSEError: the cache is empty.
    """
    if not cache.tokens:
        raise PoSEError("cache: it is empty; condense a text first, cache = model.condense(ids)")
    whole = cache.copy()
    whole.compact()
    tensors = {}
    for part, layers in (("memory", whole.pieces[0] if whole.pieces else []), ("open", whole.open)):
        for index, (keys, values) in enumerate(layers):
            tensors[f"{part}.{index}.keys"] = keys.detach().contiguous()
            tensors[f"{part}.{index}.values"] = values.detach().contiguous()
    if whole.adapter is not None:
        tensors["adapter"] = whole.adapter.detach().contiguous()
    state = {
        "format": FORMAT,
        "tokens": whole.tokens,
        "ratios": whole.ratios,
        "tail": list(whole.tail),
        "open_ratio": whole.open_ratio,
        "signature": whole.signature,
    }
    save_file(tensors, str(path), metadata={"beacon": json.dumps(state)})


def load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
    """Reads what `save` wrote.

    Args:
        path: of the file.
        device: where the tensors go; that of the model.

    Raises:
        PoSEError: the file is missing or holds something else. Whether it fits the model and the adapter is checked
            when it is used.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            state: dict[str, Any] = json.loads((file.metadata() or {}).get("beacon", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no iterator
    except (OSError, SafetensorError, ValueError) as error:
        raise PoSEError(f"cache: {path} cannot be read ({error}); write it with cache.save(path)") from error
    if state.get("format") != FORMAT:
        raise PoSEError(f"cache: {path} holds format {state.get('format')}, not {FORMAT}; condense the text again")
    cache = BeaconCache()
    parts = {}
    for part in ("memory", "open"):
        count = sum(key.startswith(f"{part}.") and key.endswith(".keys") for key in tensors)
        parts[part] = [(tensors[f"{part}.{i}.keys"], tensors[f"{part}.{i}.values"]) for i in range(count)]
    cache.pieces = [parts["memory"]] if parts["memory"] else []
    cache.open, cache.tail = parts["open"], tuple(state["tail"])
    cache.tokens, cache.ratios, cache.open_ratio = state["tokens"], list(state["ratios"]), state["open_ratio"]
    cache.signature, cache.adapter = state["signature"], tensors.get("adapter")
    return cache
