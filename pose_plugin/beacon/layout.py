"""Rows, positions and masks of one pass over an interval, or a part of one: pure tables, no model.

A *pass* is one forward of the base model. Its keys are memory (m beacons), then the overlap (the last raw rows of the
interval before, if wanted), then the rows of this interval that earlier passes cached (the tail), then the rows of the
pass itself. There are two layouts:

- appended (arXiv 2401.03462, §2.2, Figure 3): n raw tokens, then k beacons.
- interleaved (arXiv 2401.03462, v2 and later): one beacon after every α raw tokens, under a plain causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

STEPWISE = "stepwise"
SEGMENTATION = "segmentation"
FULL = "full"
MASKS = (STEPWISE, SEGMENTATION, FULL)

RAW = -1


@dataclass(frozen=True)
class Scheme:
    """Where beacons are and what they see: the same for every pass of a stream.

    Args:
        interval: l, raw tokens that are condensed together.
        mask: "stepwise", "segmentation" or "full"; it has no effect in the interleaved layout.
        interleaved: whether beacons are between the raw tokens instead of behind them.
        attend_previous: whether beacons see the memory and the overlap.
        overlap: t, last raw tokens of each condensed interval that the next one sees too.
        sinks: first raw tokens of the text that stay in memory, before all beacons.
    """

    interval: int
    mask: str = STEPWISE
    interleaved: bool = False
    attend_previous: bool = True
    overlap: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class Pass:
    """The rows that one forward of the model reads.

    Args:
        memory: m, sinks and beacons of earlier intervals, at positions 0…m−1.
        tail: kind of each cached row of this interval: RAW, or a beacon's number 1…k.
        rows: kind of each row of this pass.
        scheme: see `Scheme`.
        ratio: α; 0 if the pass reads no beacon.
        closing: whether this pass completes the interval. Its beacons then go to memory, and all but the overlap of the
            next interval is dropped.
        overlap: raw rows of the interval before, at positions m…m+t−1; none before the first interval.
    """

    memory: int
    tail: tuple[int, ...]
    rows: tuple[int, ...]
    scheme: Scheme
    ratio: int = 0
    closing: bool = False
    overlap: int = 0

    @property
    def start(self) -> int:
        """Window position of the interval's first row: the rows before it, memory and overlap."""
        return self.memory + self.overlap

    @property
    def sinks(self) -> int:
        """Raw rows of this interval that stay in memory when it closes: the first ones of the text."""
        return 0 if self.memory else self.scheme.sinks

    @cached_property
    def raw(self) -> int:
        """n, raw tokens of this pass."""
        return self.rows.count(RAW)

    @cached_property
    def beacons(self) -> int:
        """Beacons of this pass."""
        return len(self.rows) - self.raw

    @cached_property
    def order(self) -> list[int] | None:
        """Index of each row in (raw rows, then beacon rows); None if the rows are in that order already."""
        if not self.scheme.interleaved or not self.beacons:
            return None
        raw, beacon, result = 0, self.raw, []
        for row in self.rows:
            result.append(raw if row == RAW else beacon)
            raw, beacon = raw + (row == RAW), beacon + (row != RAW)
        return result

    @property
    def plain(self) -> bool:
        """Whether the ordinary causal mask over the cached rows is the right one."""
        return self.scheme.interleaved or not self.beacons


def lay_out(
    memory: int,
    tail: tuple[int, ...],
    tokens: int,
    scheme: Scheme,
    ratio: int = 0,
    closing: bool = False,
    overlap: int = 0,
) -> Pass:
    """Return the pass that reads `tokens` more raw tokens of an interval and, if it closes, all missing beacons.

    In the interleaved layout a beacon is read together with the token that follows its α tokens. What a token sees
    then does not depend on where the input was cut.
    """
    if not scheme.interleaved:
        beacons = tuple(range(1, scheme.interval // ratio + 1)) if closing else ()
        return Pass(memory, tail, (RAW,) * tokens + beacons, scheme, ratio, closing, overlap)
    seen = tail.count(RAW)
    done = len(tail) - seen  # beacons of this interval that are cached
    rows: list[int] = []
    for index in range(seen, seen + tokens):
        if index and index % ratio == 0 and index // ratio > done:
            done = index // ratio
            rows.append(done)
        rows.append(RAW)
    if closing and done < scheme.interval // ratio:
        rows.append(scheme.interval // ratio)
    return Pass(memory, tail, tuple(rows), scheme, ratio, closing, overlap)


def positions(given: Pass) -> list[int]:
    """Return the window position of each row of a pass.

    With s = m + t, raw token i is at s + i. Beacon b is at s + b·α, the position of the raw token after the last one it
    sees; with full coverage it is at s + l. Interleaved rows are numbered consecutively.
    """
    if given.scheme.interleaved:
        start = given.start + len(given.tail)
        return list(range(start, start + len(given.rows)))
    raw = given.tail.count(RAW)
    result = []
    for row in given.rows:
        if row == RAW:
            result.append(given.start + raw)
            raw += 1
        else:
            result.append(_beacon_position(given, row))
    return result


def _beacon_position(given: Pass, number: int) -> int:
    # Appended layout: the last token that beacon b sees is b·α − 1, or l − 1 with full coverage.
    return given.start + (given.scheme.interval if given.scheme.mask == FULL else number * given.ratio)


def visible(given: Pass, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return which keys each row sees: bool, (rows, memory + overlap + tail + rows), True if the key is seen.

    A raw token sees memory, overlap and the raw tokens up to itself, never a beacon of its own interval. A beacon sees
    memory, overlap, the raw tokens of its span, and no beacon but itself. In the interleaved layout the mask is causal.
    """
    start, tail, rows = given.start, len(given.tail), len(given.rows)
    if given.scheme.interleaved:
        query = torch.arange(rows, device=device)[:, None] + start + tail
        return torch.arange(start + tail + rows, device=device)[None] <= query
    seen = _seen_in_interval(given.tail, given.rows, given.scheme, given.ratio, str(device))
    before = torch.ones((rows, start), dtype=torch.bool, device=device)
    if not given.scheme.attend_previous:
        before &= torch.tensor([row == RAW for row in given.rows], device=device)[:, None]
    return torch.cat([before, seen], dim=1)


# All full intervals of a text with one ratio share it.
@lru_cache(maxsize=8)
def _seen_in_interval(
    tail: tuple[int, ...], rows: tuple[int, ...], scheme: Scheme, ratio: int, device: str
) -> torch.Tensor:
    """Return which keys of the same interval each row sees, in the appended layout: (rows, tail + rows)."""
    kinds = torch.tensor(tail + rows, device=device)
    raw_index = torch.cumsum((kinds == RAW).int(), 0) - 1  # of a raw key: which token of the interval it is
    row_kind = kinds[len(tail) :, None]
    is_raw = row_kind == RAW
    own = raw_index[len(tail) :, None]
    # The span [low, high) of raw tokens that each row sees.
    if scheme.mask == STEPWISE:
        low, high = torch.zeros_like(row_kind), row_kind * ratio
    elif scheme.mask == SEGMENTATION:
        low, high = (row_kind - 1) * ratio, row_kind * ratio
    else:
        low, high = torch.zeros_like(row_kind), torch.full_like(row_kind, scheme.interval)
    low = torch.where(is_raw, 0, low)
    high = torch.where(is_raw, own + 1, high)
    key = raw_index[None]
    seen = (kinds[None] == RAW) & (key >= low) & (key < high)
    return seen | ((kinds[None] == row_kind) & ~is_raw)  # a beacon sees itself


def moves(given: Pass) -> tuple[list[int], list[int]]:
    """Return (index in tail + rows, shift) of each row of a closing pass that goes to memory: sinks, then beacons.

    Memory is always at 0…m−1, so with s sinks beacon b moves to slot m + s + b − 1. The shift is new − old position.
    """
    kinds = given.tail + given.rows
    raw = [at for at, kind in enumerate(kinds) if kind == RAW]
    beacons = [at for at, kind in enumerate(kinds) if kind != RAW]
    index = raw[: given.sinks] + beacons
    if given.scheme.interleaved:
        old = [given.start + at for at in index]
    else:
        old = [*range(given.sinks), *(_beacon_position(given, kinds[at]) for at in beacons)]
    return index, [given.memory + slot - place for slot, place in enumerate(old)]


def overlapping(given: Pass) -> tuple[list[int], list[int]]:
    """Return (index in tail + rows, shift) of the raw rows of a closing pass that the next interval sees.

    They are the last t, and move to the positions behind the memory, which then includes this interval's beacons.
    """
    raw = [at for at, kind in enumerate(given.tail + given.rows) if kind == RAW]
    memory = given.memory + given.sinks + len(given.tail) + len(given.rows) - len(raw)
    first = len(raw) - given.scheme.overlap
    # Beacons take positions of their own only in the interleaved layout.
    old = raw if given.scheme.interleaved else range(len(raw))
    return raw[first:], [memory + at - first - given.start - old[at] for at in range(first, len(raw))]
