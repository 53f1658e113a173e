"""The bounds from the literature, against naive sums and published values."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

from pose_plugin.rope import kinds, theory
from pose_plugin.utils.errors import PoSEError


@pytest.mark.parametrize("length", [1, 2, 37, 1000])
def test_retrieval_strength_equals_the_naive_sum(length):
    naive = np.cos(np.outer(np.arange(length), kinds.plain_frequencies(3e4, 64))).sum(axis=1)
    np.testing.assert_allclose(theory.retrieval_strength(3e4, 64, length), naive, atol=1e-10)
    start = length // 3
    part = theory.retrieval_strength(3e4, 64, length, start)
    np.testing.assert_allclose(part, naive[start:], atol=1e-10)


@pytest.mark.parametrize(
    ("length", "known"), [(8192, 9.4e4), (16384, 2.35e5), (32768, 8.0e5), (65536, 2.6e6), (131072, 9.1e6)]
)
def test_retrieval_base_agrees_with_coarser_searches(length, known):
    ours = theory.retrieval_base(length, 128)
    # Able bases come in narrow islands: a coarser search steps over the first ones and ends a little higher.
    assert known / 1.3 < ours <= known * 1.005
    assert np.cos(np.outer(np.arange(length + 1), kinds.plain_frequencies(ours, 128))).sum(axis=1).min() >= 0


def test_no_smaller_base_of_the_grid_suffices():
    bound = theory.retrieval_base(512, 64)
    frequencies = [kinds.plain_frequencies(base, 64) for base in bound / 1.005 ** np.arange(1, 400)]
    distances = np.arange(513)
    assert all(np.cos(np.outer(distances, theta)).sum(axis=1).min() < 0 for theta in frequencies)


def test_a_distance_of_exactly_the_length_counts():
    base = 1000.0
    strength = theory.retrieval_strength(base, 64, 4000)
    first = int(np.argmax(strength < 0))
    assert strength[first] < 0
    assert theory.can_retrieve(base, 64, first - 1)
    assert not theory.can_retrieve(base, 64, first)


def test_too_few_dimensions_for_a_length():
    with pytest.raises(PoSEError, match=r"rope: yarn"):
        theory.retrieval_base(4096, 2)


def test_recipes():
    assert theory.prolong_base(65536) == pytest.approx(8e6)
    assert theory.prolong_base(524288) == pytest.approx(1.28e8)
    assert theory.llama3_80k_base(5e5, 10) == pytest.approx(2e8)


# --- the bounds of benchmarks/interpolation.py ---------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("interpolation")


def test_interpolation_bound_of_theorem_2_1(benchmark):
    # Half way between two integers, for c = 1e4: d·max|h| / 294.73.
    assert benchmark.interpolation_bound(0.5, 0, 1, 128, 1e4) == pytest.approx(128 / 294.73, rel=1e-5)
    assert benchmark.interpolation_bound(3.0, 3, 4, 128, 1e4) == 0.0


def test_interpolation_bound_holds_for_random_scores(benchmark):
    rng = np.random.default_rng(0)
    dim, theta = 128, kinds.plain_frequencies(1e4, 128)
    for _ in range(50):
        weights = rng.normal(size=dim // 2) + 1j * rng.normal(size=dim // 2)
        left, shift = int(rng.integers(0, 4096)), float(rng.random())

        def score(position, weights=weights):
            return float((weights * np.exp(1j * position * theta)).real.sum())

        straight = (1 - shift) * score(left) + shift * score(left + 1)
        bound = benchmark.interpolation_bound(left + shift, left, left + 1, dim, 1e4, float(np.abs(weights).max()))
        assert abs(score(left + shift) - straight) <= bound


def test_extrapolation_bound_equals_the_naive_sum(benchmark):
    theta = kinds.plain_frequencies(1e4, 8)
    partial = [abs(sum(complex(math.cos(7 * t), math.sin(7 * t)) for t in theta[:k])) for k in range(1, 5)]
    assert benchmark.extrapolation_bound(7, 8, 1e4) == pytest.approx(sum(partial))
