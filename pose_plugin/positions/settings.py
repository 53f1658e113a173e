"""The settings that decide a document's positions, as this package's maths reads them."""

from __future__ import annotations

from typing import Protocol


class PositionSettings(Protocol):
    """What drawing and coverage read; `PoSESettings` has it all. A sampler's own settings are its fields."""

    @property
    def target_length(self) -> int: ...
    @property
    def train_length(self) -> int | None: ...
    @property
    def sampler(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def unskipped_ratio(self) -> float: ...
    @property
    def target_margin(self) -> int: ...
    @property
    def seed(self) -> int: ...
