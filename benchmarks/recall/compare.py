"""Compares two arms of the experiment with a bootstrap over haystacks and seeds.

    python benchmarks/recall/compare.py pose_skip no_skip --rope yarn-4

Questions of one haystack, and haystacks of one trained model, are not independent. So whole haystacks and whole seeds
are drawn again with replacement, and both arms get the same draws.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import RESULTS  # noqa: E402
from recall.judge import answers_of, file_of  # noqa: E402
from recall.rows import load_rows  # noqa: E402
from recall.settings import FAR, LENGTH  # noqa: E402
from recall.texts import NEAR  # noqa: E402

DRAWS = 10_000


def main() -> None:
    """Print the difference of two arms, beyond the old window and within it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm")
    parser.add_argument("other", help="an arm, base, or an untrained rope such as yarn-4")
    parser.add_argument("--rope", default="yarn-4")
    args = parser.parse_args()
    length = FAR if args.rope == "yarn-8" else LENGTH
    rows = [row for row in load_rows(RESULTS / file_of(length)) if row["length"] == length]
    for exact, (far, where) in product((False, True), ((True, f"beyond {NEAR}"), (False, f"within {NEAR}"))):
        shares = [shares_of(rows, name, args.rope, far, exact) for name in (args.arm, args.other)]
        tables = paired(*shares)
        difference, low, high = bootstrap(*tables)
        seeds = f"{tables[0].shape[1]} seed(s){', no digit behind the key' if exact else ''}"
        print(f"{args.arm} − {args.other}, {where}, {seeds}: {difference:+.3f} (95 %: {low:+.3f} … {high:+.3f})")


def shares_of(
    rows: list[dict[str, Any]], arm: str, rope: str, far: bool, exact: bool = False
) -> dict[tuple[str, str], float]:
    """Collect the share of found facts by (haystack, seed) of one arm; an untrained model has the seed "".

    Args:
        rows: of one length.
        arm: an arm of run.py, or the name of an untrained model.
        rope: of the arm.
        far: facts beyond the old window, or else those within it.
        exact: the answer's first run of digits must be the key, and not only begin with it.
    """
    found = {}
    for row in rows:
        trained = row["model"].startswith(f"{arm}-{rope}-")
        if trained or row["model"] == arm:
            seed = row["model"].rpartition("-")[2] if trained else ""
            asked = [answer for answer in answers_of(row) if (answer.distance >= NEAR) == far]
            right = [re.findall(r"\d+", a.answer)[:1] == [a.key] if exact else a.found for a in asked]
            found[f"{row['text']}/{row['start']}", seed] = float(np.mean(right))
    return found


def paired(one: dict[tuple[str, str], float], other: dict[tuple[str, str], float]) -> tuple[np.ndarray, np.ndarray]:
    """Arrange two arms as arrays of shape (haystacks, seeds); an untrained arm is the same for every seed.

    Raises:
        ValueError: a haystack or a seed is missing in one of the arms.
    """
    haystacks = sorted({name for name, _ in one} | {name for name, _ in other})
    seeds = sorted({seed for _, seed in [*one, *other]} - {""}) or [""]

    def table(arm: dict[tuple[str, str], float]) -> np.ndarray:
        untrained = all(seed == "" for _, seed in arm)
        try:
            return np.array([[arm[name, "" if untrained else seed] for seed in seeds] for name in haystacks])
        except KeyError as error:
            raise ValueError(f"not measured yet: {error.args[0]}") from None

    return table(one), table(other)


def bootstrap(one: np.ndarray, other: np.ndarray, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """Estimate the mean difference of two arms and its 95 % interval by drawing haystacks and seeds again.

    Args:
        one: shares of found facts, shape (haystacks, seeds).
        other: the same for the other arm.
        draws: how often.
        seed: of the draws.

    Returns:
        the difference, the lower and the upper end.
    """
    difference, draw = one - other, np.random.default_rng(seed)
    haystacks = draw.integers(difference.shape[0], size=(draws, difference.shape[0], 1))
    seeds = draw.integers(difference.shape[1], size=(draws, 1, difference.shape[1]))
    low, high = np.percentile(difference[haystacks, seeds].mean((1, 2)), [2.5, 97.5])
    return float(difference.mean()), float(low), float(high)


if __name__ == "__main__":
    main()
