"""Why positions are interpolated: a fitted attention score within, beyond and between trained positions.

    python benchmarks/interpolation.py                             # seconds
    python benchmarks/interpolation.py --quick --output /tmp/pi    # only to see that it runs

After Figure 2 and section 2 of Position Interpolation (arXiv 2306.15595). Under RoPE the score of a query and
a key at distance s is a(s) = Re Σ_j h_j·e^(i·s·θ_j): 64 waves whose weights h_j training chooses. Here they
are chosen by least squares, so that a(s) passes near random values in [−1, 1] at distances within a window of
2,048 tokens, as if trained there. Then for a target four times as long:

- extrapolation asks for a(s) at s = 2,048 … 8,191, where nothing held it;
- interpolation (RoPE `linear`, factor 4) asks for a(s/4), which falls between integers it was held at.

Singular values below 1e-6 of the largest, about single precision, are left out of the fit. There are many
fits with fresh random points; the figure shows the first. Beside them: the paper's two bounds, section 2.3.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from common import about, arguments, canvas, machine, markdown, places, save

from pose_plugin.rope.kinds import plain_frequencies

DIM, BASE, WINDOW, FACTOR = 128, 1e4, 2048, 4
POINTS, SMALLEST = 400, 1e-6
ROWS = {
    "within": "trained distances, 0 … 2047",
    "between": "interpolated, s/4 for s = 0 … 8188",
    "beyond": "extrapolated, 2048 … 8191",
}


def main() -> None:
    args = arguments(__doc__).parse_args()
    results, figures = places(args.output)
    fits = 3 if args.quick else 100
    largest: dict[str, list[float]] = {row: [] for row in ROWS}
    for seed in range(fits):
        *_, weights = fit(seed)
        for row, distances in ranges().items():
            largest[row].append(float(np.abs(score(distances, weights)).max()))
    # Per max|h|, so that the two bounds can be compared without a fit.
    inner = interpolation_bound(0.5, 0, 1, DIM, BASE)
    outer = 2 * extrapolation_bound(np.arange(FACTOR * WINDOW), DIM, BASE)
    result = {
        "machine": machine("numpy"),
        "fits": fits,
        "largest_score": {
            row: {"median": float(np.median(values)), "smallest": min(values), "largest": max(values)}
            for row, values in largest.items()
        },
        "bound_of_interpolation": inner,
        "smallest_bound_of_extrapolation": float(outer.min()),
        "smallest_ratio": float(outer.min() / inner),
        # As far as the paper's own plot of the bound goes.
        "smallest_ratio_below_4096": float(outer[:4096].min() / inner),
    }
    save(result, results / "interpolation.json")
    draw(figures / "interpolation.png")
    print(table(result))


def fit(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random distances, random values there, and the weights that fit them, shape (d,)."""
    generator = np.random.default_rng(seed)
    distances = np.sort(generator.choice(WINDOW, POINTS, replace=False))
    values = generator.uniform(-1, 1, POINTS)
    return distances, values, np.linalg.lstsq(_waves(distances), values, rcond=SMALLEST)[0]


def score(distances: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """a(s), the shape of `distances`."""
    return _waves(distances) @ weights


def ranges() -> dict[str, np.ndarray]:
    """The distances of each row of the table."""
    whole = np.arange(FACTOR * WINDOW)
    # s/4 ends at the last trained distance: what lies behind it is between no two of them.
    between = whole[whole <= FACTOR * (WINDOW - 1)] / FACTOR
    return {"within": whole[:WINDOW], "between": between, "beyond": whole[WINDOW:]}


def interpolation_bound(
    position: float, left: float, right: float, dim: int, base: float, weight: float = 1.0
) -> float:
    """Return the bound of theorem 2.1, d·max|h_j|·(s − s₁)(s₂ − s) / (8·ln c).

    Between two integer positions s₁ ≤ s ≤ s₂ a score departs by no more from the line through its two neighbours.

    Args:
        position, left, right: s, s₁ and s₂.
        dim, base: d and c.
        weight: max|h_j|, the largest product of a query pair and a key pair.
    """
    return dim * weight * (position - left) * (right - position) / (8 * math.log(base))


def extrapolation_bound(distances: np.ndarray, dim: int, base: float) -> np.ndarray:
    """Return B(s) = Σ_k |A_k(s)|, A_k(s) = Σ_{j<k} e^(i·s·θ_j), in the shape of `distances`.

    2·max|h_j|·B(s) bounds a score outside the trained window (RoFormer, section 3.4.3).
    """
    angles = np.multiply.outer(distances, plain_frequencies(base, dim))
    return np.abs(np.cumsum(np.exp(1j * angles), axis=-1)).sum(axis=-1)


def table(result: dict[str, Any]) -> str:
    """The table of the README."""
    rows = [
        [label, *(f"{result['largest_score'][row][key]:,.2f}" for key in ("median", "smallest", "largest"))]
        for row, label in ROWS.items()
    ]
    text = markdown(["largest absolute score", "median", "smallest", "largest"], rows)
    return (
        f"{text}\n\nOver {result['fits']} fits. Bounds per max|h|: interpolation "
        f"{result['bound_of_interpolation']:.3f}, extrapolation at least "
        f"{result['smallest_bound_of_extrapolation']:.0f}, {result['smallest_ratio']:.0f} times as much "
        f"({result['smallest_ratio_below_4096']:.0f} times below 4096 tokens). " + about(result["machine"])
    )


def draw(path: Path) -> None:
    """The fit, its extrapolation, and its interpolation between integers."""
    from pose_plugin.utils.plots import COLOURS

    distances, values, weights = fit(0)
    blue, red = COLOURS[0], COLOURS[1]
    with canvas(path, 7.2, 2.4, columns=3) as (_, (fitted, beyond, between)):
        inside = np.arange(WINDOW)
        fitted.plot(distances, values, ".", color="#aaaaaa", markersize=3, markeredgewidth=0)
        fitted.plot(inside, score(inside, weights), color=blue, linewidth=1.1)
        fitted.set_title("fitted within the window")
        fitted.set_ylabel("attention score a(s)")
        outside = np.arange(WINDOW, FACTOR * WINDOW)
        beyond.axvspan(0, WINDOW, color="#f0f0f0", linewidth=0, zorder=0)
        beyond.plot(inside, score(inside, weights), color=blue)
        beyond.plot(outside, score(outside, weights), color=red)
        beyond.set_title(f"extrapolated to {FACTOR} windows")
        between.set_title(f"interpolated, a(s/{FACTOR})")
        whole = np.arange(480, 497)
        for s in whole:
            between.axvline(s, color="#cccccc", linewidth=0.6, linestyle=(0, (3, 3)), zorder=0)
        fine = np.arange(FACTOR * whole[0], FACTOR * whole[-1] + 1) / FACTOR
        between.plot(fine, score(fine, weights), color=red, marker=".", markersize=4, linewidth=0.9)
        between.plot(whole, score(whole, weights), "o", color=blue, markersize=3.5)
        between.set_ylim(-1.3, 1.3)
        fitted.set_ylim(-1.3, 1.3)
        for axes in (fitted, beyond, between):
            axes.grid(True, axis="y")
            axes.set_xlabel("distance s" if axes is not between else f"distance s/{FACTOR}")
        fitted.set_xticks([0, 1024, 2048], ["0", "1k", "2k"])
        beyond.set_xticks([0, 2048, 4096, 6144, 8192], ["0", "2k", "4k", "6k", "8k"])
        between.set_xticks([480, 484, 488, 492, 496])


def _waves(distances: np.ndarray) -> np.ndarray:
    """cos and sin of every frequency, shape (distances, d)."""
    angles = np.outer(distances, plain_frequencies(BASE, DIM))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


if __name__ == "__main__":
    main()
