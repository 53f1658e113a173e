"""BeaconCache: condensed memory plus the open interval. All state of a stream is here, none on the model.

Two documents never touch each other because each has a cache of its own. `get_seq_length` is the logical length (tokens
seen), which is what `generate` reckons with; how many keys are really there is `len_memory + len_tail`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pose_plugin.beacon.layout import RAW, Pass
from pose_plugin.beacon.view import IntervalView, KeysValues, PlainCache, join
from pose_plugin.utils.errors import PoSEError


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
        """Writes the stream to a safetensors file; see `persist.save`."""
        from pose_plugin.beacon import persist

        persist.save(self, path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> BeaconCache:
        """Reads what `save` wrote; see `persist.load`."""
        from pose_plugin.beacon import persist

        return persist.load(path, device)

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
