"""The data of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from pose_plugin.plan.beacon import BeaconPlan
from pose_plugin.plan.config_reader import Inputs
from pose_plugin.plan.memory import Architecture, Memory
from pose_plugin.positions import Coverage, make_sampler
from pose_plugin.rope.plan import RopePlan
from pose_plugin.training.checks import warning_of_no_jumps


@dataclass(frozen=True)
class Bucket:
    """A range of distances.

    Attributes:
        first, last: the distances, both included.
        chance, rarest: the chance that a row holds a distance, as the mean of the range and for its rarest distance.
        rows, rows_rarest: the rows of the training that will hold it; None if the number of rows is not known.
    """

    first: int
    last: int
    chance: float
    rarest: float
    rows: float | None
    rows_rarest: float | None


@dataclass(frozen=True)
class Plan:
    """What a run will do. Lengths are in tokens, memory in bytes on each GPU.

    Attributes:
        memory_full_length: with rows of the target's length; None if nothing is extended.
        seen: the chance that a row holds each distance; None if nothing is extended or the target is too long.
        gpu_bytes: what a GPU has, if it was given.
        tokens_per_second: that each GPU trains in this run, if it was given.
        more_work: how many times as much work a token is in a row of the target's length.
    """

    inputs: Inputs
    model: Architecture
    memory: Memory
    memory_full_length: Memory | None = None
    rope: RopePlan | None = None
    seen: Coverage | None = None
    beacon: BeaconPlan | None = None
    buckets: list[Bucket] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    gpu_bytes: float | None = None
    tokens_per_second: float | None = None
    more_work: float = 1.0

    @property
    def rows_of_step(self) -> int:
        """Return the rows of a whole optimizer step on all GPUs."""
        run = self.inputs.run
        return run.rows * self.inputs.accumulate * run.groups

    @property
    def rows(self) -> int | None:
        """Return the rows of the training, or None if the number of steps is not known."""
        return self.inputs.rows

    @property
    def tokens(self) -> int | None:
        """Return the most tokens that the training reads, or None if the number of steps is not known."""
        return self.rows * self.window if self.rows else None

    @property
    def hours(self) -> float | None:
        """Return the hours of the training, or None if the steps or the speed are not known."""
        if not self.tokens or not self.tokens_per_second:
            return None
        return self.tokens / (self.tokens_per_second * self.inputs.run.gpus) / 3600

    @property
    def hours_full_length(self) -> float | None:
        """Return the hours with as many rows of the target's length, at the same operations per second."""
        if self.hours is None or self.target is None:
            return None
        return self.hours * self.more_work * self.target / self.window

    @property
    def window(self) -> int:
        """Return the trained window."""
        return self.inputs.run.window

    @property
    def target(self) -> int | None:
        """Return the target window, or None if nothing is extended."""
        return self.inputs.settings.target_length if self.inputs.settings else None

    @property
    def skips(self) -> bool:
        """Return whether positions of rows skip."""
        settings = self.inputs.settings
        return settings is not None and make_sampler(settings).skips and warning_of_no_jumps(settings) is None

    @property
    def shorter(self) -> bool:
        """Return whether rows are shorter than the target."""
        return self.target is not None and self.target > self.window
