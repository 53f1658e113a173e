"""What an Activation Beacon run will do: how its longest text is read, and what is held in the window at its end.

Symbols as in beacon/ratios.py: L window, l interval, α ratio, k = l/α beacons of an interval, m beacons in memory.
Source: Zhang et al., arXiv 2401.03462. torch and PEFT are imported when a plan is made, for the run's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from pose_plugin.utils.errors import PoSEError

# Intervals × window, beyond which no draw is followed.
_MANY = 2**26


@dataclass(frozen=True)
class BeaconPlan:
    """Lengths in tokens.

    Attributes:
        window, interval, layout, mask: L, l, and how beacons stand and see.
        ratios, train_ratio: the candidates, and how training chooses among them.
        text: the longest text of the training.
        intervals, raw: how many of its intervals are condensed, and what stays raw at its end.
        fewest, most: beacons that are held at its end, by the ratios that are drawn; None where it does not fit.
        farthest: the last position that any of these reaches; the window ends at L - 1.
        ratio: how texts are read, `adapt` or a fixed ratio.
        reading: the ratio that a text of this length is read with; None where none is enough.
        readable: the longest text that can be read; by `adapt`, with room for `headroom` tokens more.
        refused: why the longest text does not fit, in the words of the run.
    """

    window: int
    interval: int
    layout: str
    mask: str
    ratios: list[int]
    train_ratio: int | str
    text: int
    intervals: int
    raw: int
    fewest: int | None
    most: int | None
    farthest: int | None
    ratio: int | str
    reading: int | None
    readable: int
    headroom: int
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_beacon(cfg: Mapping[str, Any], config: Any, text: int) -> BeaconPlan | None:
    """Works out how texts are read.

    Args:
        cfg: the values of the YAML, with `adapter: beacon`.
        config: the base's config as transformers makes it, with the stretched RoPE where there is one.
        text: tokens of the longest text.

    Returns:
        the plan; None where PEFT is missing.

    Raises:
        PoSEError: the block, or the window, as the run refuses them.
    """
    try:
        from pose_plugin.beacon.checks import resolve_window
        from pose_plugin.frameworks.axolotl_beacon import beacon_config
    except ImportError:
        return None
    from pose_plugin.beacon.ratios import ADAPT, adapt, draw, fits, intervals, plan

    settings = beacon_config(cfg.get("beacon"))
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    try:
        window = resolve_window(settings, config, SimpleNamespace(rope_type=kind, config=config))
    except PoSEError as error:
        raise PoSEError(f"beacon.{error}") from error
    if isinstance(settings.target_modules, set) and not _fused(settings.target_modules):
        missing = sorted({"k_proj", "v_proj"} - settings.target_modules)
        if missing:
            raise PoSEError(
                f"beacon.target_modules={sorted(settings.target_modules)}: beacons need keys and values of their own; "
                f"add {' and '.join(missing)}"
            )
    sizes = settings.sizes(window)
    condensed, raw = intervals(text, settings.interval)
    most_ratio = max(settings.ratios)
    refused: str | None = None
    reading: int | None = None
    fewest: int | None = None
    most: int | None = None
    farthest: int | None = None
    try:
        if isinstance(settings.train_ratio, str) and settings.train_ratio != ADAPT:
            count = condensed + settings.interleaved
            if not fits(sizes, [most_ratio] * count, raw):
                draw(sizes, count, raw, settings.ratios, np.random.default_rng(0))  # raises as in the run
            streams = _of_one_ratio if settings.train_ratio == "instance" else _of_any_ratios
            fewest, most, farthest = streams(sizes, condensed, raw, settings.ratios)
        else:
            chosen = plan(sizes, settings.train_ratio, text, candidates=settings.ratios, headroom=settings.headroom)
            fewest, most, farthest = _of_one_ratio(sizes, condensed, raw, chosen[:1] or [most_ratio])
    except PoSEError as error:
        refused = str(error)
    if settings.ratio == ADAPT:
        usable, headroom = settings.ratios, settings.headroom
    else:
        usable, headroom = [int(settings.ratio)], 0
    with suppress(PoSEError):
        reading = adapt(sizes, text, usable, headroom) if condensed else None
    return BeaconPlan(
        window=window, interval=settings.interval, layout=settings.layout, mask=settings.mask,
        ratios=list(settings.ratios), train_ratio=settings.train_ratio, text=text, intervals=condensed, raw=raw,
        fewest=fewest, most=most, farthest=farthest, ratio=settings.ratio, reading=reading,
        readable=sizes.capacity(max(usable)) - headroom, headroom=headroom, refused=refused,
    )  # fmt: skip


def _fused(names: set[str]) -> bool:
    return any("qkv" in name or "kv_" in name for name in names)


def _of_any_ratios(sizes: Any, condensed: int, raw: int, ratios: Sequence[int]) -> tuple[int, int, int]:
    """(fewest, most) beacons at the end and the farthest position, over all draws that still fit.

    A draw is made so that the rest fits at the largest ratio; so what can be in memory before each interval is a set
    of numbers, which is followed through the text.
    """
    largest = max(ratios)
    if condensed * sizes.size > _MANY:
        # The window is sure to be filled.
        return condensed * sizes.beacons(largest), _room(sizes, 0, raw, largest), sizes.size - 1
    held = np.zeros(sizes.size + 1, dtype=bool)
    held[0] = True
    farthest = -1
    for left in range(condensed, 0, -1):
        room = _room(sizes, left - 1, raw, largest)
        after = np.zeros_like(held)
        for ratio in ratios:
            own = sizes.beacons(ratio)
            # As `Window.can_condense`.
            limit = min(sizes.size - sizes.interval - (own if sizes.interleaved else 1), room - own)
            before = np.flatnonzero(held[: max(limit + 1, 0)])
            after[before + own] = True
            if before.size:
                farthest = max(farthest, _last_of_interval(sizes, int(before[-1]), ratio))
        held = after
    ends = np.flatnonzero(held)
    least = ratios if sizes.interleaved else [largest]
    last = max(
        int(m) + raw + ((raw - 1) // ratio if sizes.interleaved else 0) - 1
        for m in ends
        for ratio in least
        if sizes.can_end(int(m), raw, ratio)
    )
    return int(ends.min()), int(ends.max()), max(farthest, last)


def _room(sizes: Any, left: int, raw: int, largest: int) -> int:
    """The most beacons in memory behind which `left` intervals at the largest ratio and the raw tokens still fit."""
    own = sizes.beacons(largest)
    end = sizes.size - raw - ((raw - 1) // largest if sizes.interleaved else 0)
    if not left:
        return int(end)
    each = sizes.size - sizes.interval - own if sizes.interleaved else sizes.size - 1 - sizes.interval
    return int(min(end - left * own, each - (left - 1) * own))


def _last_of_interval(sizes: Any, memory: int, ratio: int) -> int:
    """Appended: the last beacon stands at m + l. Interleaved: m + l + k rows."""
    return int(memory + sizes.interval + (sizes.beacons(ratio) - 1 if sizes.interleaved else 0))


def _of_one_ratio(sizes: Any, condensed: int, raw: int, ratios: Sequence[int]) -> tuple[int, int, int]:
    """The same where one ratio is kept throughout a text."""
    from pose_plugin.beacon.ratios import fits

    found = []
    for ratio in ratios:
        if not fits(sizes, [ratio] * (condensed + sizes.interleaved), raw):
            continue
        held = condensed * sizes.beacons(ratio)
        last = held + raw + ((raw - 1) // ratio if sizes.interleaved else 0) - 1
        before = _last_of_interval(sizes, held - sizes.beacons(ratio), ratio) if condensed else -1
        found.append((held, max(last, before)))
    return min(h for h, _ in found), max(h for h, _ in found), max(p for _, p in found)
