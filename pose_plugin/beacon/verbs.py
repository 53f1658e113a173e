"""The words that users of KV-compression libraries know, and how to find the tuner in a wrapped model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pose_plugin.beacon.model import BeaconModel
from pose_plugin.beacon.ratios import ADAPT, check_ratio, from_compression
from pose_plugin.utils.errors import PoSEError


@contextmanager
def condensing(model: Any, ratio: int | str | None = None, compression_ratio: float | None = None) -> Iterator[Any]:
    """All reading in this block condenses at one ratio.

    Args:
        model: a PEFT model with a Beacon adapter.
        ratio: α, raw tokens a beacon, or "adapt".
        compression_ratio: instead, the share of the cache that is removed, as kvpress counts: 0.875 ≙ ratio 8.

    Example:
        with condensing(model, ratio=8):
            answer = model.generate(ids, max_new_tokens=32)

    Raises:
        PoSEError: no Beacon adapter, or no such ratio.
    """
    tuner = find_tuner(model)
    if (ratio is None) == (compression_ratio is None):
        raise PoSEError("condensing: give either ratio (e.g. 8) or compression_ratio (e.g. 0.875)")
    if compression_ratio is not None:
        ratio = from_compression(compression_ratio)
    if ratio != ADAPT:
        ratio = check_ratio(ratio, tuner.active_config.interval)
    before = tuner._ratio_override
    tuner._ratio_override = ratio
    try:
        yield model
    finally:
        tuner._ratio_override = before


def find_tuner(model: Any) -> Any:
    """The BeaconModel of a PEFT model (wrapped by accelerate, DDP or a trainer, too).

    Raises:
        PoSEError: there is none.
    """
    seen = model
    for _ in range(8):
        if isinstance(seen, BeaconModel):
            return seen
        following = next((getattr(seen, key) for key in ("module", "_orig_mod", "base_model") if _has(seen, key)), None)
        if following is None or following is seen:
            break
        seen = following
    raise PoSEError(
        f"model: {type(model).__name__} has no Beacon adapter; make one with get_peft_model(model, BeaconConfig(…))"
    )


def _has(module: Any, key: str) -> bool:
    return key in getattr(module, "_modules", {}) or key in getattr(module, "__dict__", {})
