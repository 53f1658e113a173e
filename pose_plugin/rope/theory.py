"""Bounds and recipes from the literature that advise on the base. numpy only.

The retrieval bound is searched with one matrix product per candidate base, so 128k positions take milliseconds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pose_plugin.rope.kinds import plain_frequencies
from pose_plugin.utils.errors import PoSEError


def retrieval_strength(base: float, dim: int, stop: int, start: int = 0) -> npt.NDArray[np.float64]:
    """Compute B(m) = Σ_i cos(m·θ_i) for m = start … stop − 1, arXiv 2405.14591.

    B(m) measures how much more attention a token m positions back can draw if it resembles the query than if it does
    not. Below zero the model attends more to dissimilar tokens.

    Returns: shape [stop − start].
    """
    side = math.isqrt(max(0, stop - start - 1)) + 1
    frequencies = plain_frequencies(base, dim)
    # m = a + b with a on a coarse grid, so cos(mθ) = cos(aθ)cos(bθ) − sin(aθ)sin(bθ): two small products.
    coarse = np.outer(start + np.arange(side) * side, frequencies)
    fine = np.outer(np.arange(side), frequencies)
    table = np.cos(coarse) @ np.cos(fine).T - np.sin(coarse) @ np.sin(fine).T
    strength: npt.NDArray[np.float64] = table.reshape(-1)[: stop - start]
    return strength


def _failure(base: float, dim: int, length: int) -> int | None:
    """Return a distance of at most `length` at which B is below 0, or None."""
    start, stop = 0, 1024
    # Too small a base fails within a few thousand tokens, so the whole length is rarely computed.
    while start <= length:
        strength = retrieval_strength(base, dim, min(stop, length + 1), start)
        if strength.min() < 0:
            return start + int(strength.argmin())
        start, stop = stop, 4 * stop
    return None


def can_retrieve(base: float, dim: int, length: int) -> bool:
    """Return whether Σ_i cos(m·θ_i) ≥ 0 at every distance m ≤ length."""
    return _failure(base, dim, length) is None


def retrieval_base(length: int, dim: int) -> float:
    """Return the smallest base, in steps of half a percent, that retrieves over `length` tokens (arXiv 2405.14591).

    Sufficient bases come in narrow islands before every larger base suffices. So a bisection would not find the
    smallest one, and published values depend on the grid of their search.

    Args:
        length: L, tokens.
        dim: d, rotated dimensions of a head.

    Raises:
        PoSEError: no base up to 1e12 suffices (d is too small for that length).
    """
    base, failed = 10.0, 0
    while base < 1e12:
        # A base half a percent larger mostly fails near where the last one did: look there first.
        low, high = int(0.98 * failed), min(length, int(1.02 * failed)) + 1
        near = retrieval_strength(base, dim, high, low)
        if near.min() < 0:
            failed = low + int(near.argmin())
        else:
            found = _failure(base, dim, length)
            if found is None:
                return base
            failed = found
        base *= 1.005
    raise PoSEError(
        f"no RoPE base up to 1e12 can retrieve over {length} tokens with {dim} rotated dimensions; "
        "give rope: {type: base, theta: …} or use rope: yarn"
    )


def prolong_base(length: int) -> float:
    """Return the power law through ProLong's two choices, 8e6 at 64k and 1.28e8 at 512k (arXiv 2410.02660)."""
    return float(8e6 * (length / 65536) ** (math.log(16) / math.log(8)))


def llama3_80k_base(base: float, factor: float) -> float:
    """Return the Llama-3 8K→80K recipe, 5e5 → 2e8 (×400 for s = 10, arXiv 2404.19553), as a power law in s."""
    return float(base * factor ** math.log10(400))
