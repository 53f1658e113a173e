"""Compute which distances each sampler trains, from 2,048 to 16,384 tokens (Figure 5 of the PoSE paper).

    python benchmarks/position_coverage.py                                   # half a minute
    python benchmarks/position_coverage.py --quick --output /tmp/coverage    # only shows that it runs

For your own lengths: pose-plugin coverage --target-length … --train-length … --output coverage.png

The line `chunks fixed at half` is the closed form for a window that is always cut into two equal halves. Random cuts
train the distances from half a window to a whole one; these do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import about, arguments, machine, markdown, places, save

from pose_plugin.config import parse_settings
from pose_plugin.positions import coverage
from pose_plugin.positions.figure import draw_coverage

WINDOW, TARGET = 2048, 16384
DISTANCES = (1024, 1536, 2047, 4096, 8192, 14336, 15360, 16000, 16380)
SAMPLERS: dict[str, dict[str, Any]] = {
    "pose, 2 chunks": {},
    "pose, 2 chunks, reference": {"variant": "reference"},
    "pose, 3 chunks": {"chunks": 3},
    "clamped, 2 chunks": {"sampler": "clamped"},
    "randpos": {"sampler": "randpos"},
}
HALVES = "chunks fixed at half"


def main() -> None:
    args = arguments(__doc__).parse_args()
    results, figures = places(args.output)
    draws, draws_of_randpos = (200, 10) if args.quick else (40000, 4000)
    seen = {}
    for name, changes in SAMPLERS.items():
        settings = parse_settings({"target_length": TARGET, "train_length": WINDOW, **changes})
        seen[name] = coverage(settings, draws=draws_of_randpos if settings.sampler == "randpos" else draws)
    result: dict[str, Any] = {
        "machine": machine("numpy"),
        "window": WINDOW,
        "target": TARGET,
        "distances": list(DISTANCES),
        "draws": {name: c.draws for name, c in seen.items()},
        "chance": {name: [round(float(c.probability[d]), 4) for d in DISTANCES] for name, c in seen.items()},
    }
    result["chance"][HALVES] = [round(float(p), 4) for p in fixed_halves(np.array(DISTANCES))]
    save(result, results / "coverage.json")
    draw_coverage(seen, figures / "coverage.png")
    print(table(result))


def fixed_halves(distance: np.ndarray) -> np.ndarray:
    """Return the chance of each distance if both chunks have n/2 tokens and u ~ U{0, …, L_t − n}; same shape.

    Distances below n/2 occur within a chunk of every row. From one chunk to the other they are u + 1 … u + n − 1.
    """
    first = np.maximum(distance - WINDOW + 1, 0)
    last = np.minimum(distance - 1, TARGET - WINDOW)
    far = np.maximum(last - first + 1, 0) / (TARGET - WINDOW + 1)
    return np.where(distance < WINDOW // 2, 1.0, far)


def table(result: dict[str, Any]) -> str:
    """Return the table of the README."""
    rows = [[name, *(f"{p:.2f}" for p in chances)] for name, chances in result["chance"].items()]
    return markdown(["distance", *map(str, result["distances"])], rows) + "\n\n" + about(result["machine"])


if __name__ == "__main__":
    main()
