"""Bounds from the literature that advise on the base and on interpolation. numpy only.

Notable: the retrieval bound is searched with one matrix product per candidate base, so that 128k
positions cost milliseconds instead of a table of cosines.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pose_plugin.rope.kinds import plain_frequencies
from pose_plugin.utils.errors import PoSEError


def retrieval_strength(base: float, dim: int, stop: int, start: int = 0) -> npt.NDArray[np.float64]:
    """B(m) = Σ_i cos(m·θ_i) for m = start … stop − 1, arXiv 2405.14591.

    B(m) says how much more a token m positions back can draw attention when it is like the query than
    when it is not; below zero the model attends to dissimilar tokens more than to similar ones.

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
    """A distance of at most `length` at which B is below 0; None if there is none."""
    start, stop = 0, 1024
    # Too small a base fails within a few thousand tokens, so the whole length is rarely computed.
    while start <= length:
        strength = retrieval_strength(base, dim, min(stop, length + 1), start)
        if strength.min() < 0:
            return start + int(strength.argmin())
        start, stop = stop, 4 * stop
    return None


def can_retrieve(base: float, dim: int, length: int) -> bool:
    """Whether Σ_i cos(m·θ_i) ≥ 0 at every distance m ≤ length."""
    return _failure(base, dim, length) is None


def retrieval_base(length: int, dim: int) -> float:
    """The smallest base, in steps of half a percent, that retrieves over `length` tokens (arXiv 2405.14591).

    Able bases come in narrow islands before every larger base is able, which is why a bisection would
    not find the smallest one and why published values depend on the grid they were searched on.

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
    """The power law through ProLong's two choices, 8e6 at 64k and 1.28e8 at 512k (arXiv 2410.02660)."""
    return float(8e6 * (length / 65536) ** (math.log(16) / math.log(8)))


def llama3_80k_base(base: float, factor: float) -> float:
    """The Llama-3 8K→80K recipe, 5e5 → 2e8 (×400 for s = 10, arXiv 2404.19553), as a power law in s."""
    return float(base) * float(factor) ** math.log10(400)


def interpolation_bound(
    position: float,
    left: float,
    right: float,
    dim: int,
    base: float = 1e4,
    largest_weight: float = 1.0,
) -> float:
    """Theorem 2.1 of Position Interpolation (arXiv 2306.15595).

    Between two integer positions the attention score a(s) departs from the straight line through its
    two neighbours by at most d·max|h_j|·(s − s₁)(s₂ − s) / (8·ln c).

    Args:
        position, left, right: s, s₁ and s₂, with s₁ ≤ s ≤ s₂.
        dim: d.
        base: c.
        largest_weight: max|h_j|, the largest product of a query pair and a key pair.
    """
    if not left <= position <= right:
        raise PoSEError(f"position={position} must lie between left={left} and right={right}")
    return dim * largest_weight * (position - left) * (right - position) / (8 * math.log(base))


def extrapolation_bound(distances: npt.ArrayLike, dim: int, base: float = 1e4) -> npt.NDArray[np.float64]:
    """B(s) = Σ_k |A_k(s)|, A_k(s) = Σ_{j<k} e^(i·s·θ_j): how far a score may go outside the trained window.

    Args:
        distances: s, any shape, tokens.

    Returns: the same shape; multiply by 2·max|h_j| for the bound of RoFormer's section 3.4.3.
    """
    angles = np.multiply.outer(np.asarray(distances, dtype=np.float64), plain_frequencies(base, dim))
    partial_sums = np.cumsum(np.exp(1j * angles), axis=-1)
    bound: npt.NDArray[np.float64] = np.abs(partial_sums).sum(axis=-1)
    return bound
