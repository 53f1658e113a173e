"""Plan an Activation Beacon run: how its longest text is read, and what the window holds at its end.

A text is read in intervals of l tokens; each is condensed to l/α beacons at ratio α (Zhang et al., arXiv 2401.03462).
torch and PEFT are imported only when a plan is made, because the run's own checks need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class BeaconPlan:
    """Lengths in tokens.

    Attributes:
        window, interval, layout, mask: as the run resolves them.
        ratios, train_ratio: the candidates, and how training chooses among them.
        text: the longest text of the training.
        intervals, raw: how many of its intervals are condensed, and how many tokens stay raw at its end.
        fewest, most: beacons at its end with the largest and the smallest ratio that fits; None if none fits.
        ratio: how texts are read after training, `adapt` or a fixed ratio.
        reading: the ratio that a text of this length is then read with; 0 if it is read raw, as by the base; None if no
            ratio is large enough.
        readable: the longest text that can be read; with `adapt`, `headroom` more tokens fit behind it.
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
    ratio: int | str
    reading: int | None
    readable: int
    headroom: int
    refused: str | None = None


def plan_beacon(cfg: Mapping[str, Any], config: Any, text: int) -> BeaconPlan | None:
    """Work out how texts are read.

    Args:
        cfg: the values of the YAML, with `adapter: beacon`.
        config: the base's transformers config, with the stretched RoPE if there is one.
        text: tokens of the longest text.

    Returns:
        the plan, or None if PEFT is missing.

    Raises:
        PoSEError: the run would refuse the block, or the base's window.
    """
    try:
        from pose_plugin.beacon.checks import resolve_window
        from pose_plugin.frameworks.axolotl_beacon import beacon_config
    except ImportError:
        return None
    from pose_plugin.beacon.ratios import ADAPT, adapt, intervals

    settings = beacon_config(cfg.get("beacon"))
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    try:
        window = resolve_window(settings, config, SimpleNamespace(rope_type=kind, config=config))
    except PoSEError as error:
        raise PoSEError(f"beacon.{error}") from error
    _require_keys_and_values(settings.target_modules)
    sizes = settings.sizes(window)
    condensed, last = intervals(text, settings.interval)
    fewest = most = refused = reading = None
    try:
        fewest, most = _beacons(settings, sizes, condensed, last, text)
    except PoSEError as error:
        refused = str(error)
    adaptive = settings.ratio == ADAPT
    usable, headroom = (settings.ratios, settings.headroom) if adaptive else ([int(settings.ratio)], 0)
    if (adaptive and sizes.holds_raw(text + headroom)) or not (condensed or sizes.interleaved):
        reading = 0
    else:
        with suppress(PoSEError):  # no ratio is large enough
            reading = adapt(sizes, text, usable, headroom)
    return BeaconPlan(
        window=window,
        interval=settings.interval,
        layout=settings.layout,
        mask=settings.mask,
        ratios=list(settings.ratios),
        train_ratio=settings.train_ratio,
        text=text,
        intervals=condensed,
        raw=last + (settings.sinks + settings.overlap if condensed else 0),
        fewest=fewest,
        most=most,
        ratio=settings.ratio,
        reading=reading,
        readable=sizes.capacity(max(usable)) - headroom,
        headroom=headroom,
        refused=refused,
    )


def _require_keys_and_values(targets: Any) -> None:
    """Raise as the run does once the model is loaded: beacons need their own keys and values."""
    if not isinstance(targets, set) or any("qkv" in name or "kv_" in name for name in targets):
        return
    missing = sorted({"k_proj", "v_proj"} - targets)
    if missing:
        raise PoSEError(
            f"beacon.target_modules={sorted(targets)}: beacons need their own keys and values; add "
            f"{' and '.join(missing)}"
        )


def _beacons(settings: Any, sizes: Any, condensed: int, last: int, text: int) -> tuple[int, int]:
    """Return bounds of the beacons in the window at the end of the longest text.

    Raises:
        PoSEError: not even the largest ratio fits, as in the run.
    """
    from pose_plugin.beacon.ratios import INSTANCE, RANDOM, draw, fits, plan

    if settings.train_ratio not in (RANDOM, INSTANCE):
        chosen = plan(sizes, settings.train_ratio, text, candidates=settings.ratios, headroom=settings.headroom)
        held = sum(map(sizes.beacons, chosen[:condensed]))
        return held, held
    # The interleaved layout needs a ratio for the open interval too.
    count = condensed + sizes.interleaved
    ratios = [ratio for ratio in settings.ratios if fits(sizes, [ratio] * count, last)]
    if not ratios:
        draw(sizes, count, last, settings.ratios, np.random.default_rng(0))  # raises the run's error
    fewest = condensed * sizes.beacons(max(settings.ratios))
    if settings.train_ratio == INSTANCE:
        return fewest, condensed * sizes.beacons(min(ratios))
    # Mixed ratios can fill the window up to the raw tokens.
    raw = last + sizes.sinks + sizes.overlap
    return fewest, min(condensed * sizes.beacons(min(settings.ratios)), sizes.size - raw)
