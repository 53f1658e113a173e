"""BeaconCache: condensed memory and the open interval of one text. All state of a stream is here, none on the model.

- Two documents cannot mix, because each has its own cache.
- `get_seq_length` is the logical length, tokens seen, which `generate` counts with. The keys that are really cached are
  `len_memory + len_overlap + len_tail`.
- While one pass runs, the unmodified model gets an `IntervalView` of the cache, not the cache itself.
- `save` writes one safetensors file; any process that runs the same model and adapter can read it (`files.py`).
- `to_dynamic_cache` and `save_cartridge` give the memory to programs without this package (`leaving.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache

from pose_plugin.beacon import files, leaving
from pose_plugin.beacon.layout import RAW, Pass, Scheme
from pose_plugin.beacon.ratios import StreamState
from pose_plugin.beacon.views import IntervalView, KeysValues, PlainCache, join
from pose_plugin.utils.errors import PoSEError

# Places among the rows of the open interval, and how far each of these rows moves.
Moved = tuple[list[int], list[int]]

# Any large odd number; it spreads the places of tokens over all 64 bits.
_SPREAD = 0x1E3779B97F4A7C15

# The attributes of a BeaconCache that belong to the stream, not to how it is read.
_COPIED = (
    "pieces",
    "overlap",
    "open",
    "tail",
    "tokens",
    "text",
    "digest",
    "ratios",
    "open_ratio",
    "signature",
    "adapter",
    "rope",
    "mark",
)


class BeaconCache(PlainCache):
    """Keys and values of a stream, per layer: memory (beacons, positions 0…m−1) and tail (the open interval).

    Examples:
        >>> context = model.condense(document_ids)
        >>> context.save("document.safetensors")
        >>> answer = model.generate(question_ids, context=BeaconCache.load("document.safetensors"))

    Attributes:
        tokens: raw tokens seen in all.
        text: ids, (batch, tokens), or embeddings, (batch, tokens, hidden), of a stream that "adapt" has kept raw; None
            otherwise. It is read again, condensed, when it no longer fits the window.
        digest: a number per row of what was read, (batch,), to tell whether another text continues it; None if unknown.
        ratios: the ratio of each condensed interval, in order.
        overlap: the last raw rows of the interval condensed last, per layer; empty without `BeaconConfig.overlap`.
        tail: kind of each cached row of the open interval: RAW, or a beacon's number (interleaved layout only).
        open_ratio: the ratio that an interleaved open interval has begun with.
        signature: what the stream was made with (interval, layout, mask, layers). A model with another one refuses it.
        adapter: beacon embedding of the adapter that condensed it, (hidden,) in fp32. Another adapter refuses it.
        rope: frequencies of the base, (rotary size / 2,) in fp32; None in older files. Another RoPE refuses it.
        mark: the tuner's router, adapter and version of weights that this cache was last compared with.
        undoes: whether to keep `before`; assisted decoding may take back guesses that passed the end of an interval.
        before: the stream when the interval condensed last was still raw.

    Shapes: each tensor is (batch, key-value heads, rows, head size). Memory is kept in one piece per interval, so that
    a training step can cut gradients between them.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        self.clear_text()
        self.signature: dict[str, Any] = {}
        self.adapter: torch.Tensor | None = None
        self.rope: torch.Tensor | None = None
        self.mark: Any = None
        self.undoes = False
        self.before: BeaconCache | None = None

    def clear_text(self) -> None:
        """Forget what was read, but not which model and adapter read it."""
        self.pieces: list[list[KeysValues]] = []
        self.overlap: list[KeysValues] = []
        self.open: list[KeysValues] = []
        self.tail: tuple[int, ...] = ()
        self.tokens = 0
        self.text: torch.Tensor | None = None
        self.digest: torch.Tensor | None = None
        self.ratios: list[int] = []
        self.open_ratio: int | None = None

    # Sizes.

    @property
    def len_memory(self) -> int:
        """m, the beacons in memory."""
        return sum(piece[0][0].shape[2] for piece in self.pieces)

    @property
    def len_overlap(self) -> int:
        """t, raw rows of the interval before."""
        return self.overlap[0][0].shape[2] if self.overlap else 0

    @property
    def len_tail(self) -> int:
        """Cached rows of the open interval."""
        return len(self.tail)

    @property
    def pending(self) -> int:
        """Raw tokens of the open interval."""
        return self.tail.count(RAW)

    @property
    def can_stay_raw(self) -> bool:
        """Whether the whole text is still raw, and known, so that it can be condensed later."""
        return not self.tokens or self.text is not None

    def must_read_again(self, scheme: Scheme) -> bool:
        """Return whether the raw rows cannot be condensed as they are.

        They are several intervals, which have seen each other raw; or, interleaved, they have no beacons between them.
        """
        return self.text is not None and (scheme.interleaved or self.pending > scheme.interval)

    @property
    def state(self) -> StreamState:
        """What the choice of the next ratios depends on."""
        return StreamState(self.len_memory, self.pending, self.open_ratio, max(self.ratios[-1:], default=1))

    @property
    def batch_size(self) -> int:
        """Rows of the batch; −1 while empty."""
        layers = self._layers()
        return layers[0][0].shape[0] if layers else -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, condensed ones included."""
        return self.tokens

    def __len__(self) -> int:
        return len(self._layers())

    def __repr__(self) -> str:
        return (
            f"BeaconCache(tokens={self.tokens}, memory={self.len_memory}, open interval={self.pending}, "
            f"ratios={self.ratios if len(self.ratios) < 9 else f'{len(self.ratios)} intervals'})"
        )

    def nbytes(self) -> int:
        """Return the bytes of all keys and values."""
        return sum(
            t.numel() * t.element_size()
            for layers in [*self.pieces, self.overlap, self.open]
            for pair in layers
            for t in pair
        )

    def _layers(self) -> list[KeysValues]:
        return self.open or (self.pieces[0] if self.pieces else [])

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        raise PoSEError(
            "cache: a BeaconCache was given to the bare model, which cannot read it. Call the PEFT model with an "
            "enabled Beacon adapter, outside disable_adapter()"
        )

    # Beam search and batches.

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pieces = [[(change(k), change(v)) for k, v in layers] for layers in self.pieces]
        self.overlap = [(change(k), change(v)) for k, v in self.overlap]
        self.open = [(change(k), change(v)) for k, v in self.open]
        self.text = change(self.text) if self.text is not None else None
        self.digest = change(self.digest) if self.digest is not None else None
        self.before = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i with row beam_idx[i], for beam search."""
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self._each(lambda t: t[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> BeaconCache:
        """Move all tensors and return the cache."""
        self._each(lambda t: t.to(device))
        return self

    # Copies and files.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as far back as they are raw.

        Args:
            tokens_to_remove: minus their number, as in transformers.

        Raises:
            PoSEError: they are condensed already; or a positive number.
        """
        count = -int(tokens_to_remove)
        if count == 0:
            return
        if count < 0:  # in older transformers, this was the length to keep
            raise PoSEError(f"crop: {-count} is not negative; crop(-{-count}) removes the last {-count} tokens")
        source = self
        if count > self.pending and self.before is not None:
            source = self.before
        rows, left = len(source.tail), count - (self.tokens - source.tokens)
        while rows and left > 0:
            rows -= 1
            left -= source.tail[rows] == RAW
        while rows and source.tail[rows - 1] != RAW:  # a beacon is read with the token that follows it
            rows -= 1
        if left:
            raw = source.pending + self.tokens - source.tokens
            raise PoSEError(
                f"cache: {count} tokens cannot be removed, only the last {raw} are still raw. Take a copy() before "
                "reading the tokens"
            )
        self.pieces, self.ratios, self.overlap = source.pieces, source.ratios, source.overlap
        # As after `close`, if no row is left: `save` describes what it finds.
        self.open = [(k[:, :, :rows], v[:, :, :rows]) for k, v in source.open if rows]
        self.open_ratio = source.open_ratio if rows else None
        self.tail = source.tail[:rows]
        self.tokens -= count
        self.text = source.text[:, : self.tokens] if source.text is not None and self.tokens else None
        self.digest = digest_of(self.text) if self.text is not None and self.text.dim() == 2 else None
        self.before = None

    def copy(self) -> BeaconCache:
        """Return an independent cache. It shares the tensors, because none is ever changed in place."""
        twin = BeaconCache()
        for name in _COPIED:
            value = getattr(self, name)
            setattr(twin, name, list(value) if isinstance(value, list) else value)
        return twin

    def restore(self, twin: BeaconCache) -> None:
        """Return to the state of a `copy`, which must not be used afterwards."""
        for name in _COPIED:
            setattr(self, name, getattr(twin, name))

    def save(self, path: str | Path) -> None:
        """Write the stream to one safetensors file; see `files.save`."""
        files.save(self, path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
        """Read a file that `save` wrote. Whether it fits the model and the adapter is checked when it is used.

        Args:
            path: the file.
            device: where to put the tensors; that of the model.

        Raises:
            PoSEError: the file holds something else, or its tensors do not match its description.
        """
        state, tensors = files.read(path, device)
        cache, layers = BeaconCache(), range(state.signature.layers)
        parts = {
            part: [(tensors[f"{part}.{at}.keys"], tensors[f"{part}.{at}.values"]) for at in layers]
            for part in files.PARTS
            if f"{part}.0.keys" in tensors
        }
        cache.pieces = [parts["memory"]] if "memory" in parts else []  # a text within one interval has no memory
        cache.overlap, cache.open = parts.get("overlap", []), parts.get("open", [])
        cache.tail = tuple(state.tail)
        cache.signature, cache.adapter = state.signature.model_dump(), tensors["adapter"]
        cache.rope = tensors.get("rope")
        cache.text, cache.digest = tensors.get("text"), tensors.get("digest")
        cache.tokens, cache.ratios, cache.open_ratio = state.tokens, state.ratios, state.open_ratio
        return cache

    def to_dynamic_cache(self) -> DynamicCache:
        """Return an ordinary transformers cache for the plain base model; see `leaving.dynamic_cache`."""
        return leaving.dynamic_cache(self)

    # Passes.

    def view(self, given: Pass, keep_pieces: int | None = None, last_layer: int | None = None) -> IntervalView:
        """Return the keys and values that one pass sees.

        Args:
            keep_pieces: how many of the last pieces keep their gradient; None for all.
            last_layer: the model's last layer, if its output is not wanted.
        """
        cut = 0 if keep_pieces is None else max(0, len(self.pieces) - keep_pieces)
        past = []
        for layer in range(len(self)):
            parts = [piece[layer] for piece in self.pieces]
            parts = [(k.detach(), v.detach()) if at < cut else (k, v) for at, (k, v) in enumerate(parts)]
            past.append(parts + [layers[layer] for layers in (self.overlap, self.open) if layers])
        return IntervalView(given, past, last_layer)

    def extend(self, given: Pass, written: dict[int, KeysValues]) -> None:
        """Add the rows of a pass to the open interval.

        Args:
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

    def _follow(self, fresh: list[KeysValues]) -> None:
        """Move the stream to the dtype and device of its newest rows: a saved stream may come from another model."""
        first = self._layers()[:1]
        if first and any((a.dtype, a.device) != (b.dtype, b.device) for a, b in zip(first[0], fresh[0], strict=True)):
            pairs = [list(zip(layers, fresh, strict=False)) for layers in [*self.pieces, self.overlap, self.open]]
            moved = [[(k.to(new_k), v.to(new_v)) for (k, v), (new_k, new_v) in layers] for layers in pairs]
            self.pieces, self.overlap, self.open = moved[:-2], moved[-2], moved[-1]

    def note(self, text: torch.Tensor) -> None:
        """Add ids that are about to be read to `digest`; of embeddings there is none."""
        if text.dim() == 2 and (self.digest is not None or not self.tokens):
            before = 0 if self.digest is None else self.digest.to(text.device)
            self.digest = before + digest_of(text, self.tokens)
        else:
            self.digest = None

    def close(self, beacons: Moved, overlap: Moved, place: Callable[..., torch.Tensor], ratio: int) -> None:
        """Turn the open interval's beacons into memory and drop its raw rows, except those of the overlap.

        Args:
            beacons: where the beacons are among the rows of the interval, and their shifts to their memory slots.
            overlap: the same for the raw rows that the next interval sees.
            place: function from a layer, keys (batch, heads, rows, head size) and shifts to the moved keys.
            ratio: of this interval, for the record.
        """
        if self.undoes:
            self.before = self.copy()
        self.pieces.append(self._moved(beacons, place))
        self.overlap = self._moved(overlap, place) if overlap[0] else []
        self.open, self.tail, self.open_ratio = [], (), None
        self.ratios.append(ratio)

    def _moved(self, rows: Moved, place: Callable[..., torch.Tensor]) -> list[KeysValues]:
        index, shifts = rows
        found = []
        for layer, (keys, values) in enumerate(self.open):
            at = torch.tensor(index, device=keys.device)
            found.append((place(layer, keys.index_select(2, at), shifts), values.index_select(2, at)))
        return found

    def compact(self) -> None:
        """Join the pieces of memory; for inference, where no gradient is cut between them."""
        if len(self.pieces) > 1:
            layers = range(len(self.pieces[0]))
            joined = [tuple(join(piece[at][part] for piece in self.pieces) for part in (0, 1)) for at in layers]
            self.pieces = [joined]  # type: ignore[list-item]


def digest_of(ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return a number per row, (batch,), that other ids or other places almost surely change.

    Args:
        ids: (batch, tokens).
        start: the place of the first.
    """
    # Modulo 2^64, so that numbers of parts add up to that of the whole.
    places = torch.arange(start, start + ids.shape[1], device=ids.device) * _SPREAD | 1
    return ((ids.long() + 1) * places).sum(1)


def stream_of(cache: Any) -> BeaconCache:
    """Return the stream that a call continues: the given one, or a new one if the given cache is None or empty.

    Raises:
        PoSEError: another kind of cache that holds tokens, whose uncondensed keys would be dropped; or one that a call
            was to fill, and could not.
    """
    # Not `cache or …`: an empty DynamicCache is true, and one with a prompt in it must not be dropped.
    if isinstance(cache, BeaconCache):
        return cache
    if cache is not None and not isinstance(cache, Cache):
        raise PoSEError(
            f"cache: a {type(cache).__name__} is no cache; give a BeaconCache, from model.condense(ids), "
            "BeaconCache.load(path) or BeaconCache()"
        )
    if cache is not None and cache.get_seq_length():
        raise PoSEError(
            f"cache: a {type(cache).__name__} with {cache.get_seq_length()} tokens cannot be continued; give a "
            "BeaconCache, from model.condense(ids), BeaconCache.load(path) or BeaconCache()"
        )
    if getattr(cache, "left_empty", False):
        raise PoSEError(
            f"cache: an earlier call got this {type(cache).__name__} too. It cannot hold beacons and is still empty: "
            "the text of that call would be missing. Give a BeaconCache() instead, or the cache that the call returned"
        )
    return BeaconCache()


@contextmanager
def kept_on_error(cache: Any) -> Iterator[None]:
    """Restore the cache if reading fails part-way."""
    before = cache.copy() if isinstance(cache, BeaconCache) else None
    try:
        yield
    except BaseException:  # Ctrl-C too
        if before is not None:
            cache.restore(before)
        raise
