"""From documents to training windows: which tokens are read, and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pose_plugin.positions.draws import Draws, document_generator, integers
from pose_plugin.positions.layout import Layout, shifted_indices
from pose_plugin.positions.samplers import Borders, Rows, make_sampler
from pose_plugin.positions.settings import PositionSettings
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
    settings: PositionSettings,
    epoch: int,
    borders: Borders | None = None,
) -> list[Window]:
    """Draw a window of every document (arXiv 2309.10400, section 3.2).

    Args:
        documents: token ids, each of its own length L_x ≥ 1.
        settings: sampler, content, lengths, seed.
        epoch: 0, 1, …
        borders: where each document may have a jump, as indices of its tokens; for samplers with a `border_finder`.

    Raises:
        PoSEError: a document has more tokens than `target_length` and no `train_length` limits how many to take.
    """
    if not documents:
        return []
    draws = Draws([document_generator(tokens, settings.seed, epoch) for tokens in documents])
    sizes = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    windows = sizes if settings.train_length is None else np.minimum(sizes, settings.train_length)
    longest = int(windows.max())
    if longest > settings.target_length:
        raise PoSEError(
            f"a training sample has {longest} tokens, more than target_length={settings.target_length}. "
            "Raise target_length, shorten the samples, or set train_length to the window to be taken from them"
        )
    layout, shifts = lay_out(sizes, windows, draws, settings, borders)
    # A chunk whose content is shifted further than the chunk before begins with a seam.
    jumps = (shifts[:, 1:] > shifts[:, :-1]) & (layout.lengths[:, 1:] > 0)
    starts = layout.starts[:, 1:]
    result = []
    for row in range(layout.rows):
        seams = starts[row, jumps[row]]
        content = shifted_indices(layout.lengths[row], shifts[row])
        result.append(Window(content, layout.position_ids(row), seams))
    return result


def plain_window(size: int) -> Window:
    """Return a whole document at positions 0…size−1, as evaluation reads it."""
    indices = np.arange(size)
    return Window(indices, indices, np.zeros(0, dtype=np.int64))


def lay_out(
    sizes: np.ndarray, windows: np.ndarray, draws: Draws, settings: PositionSettings, borders: Borders | None = None
) -> tuple[Layout, np.ndarray]:
    """Lay out a batch of documents.

    Args:
        sizes: L_x, the tokens of each document, shape (rows,).
        windows: n ≤ L_x, the tokens to read of each, shape (rows,).
        draws: randomness for `rows` rows.
        settings: sampler, content, target.
        borders: as for `draw_windows`.

    Returns:
        chunks with their skips u_i, and the content shifts v_i, shape (rows, chunks): chunk i reads the tokens
        v_i + st_i + (0…l_i−1) of its document.
    """
    keep_plain = draws.uniform(1)[:, 0] < settings.unskipped_ratio
    targets = np.full_like(windows, settings.target_length + settings.target_margin)
    if settings.content == "aligned":
        # v_i = u_i: a chunk keeps the position that its text has in the document, so the document limits the target.
        targets = np.minimum(targets, sizes)
    piece: np.ndarray | None = None
    if borders is not None and settings.content == "window":
        # Drawn before the layout, since it decides which borders are inside the window.
        piece = integers(draws.uniform(1), np.zeros_like(sizes)[:, None], (sizes - windows)[:, None])
        borders = [offered if offered is None else offered - piece[row] for row, offered in enumerate(borders)]
    layout = make_sampler(settings)(Rows(windows, targets, borders), draws)
    skips = np.where(keep_plain[:, None], 0, layout.skips)
    layout = Layout(layout.lengths, skips)
    shifts = np.zeros_like(skips)
    if settings.content == "aligned":
        shifts = skips
    elif piece is not None:
        shifts += piece
    elif settings.content == "window":
        shifts += integers(draws.uniform(skips.shape[1])[:, :1], shifts[:, :1], (sizes - windows)[:, None])
    elif settings.content == "skip":
        uniform = draws.uniform(skips.shape[1])
        for i in range(1, skips.shape[1]):
            shifts[:, i] = integers(uniform[:, i], shifts[:, i - 1], sizes - windows)
    return layout, shifts
