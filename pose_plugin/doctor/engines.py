"""What each inference engine takes from a folder: its window, and how its frequencies differ from transformers'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.doctor.folder import Folder
from pose_plugin.export.engines import RULES, EngineStopsError, taken
from pose_plugin.utils.errors import PoSEError

# Relative differences below this are rounding.
_SAME = 1e-4


@dataclass(frozen=True)
class Reading:
    """One engine's reading of a folder.

    Attributes:
        engine: its name and versions.
        window: tokens that it takes by itself; None if it stops with an error.
        rope: its rope in words, and how it differs from the first engine's.
    """

    engine: str
    window: int | None
    rope: str


def readings(folder: Folder) -> list[Reading]:
    """Return what each engine takes from a full model's folder, transformers first; [] if its config cannot be read."""
    saved = Saved(folder.path)
    dim = folder.rotary_dim
    try:
        if folder.is_adapter or dim is None or not saved.maximum:
            return []
    except PoSEError:
        return []
    rows: list[Reading] = []
    first: tuple[np.ndarray, float] | None = None
    for rule in RULES:
        name = f"{rule.engine} {rule.versions}"
        try:
            found = taken(rule, saved)
            with np.errstate(all="raise"):
                frequencies, scale = found.frequencies(dim, saved.maximum)
        except EngineStopsError as error:
            rows.append(Reading(name, None, f"stops: {error.reason}"))
            continue
        except (ArithmeticError, KeyError, TypeError, ValueError):
            # The reason is among the problems.
            rows.append(Reading(name, None, "stops at this rope"))
            continue
        first = first or (frequencies, scale)
        rows.append(Reading(name, found.default, _compared(found.rope["rope_type"], (frequencies, scale), first)))
    return rows


def same_rope(one: tuple[np.ndarray, float], other: tuple[np.ndarray, float]) -> bool:
    """Return whether two ropes, each frequencies and the scale of cos and sin, differ by rounding at most."""
    return np.allclose(one[0], other[0], rtol=_SAME) and abs(one[1] - other[1]) < _SAME


def _compared(kind: str, mine: tuple[np.ndarray, float], first: tuple[np.ndarray, float]) -> str:
    turning = np.flatnonzero((mine[0] > 0) & (first[0] > 0))  # pairs that do not rotate are 0
    ratio = float(mine[0][turning[-1]] / first[0][turning[-1]]) if turning.size else 1.0
    if same_rope(mine, first):
        return f"{kind}"
    if abs(ratio - 1) > _SAME:
        return f"{kind}, differs: the slowest pair turns {ratio:.3g} times as fast"
    if not np.allclose(mine[0], first[0], rtol=_SAME):
        return f"{kind}, differs: pairs in the middle turn at another speed"
    return f"{kind}, differs: cos and sin are scaled by {mine[1]:.4g} instead of {first[1]:.4g}"
