"""What an evaluation leaves out, and why: lengths that do not fit in memory, models that do not run, …"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pose_plugin.evaluation.memory import TooLittleMemory
from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class LeftOut:
    """What could not be measured.

    Attributes:
        who: name of the model; None for all.
        name: names of the measures.
        length: in tokens; 0 for all.
        reason: to read.
        longer: whether longer ones were not tried.
    """

    who: str | None
    name: str
    length: int
    reason: str
    longer: bool = False


class AllLeftOut:
    """Everything that is left out so far.

    Args:
        where_possible: whether lengths that do not fit in memory may be left out; else they count as a failure.

    Attributes:
        failed: whether some of it should have been measured.
    """

    def __init__(self, where_possible: bool) -> None:
        self.where_possible, self.failed = where_possible, False
        self.found: list[LeftOut] = []

    def add(self, who: str | None, name: str, n: int, error: PoSEError, longer: bool = False) -> None:
        """Leave something out because of an error, and print that; see `LeftOut`."""
        print(f"  {name}{f' at {n}' if n else ''} is left out: {error}", flush=True)
        self.failed |= not (self.where_possible and isinstance(error, TooLittleMemory))
        more = "; longer ones were not tried" if longer else ""
        self.found.append(LeftOut(who, name, n, f"{error}{more}", longer))

    def has(self, who: str | None, name: str, n: int) -> bool:
        """Return whether a measure of a model is left out at a length."""
        return any(
            each.who == who
            and name in each.name.split(", ")
            and (each.length in (0, n) or (each.longer and n > each.length))
            for each in self.found
        )

    def join(self, everyone: Iterable[tuple[list[LeftOut], bool]]) -> None:
        """Take over `found` and `failed` of all processes; the first one's reason for the same thing counts."""
        lists, failed = zip(*everyone, strict=True)
        self.found = list({(e.who, e.name, e.length): e for found in reversed(lists) for e in found}.values())
        self.failed = any(failed)

    def notes(self, who: str) -> list[str]:
        """Return what is left out of a model, for the report."""
        lengths: dict[tuple[str, str], list[str]] = {}
        for each in self.found:
            if each.who in (None, who):
                lengths.setdefault((each.name, each.reason), []).extend([str(each.length)] if each.length else [])
        return [
            f"{name}{' at ' + ', '.join(at) if at else ''} was left out: {why}" for (name, why), at in lengths.items()
        ]
