"""What the weights that are saved have seen: after a resume, and after the best checkpoint was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pose_plugin.checkpoints import read_record
from pose_plugin.collator import PositionCollator
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json
from pose_plugin.utils.log import log


class History:
    """Counts of the documents that the first process drew, over the interruptions of a run.

    Attributes:
        checkpoint: the one that the run resumes, if any. Its record holds the counts up to there.
        idle_steps: steps with a learning rate of 0 after the last one. transformers makes one if the checkpoint of the
            last step is resumed.
        of_loaded_weights: entries of the record's `trained` that differ from the end of the run, because the weights
            of an earlier checkpoint were loaded; empty if none were.
    """

    def __init__(self, collator: PositionCollator) -> None:
        self._collator = collator
        self.checkpoint: str | None = None
        self._earlier: dict[str, int] = {}
        self.idle_steps = 0
        self.of_loaded_weights: dict[str, Any] = {}

    def begin(self, again: bool = False) -> None:
        """Start counting.

        The collator may have served an earlier run of this process, or an attempt that `auto_find_batch_size` gave up.

        Args:
            again: whether a resumed run draws all earlier documents again, to skip them.
        """
        self._collator.restart_counts()
        before = _trained(self.checkpoint) if self.checkpoint else {}
        self._earlier = {} if again else before.get("first_process", {})
        made = _step(Path(self.checkpoint)) if self.checkpoint else None
        self.idle_steps = max(0, made - before.get("steps", made)) if made is not None else 0
        self.of_loaded_weights = {}

    def loaded(self, checkpoint: str, step: int | None) -> None:
        """Note that the weights are now those of a checkpoint, saved after `step` steps."""
        record = _trained(checkpoint)
        kept: dict[str, Any] = {name: record[name] for name in ("epochs", "first_process") if name in record}
        self.of_loaded_weights = {**kept, "steps": record.get("steps", step)}

    def drawn(self) -> dict[str, int]:
        """Return the counts of `PositionCollator.trained` since the run began, before it was resumed."""
        found = {}
        for name, count in self._collator.trained().items():
            earlier = self._earlier.get(name, 0)
            # The farthest position is a maximum; the others add up.
            found[name] = max(count, earlier) if name == "farthest" else count + earlier
        return found


def _trained(checkpoint: str) -> dict[str, Any]:
    record: dict[str, Any] = read_record(checkpoint).get("trained") or {}
    return record


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the last checkpoint in a folder, even if it cannot be resumed; see `whole_checkpoint`."""
    return next(map(str, _checkpoints(Path(folder))), None)


def whole_checkpoint(checkpoint: str, output: str) -> str | None:
    """Return what to resume if a checkpoint was interrupted while it was saved: the one before it, with a warning.

    Axolotl's auto_resume_from_checkpoints picks the last one; a run that was killed once could never be resumed.

    Args:
        checkpoint: what was to be resumed.
        output: the run's folder. If a killed run left no other checkpoint there, the run starts from the beginning.

    Returns:
        a checkpoint; None for the beginning.
    """
    path = Path(checkpoint)
    # transformers raises if there is no such folder: its name may be misspelt.
    if _step(path) is None or not path.exists() or _is_whole(path):
        return checkpoint
    earlier = (each for each in _checkpoints(path.parent) if _step(each) < _step(path))
    before = next((str(each) for each in earlier if _is_whole(each)), None)
    if before is None and path.resolve().parent != Path(output).resolve():
        return checkpoint
    log.warning(
        "resume_from_checkpoint=%s was interrupted while it was saved; %s", path,
        f"resuming {before} instead" if before else "no other can be resumed, so the run starts from the beginning",
    )  # fmt: skip
    return before


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the last one first."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step(path) is not None]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> Any:
    """Return the number in a checkpoint's name, None for other folders."""
    prefix, _, number = path.name.rpartition("-")
    return int(number) if prefix == PREFIX_CHECKPOINT_DIR and number.isdigit() else None


def _is_whole(path: Path) -> bool:
    """Return whether the trainer's state, which is written last, is there."""
    try:
        return bool(read_json(path / "trainer_state.json"))
    except (OSError, PoSEError):
        return False
