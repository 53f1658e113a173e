"""Where the chunks of a training window are put: one function a sampler, one row in `SAMPLERS` each.

Every sampler takes the rows' window lengths n, the number of positions each may use, a source of
randomness and the settings, and returns a `Layout` whose last position is below the target.

Which distances each trains (`coverage` measures it for any settings):
- `pose`: everything below max(l_i) in each row; each farther distance with about equal chance, except the
  last L_c before the target, which fade to nothing (`target_margin` moves that edge outwards). With more
  than two chunks the skips still grow one after the other, so the first jumps tend to be the widest.
- `clamped`: the farthest distances as often as the others, and a share of rows left plain.
- `randpos`: all distances, but hardly any two neighbouring tokens at distance 1.
- `cream`: the tail always at the end of the target, so that the distances to it are trained most (cream.py).
- `turns`: as `pose`, with jumps between the turns of a chat only (at_borders.py).
- `sentences`: a jump behind every sentence; near distances beyond a sentence are rarer than with `pose`.
- `none`: 1…n−1 only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pose_plugin.positions.chunks import SamplerOptions, chunk_lengths, growing_skips
from pose_plugin.positions.draws import Draws, integers
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.bordered import Borders, sentences, turns
from pose_plugin.positions.samplers.cream import cream


class Sampler(Protocol):
    """Layout of a batch of rows; `borders` is read by the samplers of `BORDERED` alone."""

    def __call__(
        self,
        windows: np.ndarray,
        targets: np.ndarray,
        draws: Draws,
        options: SamplerOptions,
        borders: Borders | None = None,
    ) -> Layout: ...


def pose(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """PoSE (arXiv 2309.10400, section 3.2): chunk lengths at random, u_i ~ U{u_(i−1), …, L_t − n}.

    A row with fewer tokens than chunks is cut into as many chunks as it has tokens.

    Args:
        windows: n, tokens of each row, shape (rows,).
        targets: positions available to each row, at least n, shape (rows,).
        draws: randomness for `rows` rows.
        options: `chunks` is N; `variant="reference"` keeps the first chunk within half of the window.
    """
    lengths = chunk_lengths(windows, draws, options)
    return growing_skips(lengths, windows, targets, draws, options.chunks)


def clamped(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """Skips drawn beyond both ends and clamped back: u = clamp(U{−n, …, L_t}, 0, L_t − n).

    About n/(L_t + n) of the rows stay plain and as many reach the very end of the target, which `pose`
    hardly ever trains. Source: the position sampling of LongEmbed (arXiv 2404.12096).
    """
    lengths = chunk_lengths(windows, draws, options)
    uniform = draws.uniform(options.chunks)[:, : lengths.shape[1]]
    free = (targets - windows)[:, None]
    wide = integers(uniform, -windows[:, None], targets[:, None])
    skips = np.sort(np.clip(wide, 0, free), axis=1)
    # Sorting keeps chunks in order; with two chunks only the second one is drawn, as in the source.
    skips = np.clip(wide, 0, free) if lengths.shape[1] == 2 else skips
    skips[:, 0] = 0
    return Layout(lengths, skips)


def randpos(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """RandPos (arXiv 2305.16843), the paper's baseline: n sorted distinct positions out of L_t."""
    width = int(windows.max(initial=0))
    lengths = (np.arange(width)[None, :] < windows[:, None]).astype(np.int64)
    skips = np.zeros_like(lengths)
    for row, (window, target) in enumerate(zip(windows, targets, strict=True)):
        skips[row, :window] = draws.subset(row, int(window), int(target)) - np.arange(window)
        skips[row, window:] = skips[row, window - 1] if window else 0
    return Layout(lengths, skips)


def none(
    windows: np.ndarray, targets: np.ndarray, draws: Draws, options: SamplerOptions, borders: Borders | None = None
) -> Layout:
    """Plain positions 0…n−1, for full-length training and RoPE-only runs."""
    return Layout(windows[:, None].astype(np.int64), np.zeros((len(windows), 1), dtype=np.int64))


SAMPLERS: dict[str, Sampler] = {
    "pose": pose,
    "clamped": clamped,
    "randpos": randpos,
    "cream": cream,
    "turns": turns,
    "sentences": sentences,
    "none": none,
}
# Their jumps stand where the text allows it.
BORDERED = ("turns", "sentences")
# The number of their chunks is not a setting.
WITHOUT_CHUNKS = ("randpos", "cream", "sentences", "none")
