"""Save and load condensed texts: one safetensors file with the tensors and a description of them.

A file may come from anybody, so its description is validated by a schema, and its tensors against the description.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pose_plugin.beacon.layout import MASKS, RAW, Scheme, lay_out
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import atomic_file

FORMAT = "pose_plugin.beacon/1"
PARTS = ("memory", "overlap", "open")
Count = Annotated[int, Field(ge=1)]


class Signature(BaseModel):
    """What the stream was made with; see `Reading.signature`."""

    interval: Annotated[int, Field(ge=2)]
    overlap: Annotated[int, Field(ge=0)] = 0  # older files name neither of these
    sinks: Annotated[int, Field(ge=0)] = 0
    layout: Literal["v1", "v2"]
    mask: Literal[MASKS]  # type: ignore[valid-type]
    layers: Count
    hidden_size: Count


class Description(BaseModel):
    """The JSON of a context file. Attributes as those of BeaconCache."""

    tokens: Count
    ratios: list[Annotated[int, Field(ge=2)]]
    tail: list[Annotated[int, Field(ge=RAW)]]
    open_ratio: Annotated[int, Field(ge=2)] | None
    signature: Signature

    @model_validator(mode="after")
    def _is_consistent(self) -> Description:
        # Anything else would shift positions silently, or divide by zero much later.
        interval, raw = self.signature.interval, self.tail.count(RAW)
        for ratio in [*self.ratios, *([self.open_ratio] if self.open_ratio else [])]:
            if interval % ratio:
                raise ValueError(f"ratio {ratio} does not divide the interval of {interval}")
        if self.tokens != len(self.ratios) * interval + raw:
            raise ValueError(f"tokens={self.tokens} is not {len(self.ratios)} intervals of {interval} and {raw} more")
        interleaved = self.signature.layout == "v2"
        read = lay_out(0, (), raw, Scheme(interval, interleaved=True), self.open_ratio).rows if self.open_ratio else ()
        if tuple(self.tail) != (read or (RAW,) * raw) or (self.open_ratio and not interleaved):
            raise ValueError(f"tail is not that of {raw} tokens at open_ratio={self.open_ratio}")
        return self

    @property
    def memory(self) -> int:
        """Rows in memory: sinks and beacons."""
        beacons = sum(self.signature.interval // ratio for ratio in self.ratios)
        return self.signature.sinks + beacons if self.ratios else 0


def save(cache: Any, path: str | Path) -> None:
    """Write the stream atomically: an interrupted save leaves the old file.

    Raises:
        PoSEError: the cache is empty, or something that is not a regular file is there.
    """
    if not cache.tokens:
        raise PoSEError("cache: it is empty; condense a text first, context = model.condense(ids)")
    # Resolved, so that a link stays a link and its target is replaced.
    file = Path(path).resolve()
    if file.exists() and not file.is_file():  # the final rename would replace a pipe or a device
        raise PoSEError(f"path: {file} is not a regular file; give the name of one, e.g. context.safetensors")
    whole = cache.copy()
    whole.compact()
    found = {"adapter": whole.adapter, "rope": whole.rope, "text": whole.text, "digest": whole.digest}
    tensors = {key: tensor for key, tensor in found.items() if tensor is not None}
    parts = (whole.pieces[0] if whole.pieces else [], whole.overlap, whole.open)
    for part, layers in zip(PARTS, parts, strict=True):
        for index, (keys, values) in enumerate(layers):
            tensors |= {f"{part}.{index}.keys": keys, f"{part}.{index}.values": values}
    state = Description(
        tokens=whole.tokens,
        ratios=whole.ratios,
        tail=list(whole.tail),
        open_ratio=whole.open_ratio,
        signature=Signature(**whole.signature),
    )
    beacon = f'{{"format": "{FORMAT}", {state.model_dump_json()[1:]}'
    with atomic_file(file) as part_file:
        part_file.touch(exist_ok=False)
        # safetensors makes a file that only its owner may read; keep what the umask gives.
        mode = part_file.stat().st_mode & 0o777
        contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, str(part_file), metadata={"beacon": beacon})
        with suppress(OSError):  # a file system without modes
            part_file.chmod(mode)


def read(path: str | Path, device: torch.device | str) -> tuple[Description, dict[str, torch.Tensor]]:
    """Return the description and the tensors of a file that `save` wrote.

    Raises:
        PoSEError: the file holds something else, or its tensors do not match its description.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as opened:
            state = _description(path, (opened.metadata() or {}).get("beacon", "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no iterator
    except SafetensorError as error:  # which does not name the file
        raise PoSEError(f"cache: {path} is not a whole safetensors file ({error}); condense the text again") from None
    _check_tensors(path, state, tensors)
    return state, tensors


def _description(path: str | Path, text: str) -> Description:
    class Named(BaseModel):
        format: Any = None

    try:
        named = Named.model_validate_json(text).format
        if named != FORMAT:
            raise PoSEError(
                f"cache: {path} has format {str(named)[:80]}, not {FORMAT}: cache.save(path) did not write it, or "
                "another version did; condense the text again"
            )
        return Description.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "description"
        raise _damaged(path, f"{where}: {first['msg'][:200]}") from None


def _check_tensors(path: str | Path, state: Description, tensors: dict[str, torch.Tensor]) -> None:
    names = {"adapter": 1, "rope": 0, "text": 0, "digest": 0}  # a tensor of this name: 1 required, 0 optional
    # Before the first interval is condensed, a cache has no overlap.
    overlap = state.signature.overlap if state.ratios else 0
    rows = {"memory": state.memory, "overlap": overlap, "open": len(state.tail)}
    for part, count in rows.items():
        wanted = [f"{part}.{at}.{side}" for at in range(state.signature.layers) for side in ("keys", "values")]
        names |= dict.fromkeys(wanted if count else [], 1)
    missing = [name for name, needed in names.items() if needed and name not in tensors]
    if missing or not tensors.keys() <= names.keys():
        unknown = sorted(tensors.keys() - names.keys())
        raise _damaged(path, f"tensors missing: {missing[:3]}, unknown: {unknown[:3]}")
    batch = {tensors[name].shape[0] for name in names.keys() & tensors.keys() - {"adapter", "rope"}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if rest and (tensor.dim() != 4 or tensor.shape[2] != rows[part]):
            raise _damaged(path, f"{name} has shape {tuple(tensor.shape)}, not {rows[part]} rows of keys or values")
        if name == "rope" and not (tensor.dim() == 1 and tensor.numel()):
            raise _damaged(path, f"rope has shape {tuple(tensor.shape)}, not one frequency per pair")
        if name == "digest" and (tensor.dim() != 1 or tensor.dtype != torch.int64):
            raise _damaged(path, f"digest has shape {tuple(tensor.shape)}, not one whole number per row")
        if name not in ("text", "digest") and not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all())):
            raise _damaged(path, f"{name} holds values that are not finite numbers")
    text, hidden = tensors.get("text"), state.signature.hidden_size
    shape = None if text is None else tuple(text.shape[1:])
    possible = (None, (state.tokens,), (state.tokens, hidden))
    if len(batch) != 1 or tensors["adapter"].shape != (hidden,) or shape not in possible:
        raise _damaged(path, f"batch sizes {sorted(batch)}, adapter {tuple(tensors['adapter'].shape)}, text {shape}")
    # Longer than an interval only if it can be condensed later, for which the text is needed.
    longest = state.tokens if text is not None and not state.ratios else state.signature.interval
    if state.tail.count(RAW) > longest:
        raise _damaged(path, f"{state.tail.count(RAW)} raw tokens are more than an interval")


def _damaged(path: str | Path, why: str) -> PoSEError:
    return PoSEError(f"cache: {path} does not hold the tensors that it describes ({why}); condense the text again")
