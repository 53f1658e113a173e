"""How many tokens a beacon stands for, and whether what is condensed still fits the window.

Symbols: L window, l interval, α ratio, k = l/α beacons of an interval, m beacons already in memory.
Source: Zhang et al., Soaring from 4K to 400K, arXiv 2401.03462, §2.4 (ratios drawn per interval) and Figure 1 (128
reaches 400K in a window of 4K).
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
class Window:
    """The sizes that decide what fits.

    Args:
        size: L, the positions that the model knows.
        interval: l, raw tokens that are condensed together.
        interleaved: whether beacons stand between the raw tokens and so take positions of their own.
    """

    size: int
    interval: int
    interleaved: bool = False

    def beacons(self, ratio: int) -> int:
        """k, the beacons of a full interval."""
        return self.interval // ratio

    def can_condense(self, memory: int, ratio: int) -> bool:
        """Whether a full interval behind `memory` beacons fits together with its own beacons.

        Appended: the last beacon stands at position m + l, so m + l ≤ L − 1. Interleaved: m + l + k rows.
        """
        if self.interleaved:
            return memory + self.interval + self.beacons(ratio) <= self.size
        return memory + self.interval <= self.size - 1

    def can_end(self, memory: int, tokens: int, ratio: int | None) -> bool:
        """Whether a last interval of `tokens` raw tokens fits behind `memory` beacons: m + n ≤ L."""
        between = (tokens - 1) // ratio if self.interleaved and ratio and tokens else 0
        return memory + tokens + between <= self.size

    def capacity(self, ratio: int, memory: int = 0) -> int:
        """Tokens that a stream at one ratio can hold: (L − l − m)·α + l."""
        own = self.beacons(ratio) if self.interleaved else 0
        return max(0, self.size - self.interval - own - memory) * ratio + self.interval


def intervals(tokens: int, interval: int, pending: int = 0) -> tuple[int, int]:
    """(intervals that are condensed, tokens of the last one) when `tokens` follow `pending` uncondensed ones.

    An interval is condensed once a token stands behind it, so 2·l tokens condense one interval, not two.
    """
    total = tokens + pending
    if total == 0:
        return 0, 0
    condensed = (total - 1) // interval
    return condensed, total - condensed * interval


def fits(window: Window, ratios: Sequence[int], last: int, memory: int = 0) -> bool:
    """Whether a stream with these ratios, one for each condensed interval, stays in the window until its end.

    Args:
        window: the sizes.
        ratios: one for each condensed interval; interleaved streams give one more, for the open interval.
        last: raw tokens of the open interval at the end.
        memory: beacons in memory before it begins.
    """
    closing = list(ratios)
    open_ratio = closing.pop() if window.interleaved else None
    for ratio in closing:
        if not window.can_condense(memory, ratio):
            return False
        memory += window.beacons(ratio)
    return window.can_end(memory, last, open_ratio)


def adapt(
    window: Window,
    tokens: int,
    candidates: Sequence[int] = CANDIDATES,
    headroom: int = 1024,
    memory: int = 0,
    at_least: int = 1,
    begun: bool = False,
) -> int:
    """The smallest ratio with (L − l − m)·α + l ≥ tokens + headroom.

    Headroom is a promise at the beginning of a stream. A stream that has begun uses it up: where no ratio keeps it
    free, the smallest that fits is taken.

    Args:
        window: the sizes.
        tokens: uncondensed tokens of the stream, those that wait and those that come.
        candidates: ratios to choose from.
        headroom: tokens that are still to be generated.
        memory: m, beacons that are there already.
        at_least: smaller ratios are passed over, so that a stream does not return to a finer one.
        begun: whether the stream has condensed anything.

    Raises:
        PoSEError: no candidate is enough.
    """
    condensed, last = intervals(tokens, window.interval)
    usable = sorted(candidate for candidate in candidates if candidate >= at_least) or [max(candidates)]
    for free in (headroom, 0) if begun else (headroom,):
        for ratio in usable:
            if window.capacity(ratio, memory) < tokens + free:
                continue
            if fits(window, [ratio] * (condensed + window.interleaved), last, memory):
                return ratio
    most = max(candidates)
    raise PoSEError(
        f"ratio: adapt finds no condensing ratio for {tokens} tokens + {headroom} of headroom behind {memory} beacons: "
        f"the largest candidate, {most}, holds {window.capacity(most, memory)} in window {window.size} with interval "
        f"{window.interval}. Give larger ratios, a smaller headroom, a larger window, or a shorter text."
    )


def generator(seed: int, step: int, sample: int) -> np.random.Generator:
    """The private source of training ratios: the same on every rank and after a resume; no global state."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step, sample])))


def draw(
    window: Window,
    count: int,
    last: int,
    candidates: Sequence[int],
    rng: np.random.Generator,
    memory: int = 0,
    same: bool = False,
) -> list[int]:
    """Ratios for `count` intervals, each uniform among the candidates after which the rest can still fit.

    Args:
        window: the sizes.
        count: intervals that need a ratio; interleaved streams count the open one too.
        last: raw tokens of the last, open interval.
        candidates: ratios to draw from.
        rng: see `generator`.
        memory: beacons in memory before.
        same: one ratio for all intervals (the paper's "instance-wise" ablation).

    Raises:
        PoSEError: not even the largest ratio throughout fits.
    """
    largest = max(candidates)
    if not fits(window, [largest] * count, last, memory):
        raise PoSEError(
            f"training text too long: {count} intervals of {window.interval} tokens do not fit window {window.size} "
            f"even at the largest ratio, {largest} (beacons in memory before: {memory}). Cut the texts, or give larger "
            "ratios or a larger window"
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
    """A whole number ≥ 2 that divides the interval.

    Raises:
        PoSEError: anything else.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio < 2 or interval % int(ratio):
        raise PoSEError(
            f"{key}: {ratio!r} must be a whole number ≥ 2 that divides the interval of {interval} tokens, e.g. "
            f"{', '.join(str(c) for c in CANDIDATES if interval % c == 0) or 'a divisor of it'}"
        )
    return int(ratio)


def from_compression(share: float) -> int:
    """The ratio α that removes `share` of the cache: α = 1/(1 − share), so 0.875 ≙ 8.

    Raises:
        PoSEError: the share is not that of a whole ratio.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise PoSEError(
            f"compression_ratio: {share!r} must lie between 0 and 1, the share of the cache that is removed"
        )
    ratio = round(1 / (1 - share))
    if abs(1 - 1 / ratio - share) > 1e-6:
        raise PoSEError(
            f"compression_ratio: {share} is no whole condensing ratio; the nearest is {1 - 1 / ratio} (ratio {ratio})"
        )
    return ratio


def plan(
    window: Window,
    policy: Ratio | Sequence[int],
    tokens: int,
    *,
    pending: int = 0,
    open_ratio: int | None = None,
    memory: int = 0,
    candidates: Sequence[int] = CANDIDATES,
    headroom: int = 1024,
    at_least: int = 1,
    rng: Callable[[], np.random.Generator] | None = None,
) -> list[int]:
    """The ratios of one call: one for each interval that it condenses and, interleaved, one for the open interval.

    Args:
        window: the sizes.
        policy: "adapt", "random", "instance", a fixed ratio, or a list with one ratio for each interval.
        tokens: new tokens of the call.
        pending: raw tokens of the open interval, seen by earlier calls.
        open_ratio: the ratio that an interleaved open interval has begun with.
        memory: beacons in memory.
        candidates: what "adapt" and "random" choose from.
        headroom: see `adapt`.
        at_least: see `adapt`.
        rng: makes the generator of "random" and "instance".

    Raises:
        PoSEError: it does not fit, the list has another length, or no generator is given for a draw.
    """
    condensed, last = intervals(tokens, window.interval, pending)
    begun = window.interleaved and pending > 0 and open_ratio is not None
    count = condensed + window.interleaved - begun
    head: list[int] = [int(open_ratio)] if begun and open_ratio is not None else []
    if count == 0:
        chosen: list[int] = []
    elif isinstance(policy, str) and policy == ADAPT:
        if condensed:
            ratio = adapt(window, tokens + pending, candidates, headroom, memory, at_least, begun=memory > 0)
        else:  # an interleaved text that ends in its first interval
            ratio = max(min(candidates), at_least)
        chosen = [ratio] * count
    elif isinstance(policy, str):
        if policy not in TRAINING_POLICIES:
            raise PoSEError(
                f"ratio: {policy!r} is not known; give 'adapt' or a whole number ≥ 2 that divides the interval of "
                f"{window.interval}"
            )
        if rng is None:
            raise PoSEError(f"ratio: {policy!r} draws ratios and is for training; use 'adapt' or a number here")
        behind = memory + (window.beacons(head[0]) if head and condensed else 0)
        chosen = draw(window, count, last, candidates, rng(), behind, same=policy == INSTANCE)
    elif not isinstance(policy, list | tuple):
        chosen = [check_ratio(policy, window.interval)] * count
    else:
        chosen = [check_ratio(ratio, window.interval, f"ratios[{index}]") for index, ratio in enumerate(policy)]
        if len(chosen) != count:
            raise PoSEError(
                f"ratios: {len(chosen)} given, but {tokens} tokens behind {pending} waiting ones need {count}, one for "
                f"each interval of {window.interval} tokens that is {'begun' if window.interleaved else 'condensed'}; "
                "the last interval stays raw until a token follows it"
            )
    ratios = head + chosen
    _check_fit(window, ratios, last, memory)
    return ratios


def _check_fit(window: Window, ratios: list[int], last: int, memory: int) -> None:
    if fits(window, ratios if ratios or not window.interleaved else [window.interval], last, memory):
        return
    closing = ratios[: len(ratios) - 1] if window.interleaved else ratios
    total = memory + sum(window.beacons(ratio) for ratio in closing)
    raise PoSEError(
        f"window: {window.size} positions are full: {total} beacons (ratios {_short(closing)}) and {last} raw tokens "
        f"with interval {window.interval} do not fit. Use a larger ratio from the start (ratio='adapt' chooses by "
        "length, headroom keeps room for what is generated), a larger window, or a new cache."
    )


def _short(ratios: Sequence[int]) -> str:
    return str(list(ratios)) if len(ratios) <= 8 else f"[{', '.join(map(str, ratios[:4]))}, … {len(ratios)} in all]"
