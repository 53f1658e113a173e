"""Cutting a window into chunks and moving the chunks apart: what several samplers share."""

from __future__ import annotations

from pose_plugin.positions.draws import Draws

# Of samplers that have no chunks to fill: contents that put another piece of the document into each chunk.
SEVERAL_CHUNKS_REFUSED = dict.fromkeys(("skip", "aligned"), "it fills several chunks, and this sampler has none")


def chunk_lengths(window: int, draws: Draws, chunks: int, variant: str = "paper") -> list[int]:
    """Draw l_i with Σ l_i = n, each at least 1, one after the other as in Figure 6 of the PoSE paper.

    Args:
        window: n in tokens.
        draws: randomness of the row.
        chunks: N; a row with fewer tokens gets one chunk per token.
        variant: "reference" keeps the first chunk within half of the window.
    """
    lengths: list[int] = []
    rest = window
    for behind in range(min(chunks, window) - 1, 0, -1):
        # Every chunk behind this one needs a token.
        most = rest - behind
        if variant == "reference" and not lengths:
            most = min(most, (window + 1) // 2)
        lengths.append(draws.integer(1, most))
        rest -= lengths[-1]
    return [*lengths, rest]


def growing(chunks: int, most: int, draws: Draws) -> list[int]:
    """Draw u_0 = 0 and u_i ~ U{u_(i−1), …, most} (arXiv 2309.10400, section 3.2).

    Args:
        chunks: how many to draw.
        most: the largest; L_t − n for skips, L_x − n for content shifts.
        draws: randomness of the row.
    """
    grown = [0]
    while len(grown) < chunks:
        grown.append(draws.integer(grown[-1], most))
    return grown
