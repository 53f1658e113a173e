"""Condensing ratios: how many tokens a beacon replaces, and whether the result fits the window.

Symbols: L window, l interval, α ratio, k = l/α beacons per interval, m beacons already in memory.
Source: Zhang et al., Soaring from 4K to 400K, arXiv 2401.03462, §2.4 (ratios drawn per interval) and Figure 1 (ratio
128 reaches 400K tokens in a window of 4K).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pose_plugin.utils.errors import PoSEError

CANDIDATES = (2, 4, 8, 16, 32, 64, 128)
ADAPT = "adapt"
RANDOM = "random"
INSTANCE = "instance"
TRAINING_POLICIES = (RANDOM, INSTANCE, ADAPT)

Ratio = int | str


@dataclass(frozen=True)
class BeaconWindow:
    """The sizes that decide what fits.

    Args:
        size: L, the positions that the model knows.
        interval: l, raw tokens that are condensed together.
        interleaved: whether beacons are between the raw tokens and so take positions as well.
        overlap: t, raw tokens of a condensed interval that stay in the window behind the memory.
        sinks: first raw tokens of a text, which stay in memory.
    """

    size: int
    interval: int
    interleaved: bool = False
    overlap: int = 0
    sinks: int = 0

    def beacons(self, ratio: int) -> int:
        """Return k, the beacons of a full interval."""
        return self.interval // ratio

    def after(self, memory: int, ratio: int) -> int:
        """Return the rows of memory after one more interval; the first one adds the sinks."""
        return (memory or self.sinks) + self.beacons(ratio)

    def can_condense(self, memory: int, ratio: int) -> bool:
        """Return whether a full interval and its beacons fit behind `memory` beacons.

        Appended: the last beacon is at position m + t + l, so m + t + l ≤ L − 1. Interleaved: m + t + l + k rows. There
        is no overlap before the first interval.
        """
        if self.interleaved:
            return self._start(memory) + self.interval + self.beacons(ratio) <= self.size
        return self._start(memory) + self.interval <= self.size - 1

    def can_end(self, memory: int, tokens: int, ratio: int | None) -> bool:
        """Return whether a last interval of `tokens` raw tokens fits behind `memory` beacons: m + t + n ≤ L."""
        between = (tokens - 1) // ratio if self.interleaved and ratio and tokens else 0
        return self._start(memory) + tokens + between <= self.size

    def _start(self, memory: int) -> int:
        return memory + self.overlap if memory else 0

    def holds_raw(self, tokens: int) -> bool:
        """Return whether the model can read `tokens` tokens without condensing any."""
        return tokens <= self.size

    def capacity(self, ratio: int, memory: int = 0) -> int:
        """Return how many tokens fit behind `memory` beacons at one ratio: (L − l − t − m)·α + l, or a few more."""
        condensed = 0
        while self.can_condense(memory, ratio):
            condensed, memory = condensed + 1, self.after(memory, ratio)
        last = next((n for n in range(self.interval, 0, -1) if self.can_end(memory, n, ratio)), 0)
        return condensed * self.interval + last


@dataclass(frozen=True)
class StreamState:
    """How far a stream has been read; the default is an empty stream.

    Args:
        memory: m, sinks and beacons in memory.
        pending: raw tokens of the open interval.
        open_ratio: the ratio that an interleaved open interval has begun with.
        at_least: ratio of the last condensed interval; "adapt" does not return to a smaller one.
    """

    memory: int = 0
    pending: int = 0
    open_ratio: int | None = None
    at_least: int = 1


EMPTY = StreamState()


def intervals(tokens: int, interval: int, pending: int = 0) -> tuple[int, int]:
    """Return (intervals to condense, tokens of the last one) if `tokens` follow `pending` uncondensed ones.

    An interval is condensed only when another token follows it, so 2·l tokens condense one interval, not two.
    """
    total = tokens + pending
    if total == 0:
        return 0, 0
    condensed = (total - 1) // interval
    return condensed, total - condensed * interval


def fits(window: BeaconWindow, ratios: Sequence[int], last: int, memory: int = 0) -> bool:
    """Return whether a stream with these ratios stays in the window until its end.

    Args:
        ratios: one per condensed interval; an interleaved stream has one more, for the open interval.
        last: raw tokens of the open interval at the end.
        memory: beacons in memory before.
    """
    closing = list(ratios)
    open_ratio = closing.pop() if window.interleaved else None
    for ratio in closing:
        if not window.can_condense(memory, ratio):
            return False
        memory = window.after(memory, ratio)
    return window.can_end(memory, last, open_ratio)


def adapt(
    window: BeaconWindow,
    tokens: int,
    candidates: Sequence[int] = CANDIDATES,
    headroom: int = 1024,
    state: StreamState = EMPTY,
) -> int:
    """Return the smallest ratio with a capacity of all uncondensed tokens and the headroom.

    Headroom is reserved at the beginning of a stream, and used up by what follows. So in a stream that has begun, if no
    ratio keeps the headroom free, the largest is returned, with which the stream can go on longest.

    Args:
        headroom: tokens still to be generated.
        state: the stream before; smaller ratios than its last one are not used.

    Raises:
        PoSEError: no candidate fits.
    """
    tokens, memory, at_least = tokens + state.pending, state.memory, state.at_least
    if window.interleaved and state.pending and state.open_ratio is not None and tokens > window.interval:
        # The open interval keeps the ratio that it has begun with; what follows it is still free.
        memory, tokens = window.after(memory, state.open_ratio), tokens - window.interval
        at_least = max(at_least, state.open_ratio)
    usable = sorted(candidate for candidate in candidates if candidate >= at_least) or [max(candidates)]
    for ratio in usable:
        if window.capacity(ratio, memory) >= tokens + headroom:
            return ratio
    # Interleaved, a first interval takes a ratio too, but may never be condensed.
    may_end = state != EMPTY or tokens <= window.interval
    if may_end and window.capacity(usable[-1], memory) >= tokens:
        return usable[-1]
    most = max(candidates)
    raise PoSEError(
        f"ratio: adapt finds no ratio for {tokens} tokens and a headroom of {headroom} after {memory} beacons. The "
        f"largest candidate, {most}, holds {window.capacity(most, memory)} tokens in window {window.size} with "
        f"interval {window.interval}. Use larger ratios, a smaller headroom, a larger window or a shorter text"
    )


def generator(seed: int, step: int, sample: int) -> np.random.Generator:
    """Return the generator of training ratios: the same on every rank and after a resume, with no global state."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step, sample])))


def draw(
    window: BeaconWindow,
    count: int,
    last: int,
    candidates: Sequence[int],
    rng: np.random.Generator,
    memory: int = 0,
    same: bool = False,
) -> list[int]:
    """Draw ratios for `count` intervals, each uniform among the candidates after which the rest can still fit.

    Args:
        count: intervals that need a ratio; an interleaved stream counts the open one too.
        last: raw tokens of the last, open interval.
        memory: beacons in memory before.
        same: draw one ratio for all intervals (the paper's "instance-wise" ablation).

    Raises:
        PoSEError: the text does not fit even at the largest ratio.
    """
    largest = max(candidates)
    if not fits(window, [largest] * count, last, memory):
        raise PoSEError(
            f"training text too long: {count} intervals of {window.interval} tokens do not fit window {window.size} "
            f"after {memory} beacons, even at the largest ratio, {largest}. Shorten the texts, or use larger ratios "
            "or a larger window"
        )
    ratios: list[int] = []
    for index in range(count):
        rest = [largest] * (count - index - 1)
        room = [ratio for ratio in candidates if fits(window, [*ratios, ratio, *rest], last, memory)]
        if same:
            whole = [ratio for ratio in room if fits(window, [ratio] * count, last, memory)]
            return [int(rng.choice(whole))] * count
        ratios.append(int(rng.choice(room)))
    return ratios


def check_ratio(ratio: object, interval: int, key: str = "ratio") -> int:
    """Return the ratio as an int.

    Raises:
        PoSEError: not a whole number ≥ 2 that divides the interval.
    """
    # bool is an int, and 2.0 divides: both would be read silently.
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio < 2 or interval % int(ratio):
        raise PoSEError(
            f"{key}: {ratio!r} must be a whole number ≥ 2 that divides the interval of {interval} tokens, e.g. "
            f"{', '.join(str(c) for c in CANDIDATES if interval % c == 0) or 'a divisor of it'}"
        )
    return int(ratio)


def from_compression(share: float) -> int:
    """Return the ratio α = 1/(1 − share) that removes this share of the cache: 0.875 gives 8.

    Raises:
        PoSEError: no whole ratio removes this share.
    """
    if not 0 < share < 1:
        raise PoSEError(f"compression_ratio: {share} is the share of the cache to remove, between 0 and 1; e.g. 0.875")
    ratio = round(1 / (1 - share))
    if abs(1 - 1 / ratio - share) > 1e-6:
        raise PoSEError(
            f"compression_ratio: {share} gives no whole ratio; the nearest is {1 - 1 / ratio} (ratio {ratio})"
        )
    return ratio


def plan(
    window: BeaconWindow,
    policy: Ratio | Sequence[int],
    tokens: int,
    state: StreamState = EMPTY,
    candidates: Sequence[int] = CANDIDATES,
    headroom: int = 1024,
    rng: Callable[[], np.random.Generator] | None = None,
) -> list[int]:
    """Return the ratios of one call: one per interval that it condenses and, interleaved, one for the open interval.

    Args:
        policy: "adapt", "random", "instance", a fixed ratio, or a list with one ratio per interval.
        candidates: ratios that "adapt", "random" and "instance" choose from.
        rng: makes the generator for "random" and "instance"; None outside training.

    Raises:
        PoSEError: the text does not fit, the list has another length, or the policy draws and `rng` is None.
    """
    condensed, last = intervals(tokens, window.interval, state.pending)
    # An interleaved interval keeps the ratio that it has begun with: its first beacons are cached.
    begun = [state.open_ratio] if window.interleaved and state.pending and state.open_ratio is not None else []
    count = condensed + window.interleaved - len(begun)
    if count == 0:
        chosen: list[int] = []
    elif isinstance(policy, list | tuple):
        chosen = [check_ratio(ratio, window.interval, f"ratios[{index}]") for index, ratio in enumerate(policy)]
        if len(chosen) != count:
            raise PoSEError(
                f"ratios: {len(chosen)} given, but {tokens} tokens after {state.pending} uncondensed ones need "
                f"{count}, one per interval of {window.interval} tokens that is "
                f"{'started' if window.interleaved else 'condensed'}; the last interval stays raw until a token follows"
            )
    elif policy == ADAPT:
        chosen = [adapt(window, tokens, candidates, headroom, state)] * count
    elif isinstance(policy, str):
        memory = window.after(state.memory, begun[0]) if begun and condensed else state.memory
        own = _training_generator(window, policy, rng)
        chosen = draw(window, count, last, candidates, own, memory, same=policy == INSTANCE)
    else:
        chosen = [check_ratio(policy, window.interval)] * count
    _check_fit(window, begun + chosen, last, state.memory)
    return begun + chosen


def _training_generator(
    window: BeaconWindow, policy: str, rng: Callable[[], np.random.Generator] | None
) -> np.random.Generator:
    if policy not in TRAINING_POLICIES:
        raise PoSEError(
            f"ratio: {policy!r} is not known; use 'adapt' or a whole number ≥ 2 that divides the interval of "
            f"{window.interval}"
        )
    if rng is None:
        raise PoSEError(f"ratio: {policy!r} draws ratios, which only training does; use 'adapt' or a number here")
    return rng()


def _check_fit(window: BeaconWindow, ratios: list[int], last: int, memory: int) -> None:
    # An interleaved stream without a ratio is an empty call; the interval as ratio adds no beacon.
    if fits(window, ratios if ratios or not window.interleaved else [window.interval], last, memory):
        return
    closing = ratios[: len(ratios) - 1] if window.interleaved else ratios
    for ratio in closing:
        memory = window.after(memory, ratio)
    raise PoSEError(
        f"window: {window.size} positions are full: {memory} rows of memory (ratios {_short(closing)}) and {last} raw "
        f"tokens with interval {window.interval} do not fit. Use a larger ratio from the start (ratio='adapt' chooses "
        "by length, headroom keeps room for generated tokens), a larger window, or a new cache"
    )


def _short(ratios: Sequence[int]) -> str:
    return str(list(ratios)) if len(ratios) <= 8 else f"[{', '.join(map(str, ratios[:4]))}, … {len(ratios)} in all]"
