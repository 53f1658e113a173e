"""BeaconCache: condensed memory plus the open interval. All state of a stream is here, none on the model.

Two documents never touch each other because each has a cache of its own. `get_seq_length` is the logical length (tokens
seen), which is what `generate` reckons with; how many keys are really there is `len_memory + len_tail`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Cache

from pose_plugin.beacon.layout import RAW, Pass
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import appearing

FORMAT = "pose_plugin.beacon/1"

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


class BeaconCache(PlainCache):
    """Keys and values of a stream, per layer: memory (beacons, positions 0…m−1) and tail (the open interval).

    Attributes:
        tokens: raw tokens seen in all.
        ratios: the ratio of each condensed interval, in order.
        tail: kind of each cached row of the open interval: RAW, or a beacon's number (interleaved layout only).
        open_ratio: the ratio that an interleaved open interval has begun with.
        signature: what the stream was made with (interval, layout, mask, layers); another model's cache is refused.
        adapter: the beacon embedding of the adapter that condensed it, (hidden,) in fp32; another adapter's is refused.
        mark: the tuner, adapter and version of weights that this was last compared with.
        undoes: whether `before` is kept: assisted decoding takes guesses back that passed an interval's end.
        before: the stream as it was when the interval condensed last was still raw.

    Shapes: (batch, key-value heads, rows, head size) for each tensor. Memory is kept in pieces, one an interval, so
    that a training step can cut gradients between them.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.pieces: list[list[KeysValues]] = []
        self.open: list[KeysValues] = []
        self.tail: tuple[int, ...] = ()
        self.tokens = 0
        self.ratios: list[int] = []
        self.open_ratio: int | None = None
        self.signature: dict[str, Any] = {}
        self.adapter: torch.Tensor | None = None
        self.mark: Any = None
        self.undoes = False
        self.before: BeaconCache | None = None

    # What is there.

    @property
    def len_memory(self) -> int:
        """m, the beacons in memory."""
        return sum(piece[0][0].shape[2] for piece in self.pieces)

    @property
    def len_tail(self) -> int:
        """Cached rows of the open interval."""
        return len(self.tail)

    @property
    def pending(self) -> int:
        """Raw tokens of the open interval."""
        return sum(kind == RAW for kind in self.tail)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; −1 while empty."""
        layers = self.open or (self.pieces[0] if self.pieces else [])
        return layers[0][0].shape[0] if layers else -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, condensed ones included."""
        return self.tokens

    def __len__(self) -> int:
        return len(self.open or (self.pieces[0] if self.pieces else []))

    def __repr__(self) -> str:
        return (
            f"BeaconCache(tokens={self.tokens}, memory={self.len_memory}, open interval={self.pending}, "
            f"ratios={self.ratios if len(self.ratios) < 9 else f'{len(self.ratios)} intervals'})"
        )

    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(
            t.numel() * t.element_size() for layers in [*self.pieces, self.open] for pair in layers for t in pair
        )

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        raise PoSEError(
            "cache: a BeaconCache was given to the bare model. Only a model with an enabled Beacon adapter reads it: "
            "call the PEFT model, outside disable_adapter()."
        )

    # What beam search and batches need.

    def _each(self, change: Any) -> None:
        self.pieces = [[(change(k), change(v)) for k, v in layers] for layers in self.pieces]
        self.open = [(change(k), change(v)) for k, v in self.open]
        self.before = None

    def _follow(self, fresh: list[KeysValues]) -> None:
        """Goes on where and in the dtype in which it was read last; a saved stream may come from another model."""
        first = (self.open or (self.pieces[0] if self.pieces else []))[:1]
        if first and any((a.dtype, a.device) != (b.dtype, b.device) for a, b in zip(first[0], fresh[0], strict=True)):
            pairs = [list(zip(layers, fresh, strict=False)) for layers in [*self.pieces, self.open]]
            moved = [[(k.to(new_k), v.to(new_v)) for (k, v), (new_k, new_v) in layers] for layers in pairs]
            self.pieces, self.open = moved[:-1], moved[-1]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes row beam_idx[i], as beam search asks."""
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda t: t[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> BeaconCache:
        """Moves it; returns itself."""
        self._each(lambda t: t.to(device))
        return self

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, as far back as they are raw.

        Args:
            tokens_to_remove: minus their number, as in transformers.

        Raises:
            PoSEError: they are condensed already; or a positive number.
        """
        count = -int(tokens_to_remove)
        if count == 0:
            return
        if count < 0:
            raise PoSEError(f"crop: {-count} is not negative; crop(-{-count}) forgets the last {-count} tokens")
        source = self
        if count > self.pending and self.before is not None:
            source = self.before
        rows, left = len(source.tail), count - (self.tokens - source.tokens)
        while rows and left > 0:
            rows -= 1
            left -= source.tail[rows] == RAW
        if left:
            raw = source.pending + self.tokens - source.tokens
            raise PoSEError(
                f"cache: {count} tokens cannot be taken back, only the last {raw} are still raw. Take a copy() before "
                "the tokens are read."
            )
        self.pieces, self.ratios, self.open_ratio = source.pieces, source.ratios, source.open_ratio
        self.open = [(k[:, :, :rows], v[:, :, :rows]) for k, v in source.open]
        self.tail = source.tail[:rows]
        self.tokens -= count
        self.before = None

    def copy(self) -> BeaconCache:
        """A cache that goes its own way. Tensors are shared, since none is ever changed in place."""
        twin = BeaconCache()
        twin.pieces, twin.open, twin.tail = [list(layers) for layers in self.pieces], list(self.open), self.tail
        twin.tokens, twin.ratios, twin.open_ratio = self.tokens, list(self.ratios), self.open_ratio
        twin.signature, twin.adapter, twin.mark = dict(self.signature), self.adapter, self.mark
        return twin

    def restore(self, twin: BeaconCache) -> None:
        """Becomes what `copy` gave; that one is not to be used afterwards."""
        names = ("pieces", "open", "tail", "tokens", "ratios", "open_ratio", "signature", "adapter", "mark")
        for name in names:
            setattr(self, name, getattr(twin, name))

    def save(self, path: str | Path) -> None:
        """Writes the stream to a safetensors file; see `_save`."""
        _save(self, path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
        """Reads what `save` wrote; see `_load`."""
        return _load(path, device)

    # What the stream does with it.

    def view(self, given: Pass, keep_pieces: int | None = None) -> IntervalView:
        """The keys and values that one pass sees.

        Args:
            given: the pass.
            keep_pieces: with a number, only that many of the last pieces keep their gradient.
        """
        cut = 0 if keep_pieces is None else max(0, len(self.pieces) - keep_pieces)
        past = []
        for layer in range(len(self)):
            parts = [piece[layer] for piece in self.pieces]
            parts = [(k.detach(), v.detach()) if at < cut else (k, v) for at, (k, v) in enumerate(parts)]
            past.append(parts + ([self.open[layer]] if self.open else []))
        return IntervalView(given, past)

    def extend(self, given: Pass, written: dict[int, KeysValues]) -> None:
        """Adds the rows of a pass to the open interval.

        Args:
            given: the pass.
            written: layer → its keys and values, (batch, heads, rows of the pass, head size).
        """
        fresh = [written[layer] for layer in sorted(written)]
        self._follow(fresh)
        if not self.open:
            self.open = fresh
        else:
            pairs = zip(self.open, fresh, strict=True)
            self.open = [(join([k, new_k]), join([v, new_v])) for (k, v), (new_k, new_v) in pairs]
        self.tail = self.tail + given.rows
        self.tokens += given.raw

    def close(self, index: list[int], place: Any, ratio: int) -> None:
        """Turns the open interval's beacons into memory and drops its raw rows.

        Args:
            index: where the beacons are among the rows of the interval.
            place: function from a layer and its beacons' keys, (batch, heads, beacons, head size), to the keys at their
                memory slots.
            ratio: of this interval, for the record.
        """
        if self.undoes:
            self.before = self.copy()
        piece = []
        for layer, (keys, values) in enumerate(self.open):
            at = torch.tensor(index, device=keys.device)
            piece.append((place(layer, keys.index_select(2, at)), values.index_select(2, at)))
        self.pieces.append(piece)
        self.open, self.tail, self.open_ratio = [], (), None
        self.ratios.append(ratio)

    def compact(self) -> None:
        """Joins the pieces of memory; for inference, where nothing cuts gradients between them."""
        if len(self.pieces) > 1:
            layers = range(len(self.pieces[0]))
            joined = [tuple(join(piece[at][part] for piece in self.pieces) for part in (0, 1)) for at in layers]
            self.pieces = [joined]  # type: ignore[list-item]


def check_cache(cache: Any, key: str = "cache") -> None:
    """
    Raises:
        PoSEError: a context that is no BeaconCache.
    """
    if cache is not None and not isinstance(cache, BeaconCache):
        raise PoSEError(
            f"{key}: {type(cache).__name__} is no BeaconCache; give model.condense(ids), BeaconCache.load(path) or "
            "BeaconCache()"
        )


@contextmanager
def kept_on_error(cache: Any) -> Iterator[None]:
    """A stream is as it was where reading on fails half-way: for want of memory, room in the window, or patience."""
    before = cache.copy() if isinstance(cache, BeaconCache) else None
    try:
        yield
    except BaseException:
        if before is not None:
            cache.restore(before)
        raise


def _save(cache: BeaconCache, path: str | Path) -> None:
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


def _load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
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


def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """(batch, heads, rows, head size) of all, along the rows."""
    parts = list(tensors)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
