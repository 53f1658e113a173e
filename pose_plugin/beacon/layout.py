"""Rows, positions and masks of one pass over (a part of) an interval: pure tables, no model.

Keys are memory (m) ⊕ rows of this interval that earlier passes left (tail) ⊕ rows of this pass. Appended layout
(arXiv 2401.03462, §2.2, Figure 3): n raw tokens, then k beacons. Interleaved layout (arXiv 2401.03462 v2 and later):
a beacon after each α raw tokens, plain causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

STEPWISE = "stepwise"
SEGMENTATION = "segmentation"
FULL = "full"
MASKS = (STEPWISE, SEGMENTATION, FULL)

RAW = -1


@dataclass(frozen=True)
class Pass:
    """What one forward of the model reads.

    Args:
        memory: m, beacons of earlier intervals; they stand at positions 0…m−1.
        tail: for each row of this interval that is cached already, RAW or the beacon's number 1…k.
        rows: the same for the rows of this pass.
        interval: l.
        ratio: α; 0 where no beacon is read.
        mask: "stepwise", "segmentation" or "full"; of no effect in the interleaved layout.
        interleaved: beacons between the raw tokens rather than behind them.
        attend_previous: whether beacons see the memory.
        closing: the interval is complete after this pass: its beacons go to memory and the rest is dropped.
    """

    memory: int
    tail: tuple[int, ...]
    rows: tuple[int, ...]
    interval: int
    ratio: int = 0
    mask: str = STEPWISE
    interleaved: bool = False
    attend_previous: bool = True
    closing: bool = False

    @cached_property
    def raw(self) -> int:
        """n, raw tokens of this pass."""
        return sum(row == RAW for row in self.rows)

    @cached_property
    def beacons(self) -> int:
        """Beacons of this pass."""
        return len(self.rows) - self.raw

    @cached_property
    def order(self) -> list[int] | None:
        """Where each row is among (raw rows, then beacon rows); None where rows stand like that already."""
        if not self.interleaved or not self.beacons:
            return None
        raw, beacon, result = 0, self.raw, []
        for row in self.rows:
            result.append(raw if row == RAW else beacon)
            raw, beacon = raw + (row == RAW), beacon + (row != RAW)
        return result

    @property
    def plain(self) -> bool:
        """Whether the ordinary causal mask over the cached rows is the right one."""
        return self.interleaved or not self.beacons


def lay_out(
    memory: int,
    tail: tuple[int, ...],
    tokens: int,
    interval: int,
    ratio: int = 0,
    closing: bool = False,
    mask: str = STEPWISE,
    interleaved: bool = False,
    attend_previous: bool = True,
) -> Pass:
    """The pass that reads `tokens` more raw tokens of an interval and, where it closes, all beacons it still needs.

    Interleaved, a beacon is read when a token follows the α that it stands for, so what a token sees does not depend
    on where the input was cut.
    """
    if not interleaved:
        beacons = tuple(range(1, interval // ratio + 1)) if closing else ()
        rows = (RAW,) * tokens + beacons
    else:
        seen = sum(row == RAW for row in tail)
        listed: list[int] = []
        done = len(tail) - seen
        for index in range(seen, seen + tokens):
            if index and index % ratio == 0 and index // ratio > done:
                done = index // ratio
                listed.append(done)
            listed.append(RAW)
        if closing and done < interval // ratio:
            listed.append(interval // ratio)
        rows = tuple(listed)
    return Pass(memory, tail, rows, interval, ratio, mask, interleaved, attend_previous, closing)


def positions(given: Pass) -> list[int]:
    """Window positions of the rows of a pass.

    Raw token i → m + i. Beacon b → m + b·α (it shares the index of the raw token behind what it has seen); m + l for
    full coverage. Interleaved: rows are counted through.
    """
    if given.interleaved:
        start = given.memory + len(given.tail)
        return list(range(start, start + len(given.rows)))
    raw = sum(row == RAW for row in given.tail)
    result = []
    for row in given.rows:
        if row == RAW:
            result.append(given.memory + raw)
            raw += 1
        else:
            result.append(given.memory + (given.interval if given.mask == FULL else row * given.ratio))
    return result


def visible(given: Pass, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which key each row sees: bool, (rows, memory + tail + rows), True where it is seen.

    A raw token sees all memory and the raw tokens up to itself, never a beacon of its own interval. A beacon sees
    memory, the raw tokens of its span, and of the beacons only itself. Interleaved: everything before itself.
    """
    m, tail, rows = given.memory, len(given.tail), len(given.rows)
    if given.interleaved:
        query = torch.arange(rows, device=device)[:, None] + m + tail
        return torch.arange(m + tail + rows, device=device)[None] <= query
    kinds = torch.tensor(given.tail + given.rows, device=device)
    raw_index = torch.cumsum((kinds == RAW).int(), 0) - 1  # of a raw key: which token of the interval it is
    row_kind = kinds[tail:, None]
    is_raw = row_kind == RAW
    own = raw_index[tail:, None]
    if given.mask == STEPWISE:
        low, high = torch.zeros_like(row_kind), row_kind * given.ratio
    elif given.mask == SEGMENTATION:
        low, high = (row_kind - 1) * given.ratio, row_kind * given.ratio
    else:
        low, high = torch.zeros_like(row_kind), torch.full_like(row_kind, given.interval)
    low = torch.where(is_raw, 0, low)
    high = torch.where(is_raw, own + 1, high)
    key = raw_index[None]
    seen = (kinds[None] == RAW) & (key >= low) & (key < high)
    seen |= (kinds[None] == row_kind) & ~is_raw
    before = (is_raw | given.attend_previous).expand(rows, m)
    return torch.cat([before, seen], dim=1)


def moves(given: Pass) -> tuple[list[int], list[int]]:
    """(index among tail ⊕ rows, shift) of each beacon of a closing pass.

    Memory is always 0…m−1, so beacon b goes to slot m + b − 1; the shift is new − old position.
    """
    kinds = given.tail + given.rows
    index = [at for at, kind in enumerate(kinds) if kind != RAW]
    shifts = []
    for at in index:
        number = kinds[at]
        if given.interleaved:
            old = given.memory + at
        else:
            old = given.memory + (given.interval if given.mask == FULL else number * given.ratio)
        shifts.append(given.memory + number - 1 - old)
    return index, shifts
