"""The contract of a sampler: what each one declares, and the call that lays out a batch of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout

# One entry per document: increasing indices at which a chunk may begin, or None if it shows no borders at all.
Borders = Sequence["np.ndarray | None"]


class Row(NamedTuple):
    """One row, as a sampler sees it.

    Attributes:
        window: n, its tokens, at least 1.
        target: positions available to it, at least n.
        borders: where it may be cut, increasing indices of 1…n−1, shape (borders,); None: anywhere. Only samplers with
            a `border_finder` get and read them.
    """

    window: int
    target: int
    borders: np.ndarray | None = None


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
    """Decides how a window is cut into chunks and how far each chunk is moved.

    A new sampler is one frozen dataclass in its own file and one entry in `SAMPLERS` (samplers/__init__.py). Its fields
    are the settings that it reads, by their names in the `pose:` block; `chunks` and `variant` raise an error with a
    sampler that does not have them. Everything else asks the attributes and methods below.

        @dataclass(frozen=True)
        class Halves(Sampler):
            # Two halves, the second one at the end of the target.
            name = "halves"

            def most_chunks(self, window: int, borders: int = 0) -> int:
                return 2

            def __call__(self, row: Row, draws: Draws) -> Layout:
                half = row.window // 2
                return Layout([half, row.window - half], [0, row.target - row.window])

    Attributes:
        name: the value of `sampler:` that selects it.
        skips: False if it keeps plain positions 0…n−1.
        border_finder: finds where jumps are allowed; None for samplers that cut anywhere.
        needs_chats: borders are read from the loss mask of chats. A data set without a single border raises an error.
        plain_without_borders: True if a window without a border stays plain, False if it is cut anywhere.
        refused_contents: values of `content:` that it cannot work with, and why.
    """

    name: ClassVar[str]
    skips: ClassVar[bool] = True
    border_finder: ClassVar[type[BorderFinder] | None] = None
    needs_chats: ClassVar[bool] = False
    plain_without_borders: ClassVar[bool] = False
    refused_contents: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @cache
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
    def __call__(self, row: Row, draws: Draws) -> Layout:
        """Lay out a row; its last position is below its target."""
