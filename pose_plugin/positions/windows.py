"""From documents to training windows: which tokens are read, and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pose_plugin.config import PoSESettings
from pose_plugin.positions.draws import Draws, document_generator, integers
from pose_plugin.positions.layout import Layout, shifted_indices
from pose_plugin.positions.samplers.basic import SAMPLERS
from pose_plugin.positions.samplers.bordered import Borders
from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class Window:
    """One document's training window of n tokens.

    Attributes:
        content: indices into the document's tokens, shape (n,), strictly increasing.
        position_ids: shape (n,), strictly increasing, from 0 to below the target.
        seams: indices in the window whose token does not follow its predecessor in the document.
    """

    content: np.ndarray
    position_ids: np.ndarray
    seams: np.ndarray


def draw_windows(
    documents: Sequence[Sequence[int] | np.ndarray],
    settings: PoSESettings,
    epoch: int,
    borders: Borders | None = None,
) -> list[Window]:
    """Draws a window of every document (arXiv 2309.10400, section 3.2).

    Args:
        documents: token ids, each of its own length L_x ≥ 1.
        settings: sampler, content mode, lengths, seed.
        epoch: 0, 1, …
        borders: where the samplers of `BORDERED` may put a jump, one a document, as indices of its tokens.

    Raises:
        PoSEError: a document has more tokens than `target_length` and no `train_length` says how many to take.
    """
    if not documents:
        return []
    generators = [document_generator(tokens, settings.seed, epoch) for tokens in documents]
    draws = Draws(generators)
    sizes = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    windows = sizes if settings.train_length is None else np.minimum(sizes, settings.train_length)
    longest = int(windows.max())
    if longest > settings.target_length:
        raise PoSEError(
            f"a training sample has {longest} tokens, more than target_length={settings.target_length}. "
            "Raise target_length, shorten the samples, or set train_length to the window to be taken from them"
        )
    layout, shifts = _layout(sizes, windows, draws, settings, borders)
    result = []
    for row in range(layout.rows):
        starts = layout.starts[row]
        jumps = np.diff(shifts[row], prepend=shifts[row, :1]) > 0
        seams = starts[jumps & (layout.lengths[row] > 0)]
        content = shifted_indices(layout.lengths[row], shifts[row])
        result.append(Window(content, layout.position_ids(row), seams))
    return result


def plain_window(size: int) -> Window:
    """A whole document on positions 0…size−1, as evaluation reads it."""
    indices = np.arange(size)
    return Window(indices, indices, np.zeros(0, dtype=np.int64))


def _layout(
    sizes: np.ndarray, windows: np.ndarray, draws: Draws, settings: PoSESettings, borders: Borders | None = None
) -> tuple[Layout, np.ndarray]:
    """Chunks with their skips u_i, and beside them the content shifts v_i, shape (rows, chunks)."""
    keep_plain = draws.uniform(1)[:, 0] < settings.unskipped_ratio
    targets = np.full_like(windows, settings.target_length + settings.target_margin)
    if settings.content == "aligned":
        # v_i = u_i: a chunk is put where its text really stands, which can be no farther than the text goes.
        targets = np.minimum(targets, sizes)
    piece: np.ndarray | None = None
    if borders is not None and settings.content == "window":
        # Which borders lie in the window is known once its place is.
        piece = integers(draws.uniform(1), np.zeros_like(sizes)[:, None], (sizes - windows)[:, None])
        borders = [offered if offered is None else offered - piece[row] for row, offered in enumerate(borders)]
    layout = SAMPLERS[settings.sampler](windows, targets, draws, settings, borders)
    skips = np.where(keep_plain[:, None], 0, layout.skips)
    layout = Layout(layout.lengths, skips)
    if settings.content == "contiguous":
        return layout, np.zeros_like(skips)
    if settings.content == "aligned":
        return layout, skips
    shifts = np.zeros_like(skips)
    if piece is not None:
        return layout, shifts + piece
    uniform = draws.uniform(skips.shape[1])
    if settings.content == "window":
        shifts[:] = integers(uniform[:, :1], shifts[:, :1], (sizes - windows)[:, None])
        return layout, shifts
    for i in range(1, skips.shape[1]):
        shifts[:, i] = integers(uniform[:, i], shifts[:, i - 1], sizes - windows)
    return layout, shifts
