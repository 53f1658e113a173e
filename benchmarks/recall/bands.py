"""Scores by the distance from a fact to the end of its haystack, in the bands that were fixed beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pose_plugin.evaluation.measures.haystack import Answer, band

BANDS = (0, 2048, 4096, 8192, 16384, 24576, 32768)
"""Edges in tokens; band i holds distances from edge i (included) to edge i + 1 (excluded)."""

FAR_BANDS = (*BANDS, 49152, 65536)
"""Edges for haystacks of more than 32,768 tokens."""


def by_band(answers: Iterable[Answer], edges: Sequence[int] = BANDS) -> dict[str, tuple[int, int]]:
    """Count (found, asked) in each band that has questions, the nearest band first, e.g. "8192-16384"."""
    counts: dict[str, tuple[int, int]] = {}
    for each in sorted(answers, key=lambda each: each.distance):
        low, high = band(each.distance, edges)
        found, asked = counts.get(f"{low}-{high}", (0, 0))
        counts[f"{low}-{high}"] = (found + each.found, asked + 1)
    return counts
