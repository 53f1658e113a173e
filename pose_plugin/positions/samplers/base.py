"""The contract of a sampler: what each one declares, and the call that lays out a batch of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout

# One entry per row: sorted indices in the window at which a chunk may begin. An empty array leaves the row plain; None
# means that the row shows no borders at all, and it may be cut anywhere.
Borders = Sequence["np.ndarray | None"]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, as a sampler sees them.

    Attributes:
        windows: n, the tokens of each row, shape (rows,), int64.
        targets: positions available to each row, at least n, shape (rows,), int64.
        borders: where rows may be cut; only samplers with a `border_finder` get and read them.
    """

    windows: np.ndarray
    targets: np.ndarray
    borders: Borders | None = None


class BorderFinder(Protocol):
    """Finds the borders of one document. A class, because collators travel to dataloader workers by pickle."""

    def __init__(self, tokenizer: Any) -> None: ...

    def __call__(self, tokens: np.ndarray, supervised: np.ndarray | None) -> np.ndarray | None:
        """Return sorted indices of 1…n−1 at which a chunk may begin, or None if the document shows no borders.

        Args:
            tokens: token ids, shape (n,).
            supervised: which tokens are in the loss, shape (n,), bool; None if the row does not say, or if the sampler
                does not set `needs_chats`.
        """
        ...


@dataclass(frozen=True)
class Sampler(ABC):
    """Decides how each window is cut into chunks and how far each chunk is moved.

    A new sampler is one frozen dataclass in its own file and one entry in `SAMPLERS` (samplers/__init__.py). Its fields
    are the settings that it reads, by their names in the `pose:` block; `chunks` and `variant` raise an error with a
    sampler that does not have them. Everything else asks the attributes and methods below.

        @dataclass(frozen=True)
        class Halves(Sampler):
            # Two halves, the second one at the end of the target.
            name = "halves"

            def most_chunks(self, window: int, borders: int = 0) -> int:
                return 2

            def __call__(self, rows: Rows, draws: Draws) -> Layout:
                half = rows.windows // 2
                lengths = np.stack([half, rows.windows - half], axis=1)
                skips = np.stack([np.zeros_like(half), rows.targets - rows.windows], axis=1)
                return Layout(lengths, skips)

    Attributes:
        name: the value of `sampler:` that selects it.
        skips: False if it keeps plain positions 0…n−1.
        border_finder: finds where jumps are allowed; None for samplers that cut anywhere.
        needs_chats: borders are read from the loss mask of chats. A data set without a single border raises an error.
        refused_contents: values of `content:` that it cannot work with, and why.
    """

    name: ClassVar[str]
    skips: ClassVar[bool] = True
    border_finder: ClassVar[type[BorderFinder] | None] = None
    needs_chats: ClassVar[bool] = False
    refused_contents: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Return the names of the settings that it reads."""
        return tuple(field.name for field in fields(cls))

    @abstractmethod
    def most_chunks(self, window: int, borders: int = 0) -> int:
        """Return the most chunks that a row can have.

        Args:
            window: n, the tokens of the row.
            borders: how many borders the row has; 0 for samplers without a `border_finder`.
        """

    def usual_spacing(self, window: int) -> int:
        """Return the tokens from one border to the next in usual text, for simulations before any data is read."""
        return window

    @abstractmethod
    def __call__(self, rows: Rows, draws: Draws) -> Layout:
        """Lay out a batch of rows; the last position of each row is below its target.

        A row's layout must not depend on the other rows of the batch: draw as many numbers for each row, regardless
        of the others.

        Args:
            rows: lengths, targets and borders.
            draws: randomness, one independent stream per row.
        """
