"""One rank of two machines with two ranks each, started by a real launcher: several TRL runs, one after the other.

Writes what this rank saw to `folder/rank<N>.json`. Machines are told apart by the ranks: 0 and 1 are on the first one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration import distributed, trl_runs

DDP = distributed.Case("trl", "ddp", "full")
# Four rows per step, however many ranks share them.
FOUR_ROWS: dict[str, Any] = {"num_train_epochs": 2, "max_steps": 4}
# Name of a run → its settings. {machine} is the number of the machine, whose disk no other sees.
RUNS: dict[str, dict[str, Any]] = {
    "shared": {"out": "shared"},
    "own": {"out": "machine{machine}/own"},
    "each": {"out": "machine{machine}/each", "save_on_each_node": True},
}


def four_rows(
    folder: Path, case: distributed.Case = DDP, resume: str | None = None, out: str = "out", **config: Any
) -> dict[str, Any]:
    """Train four steps of four rows; return what this rank saw, the positions of its documents included."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = {f"per_device_{kind}_batch_size": 4 // world for kind in ("train", "eval")}
    records: list[trl_runs.Record] = []
    make = trl_runs.sft

    def recorded(*args: Any, **kwargs: Any) -> Any:
        trainer = make(*args, **kwargs)
        records.append(trl_runs.Record(trainer.model))
        return trainer

    trl_runs.sft = recorded
    try:
        found = distributed.trl(folder, case, resume, out, **FOUR_ROWS, **rows, **config)
    finally:
        trl_runs.sft = make
    return {**found, "steps": records[0].steps}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    found = {}
    for name, config in RUNS.items():
        found[name] = four_rows(folder, **{**config, "out": config["out"].format(machine=rank // 2)})
    try:
        four_rows(folder, out="faulty", fault="frequencies")
    except Exception as error:
        found["faulty"] = f"{type(error).__name__}: {error}"
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
