"""The data of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from pose_plugin.plan.beacon import BeaconPlan
from pose_plugin.plan.config_reader import Inputs
from pose_plugin.plan.memory import Architecture, Memory
from pose_plugin.positions import Coverage
from pose_plugin.rope.plan import RopePlan


@dataclass(frozen=True)
class Bucket:
    """Distances first…last: how likely a row holds one and the rows that will have, in the mean and of the rarest."""

    first: int
    last: int
    chance: float
    rarest: float
    rows: float | None
    rows_rarest: float | None


@dataclass(frozen=True)
class Plan:
    """What will happen; lengths in tokens, memory in bytes on each GPU."""

    inputs: Inputs
    model: Architecture
    memory: Memory
    memory_full_length: Memory | None
    rope: RopePlan | None = None
    seen: Coverage | None = None
    beacon: BeaconPlan | None = None
    buckets: list[Bucket] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    gpu_bytes: float | None = None

    @property
    def rows_of_step(self) -> int:
        run = self.inputs.run
        return run.rows * self.inputs.accumulate * run.gpus

    @property
    def rows(self) -> int | None:
        """Rows of the training, None where the steps are not known."""
        return self.rows_of_step * self.inputs.steps if self.inputs.steps else None

    @property
    def window(self) -> int:
        return self.inputs.run.window

    @property
    def target(self) -> int | None:
        return self.inputs.settings.target_length if self.inputs.settings else None
