"""A condensed text on disk: one safetensors file, read once and asked about anywhere the same model runs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.beacon.checks import check_cache
from pose_plugin.beacon.layout import RAW
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import appearing

FORMAT = "pose_plugin.beacon/1"


def save(cache: BeaconCache, path: str | Path) -> None:
    """Writes a cache.

    The file appears whole, or what was there stays: a part is written beside it and given its name at the end.

    Args:
        cache: it must hold a text.
        path: of the file, e.g. "book.safetensors"; its folder must be there.

    Raises:
        PoSEError: the cache is empty, or no file can be written there.
    """
    check_cache(cache)
    if not cache.tokens:
        raise PoSEError("cache: it is empty; condense a text first, cache = model.condense(ids)")
    file = _file(path)
    if os.path.exists(file) and not os.path.isfile(file):
        kind = "a folder" if os.path.isdir(file) else "no ordinary file"
        raise PoSEError(f"path: {file} is {kind}; give the name of a file, e.g. context.safetensors")
    # A link stays one, be it /dev/stdout where that is a file: what it names is written.
    file = Path(os.path.realpath(file))
    if not os.path.isdir(file.parent):
        raise PoSEError(f"path: there is no folder {file.parent}; make it first, or save elsewhere")
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
    _write(file, tensors, {"beacon": json.dumps(state)})


def _write(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    try:
        with appearing(file) as part:
            part.touch(exist_ok=False)
            # safetensors gives a file of its own this name, for its owner alone.
            mode = part.stat().st_mode & 0o777
            save_file(tensors, str(part), metadata=metadata)
            with suppress(OSError):  # a disk that knows no modes
                part.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise PoSEError(
            f"path: {file} cannot be written ({error}); nothing was changed there. Save elsewhere, or make room"
        ) from error


def load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
    """Reads what `save` wrote.

    Args:
        path: of the file.
        device: where the tensors go; that of the model.

    Raises:
        PoSEError: the file is missing, cut off or holds something else, or there is no such device. Whether it fits the
            model and the adapter is checked when it is used.
    """
    file = _file(path)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise PoSEError(f"device: {device!r} cannot be used here ({first}); give 'cpu' or model.device") from error
    if os.path.isdir(file):
        raise PoSEError(f"cache: {file} is a folder; give the file that cache.save(path) wrote")
    try:
        with safe_open(str(file), framework="pt", device=str(device)) as opened:
            state = json.loads((opened.metadata() or {}).get("beacon", "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no iterator
    except (OSError, SafetensorError, ValueError) as error:
        raise PoSEError(f"cache: {file} cannot be read ({error}); write it with cache.save(path)") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise PoSEError(
            f"cache: {file} holds format {found}, not {FORMAT}: no context that cache.save(path) wrote, or another "
            "version's; condense the text again"
        )
    try:
        return _made(state, tensors)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PoSEError(
            f"cache: what {file} says of itself is not what it holds ({type(error).__name__}: {error}); condense the "
            "text again"
        ) from error


def _made(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> BeaconCache:
    """
    Raises:
        KeyError, TypeError, ValueError, IndexError: state and tensors do not go together.
    """
    cache = BeaconCache()
    signature = cache.signature = dict(state["signature"])
    parts = {}
    for part in ("memory", "open"):
        there = any(key.startswith(f"{part}.") for key in tensors)
        count = signature["layers"] if there else 0
        parts[part] = [(tensors[f"{part}.{i}.keys"], tensors[f"{part}.{i}.values"]) for i in range(count)]
    cache.pieces = [parts["memory"]] if parts["memory"] else []
    cache.open, cache.tail = parts["open"], tuple(int(row) for row in state["tail"])
    cache.tokens, cache.ratios, cache.open_ratio = state["tokens"], list(state["ratios"]), state["open_ratio"]
    cache.adapter = tensors["adapter"]
    interval = signature["interval"]
    rows = {"memory": sum(interval // ratio for ratio in cache.ratios), "open": len(cache.tail)}
    for part, layers in parts.items():
        sizes = {tensor.shape[2] for pair in layers for tensor in pair} or {0}
        if sizes != {rows[part]}:
            raise ValueError(f"{sorted(sizes)} rows of {part} where {rows[part]} belong")
    if cache.tokens != len(cache.ratios) * interval + sum(row == RAW for row in cache.tail):
        raise ValueError(f"{cache.tokens} tokens in {len(cache.ratios)} intervals and a rest of {cache.pending}")
    return cache


def _file(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise PoSEError(f"path: {path!r} is no name of a file; give e.g. 'context.safetensors'")
    name = os.fspath(path)
    if isinstance(name, bytes) or "\0" in name:
        raise PoSEError(f"path: {name!r} is no name of a file; give a str or a Path")
    return Path(name)
