"""An evaluation that several processes share: torchrun or `accelerate launch` starts the same command on each GPU.

Every process keeps what it finds in the same journal. They meet before the first measurement, so that all of them
divide the same work, and after the last one, so that the first process can write the report.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def launched() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, as torchrun and `accelerate launch` set them."""
    if "MASTER_ADDR" not in os.environ:
        # A cluster may set RANK for jobs of one process.
        return 0, 1
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Ranks:
    """Divides work among the processes of a launch; the same on every one of them.

    Args:
        rank: of this process.
        world: number of processes.
    """

    def __init__(self, rank: int | None = None, world: int | None = None) -> None:
        here, count = launched()
        self.rank, self.world = here if rank is None else rank, count if world is None else world
        self._loads = [0.0] * self.world

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Return which process does each piece: the most expensive first, always the one with the least work so far."""
        found = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            found[i] = min(range(self.world), key=self._loads.__getitem__)
            self._loads[found[i]] += costs[i]
        return found

    def mine(self, items: Sequence[Item], number: int) -> list[Item]:
        """Return this process's part of the questions of a piece, given the piece's number.

        The first question of each piece goes to another process, so that pieces of one question are spread too.
        """
        return list(items[(self.rank - number) % self.world :: self.world])

    def meet(self, value: Any = None) -> list[Any]:
        """Wait for all processes, and return the value of each."""
        if self.world == 1:
            return [value]
        from pose_plugin.utils.distributed import meet

        return meet(value)

    def device(self) -> str | None:
        """Return the GPU of this process; None if the choice is `load`'s."""
        import torch

        if self.world == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
