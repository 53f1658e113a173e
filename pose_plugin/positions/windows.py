"""From documents to training windows: which tokens are read, and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout, shifted_indices
from pose_plugin.positions.samplers import Borders, Row, Sampler, make_sampler
from pose_plugin.positions.samplers.chunks import growing
from pose_plugin.positions.settings import PositionSettings
from pose_plugin.utils.arrays import counting
from pose_plugin.utils.errors import PoSEError

_NO_SEAMS = np.zeros(0, dtype=np.int64)


class Window(NamedTuple):
    """One document's training window of n tokens.

    Attributes:
        content: indices into the document's tokens, shape (n,), strictly increasing. May be read-only.
        position_ids: shape (n,), strictly increasing, from 0 to below the target.
        seams: indices in the window whose token does not follow its predecessor in the document.
        borders: how many borders inside the window limited where it was cut; None if it could be cut anywhere.
    """

    content: np.ndarray
    position_ids: np.ndarray
    seams: np.ndarray
    borders: int | None = None


def draw_windows(
    documents: Sequence[Sequence[int] | np.ndarray],
    settings: PositionSettings,
    epoch: int,
    borders: Borders | None = None,
) -> list[Window]:
    """Draw a window of every document (arXiv 2309.10400, section 3.2). No window depends on the other documents.

    Args:
        documents: token ids; document x has L_x ≥ 1 of them.
        settings: sampler, content, lengths, seed.
        epoch: 0, 1, …
        borders: where each document may have a jump, as increasing indices of its tokens; for samplers with a
            `border_finder`.

    Raises:
        PoSEError: a document has more tokens than `target_length` and no `train_length` limits how many to take.
        ValueError: borders that do not increase, or not one entry per document.
    """
    sampler = make_sampler(settings)
    pairs = zip(documents, borders if borders is not None else [None] * len(documents), strict=True)
    return [
        _draw_window(len(tokens), Draws.of(tokens, settings.seed, epoch), settings, sampler, offered)
        for tokens, offered in pairs
    ]


def plain_window(size: int) -> Window:
    """Return a whole document at positions 0…size−1, as evaluation reads it."""
    indices = counting(size)
    return Window(indices, indices, _NO_SEAMS)


def _draw_window(
    size: int, draws: Draws, settings: PositionSettings, sampler: Sampler, offered: np.ndarray | None
) -> Window:
    """Draw the window of a document of `size` tokens with the borders that it offers."""
    window = size if settings.train_length is None else min(size, settings.train_length)
    if window > settings.target_length:
        raise PoSEError(
            f"a training sample has {window} tokens, more than target_length={settings.target_length}. "
            "Raise target_length, shorten the samples, or set train_length to the window to be taken from them"
        )
    plain = draws.uniform() < settings.unskipped_ratio
    layout, shifts, borders = lay_out(size, window, draws, settings, sampler, offered, plain)
    if settings.content not in ("skip", "aligned"):
        piece = int(shifts[0])
        return Window(counting(size)[piece : piece + window], layout.position_ids(), _NO_SEAMS, borders)
    # A chunk whose content is shifted further than that of the chunk before begins with a seam.
    seams = np.cumsum(layout.lengths)[:-1][np.diff(shifts) > 0]
    return Window(shifted_indices(layout.lengths, shifts), layout.position_ids(), seams, borders)


def lay_out(
    size: int,
    window: int,
    draws: Draws,
    settings: PositionSettings,
    sampler: Sampler,
    offered: np.ndarray | None,
    plain: bool = False,
) -> tuple[Layout, Sequence[int] | np.ndarray, int | None]:
    """Lay out a document.

    Args:
        size: L_x, its tokens.
        window: n ≤ L_x, the tokens to read.
        draws: its randomness.
        settings: content and target.
        sampler: what the settings select.
        offered: its borders, if it has any.
        plain: whether its chunks stay together.

    Returns:
        chunks with their skips u_i; their content shifts v_i: chunk i reads the tokens v_i + st_i + (0…l_i−1); and the
        number of borders inside the window, None if it was cut anywhere.
    """
    target = settings.target_length + settings.target_margin
    if settings.content == "aligned":
        # v_i = u_i: a chunk keeps the position that its text has in the document, so the document limits the target.
        target = min(target, size)
    # Drawn before the layout, as it decides which borders are inside the window.
    piece = draws.integer(0, size - window) if settings.content == "window" else 0
    inside = _inside(offered, piece, window, sampler)
    layout = sampler(Row(window, target, inside), draws)
    if plain:
        layout = Layout(layout.lengths, [0] * len(layout.lengths))
    shifts: Sequence[int] | np.ndarray = [piece] * len(layout.lengths)
    if settings.content == "aligned":
        shifts = layout.skips
    elif settings.content == "skip":
        shifts = _content_shifts(layout.skips, size - window, draws)
    return layout, shifts, None if inside is None else len(inside)


def _content_shifts(skips: Sequence[int] | np.ndarray, most: int, draws: Draws) -> list[int]:
    """Draw v_i in 0…most. A chunk whose positions do not jump reads on in the text where the chunk before it ends.

    If no positions jump, the window is one piece from anywhere in the document.
    """
    jumps = np.diff(skips) > 0
    if not jumps.any():
        return [draws.integer(0, most)] * len(skips)
    shifts = growing(len(skips), most, draws)
    for chunk, jumps_here in enumerate(jumps, start=1):
        if not jumps_here:
            shifts[chunk] = shifts[chunk - 1]
    return shifts


def _inside(offered: np.ndarray | None, piece: int, window: int, sampler: Sampler) -> np.ndarray | None:
    """Return the borders inside the window, as indices of its tokens; None if it may be cut anywhere."""
    if offered is None:
        return None
    if (np.diff(offered) <= 0).any():
        raise ValueError(f"the borders of a document must increase, but are {offered!r}")
    inside = offered - piece
    inside = inside[(inside > 0) & (inside < window)]
    return inside if inside.size or sampler.plain_without_borders else None
