"""What an evaluation keeps in its folder: results and answers, by everything that they depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pose_plugin._version import __version__
from pose_plugin.checkpoints.load import Source
from pose_plugin.evaluation import fingerprints
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.questions import Answers
from pose_plugin.evaluation.ranks import Ranks
from pose_plugin.evaluation.results import Result
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import Journal, digest


class Kept:
    """The rows of finished.jsonl in a folder.

    Args:
        folder: created by `open`.
        dtype: of the models, as `load` takes it.
        fresh: ignore what the folder holds.
    """

    def __init__(self, folder: Path, dtype: str, fresh: bool) -> None:
        self.folder, self._dtype, self._fresh = folder, dtype, fresh
        with writing(folder):
            self.journal = Journal(folder / fingerprints.FINISHED)
        if fresh:
            self.journal.rows = {}

    def open(self, ranks: Ranks) -> None:
        """Create the folder, forget what `fresh` forgets, and raise PoSEError now if results cannot be kept."""
        with writing(self.folder):
            if self._fresh and ranks.rank == 0:
                self.journal.path.unlink(missing_ok=True)
            # All have read the journal, and none has written to it: they divide the same work.
            ranks.meet()
            self.journal.open()

    def other_versions(self) -> list[str]:
        """Return the versions of this package whose results are in the folder too, and are not used."""
        return sorted({str(row.get("version")) for row in self.journal.all()} - {__version__})

    def answers(self, source: Source) -> Answers:
        """Return the answers of a model."""
        return Answers(self.journal, self._identity(source))

    def result(self, key: str) -> Result | None:
        """Return the last result, or None if there is none that can be parsed; then it is measured again."""
        rows = self.journal.get(key)
        try:
            return Result.from_dict(rows[-1]["result"]) if rows else None
        except (KeyError, TypeError, AttributeError):
            return None

    def keep(self, key: str, source: Source, measure: Measure, n: int, result: Any) -> None:
        """Keep a result, or the answer of an evaluator."""
        with writing(self.folder):
            self.journal.add(key, name=source.name, measure=measure.name, length=n, version=__version__, result=result)

    def key(self, source: Source, measure: Measure, n: int, what: str, answer: Any = None) -> str:
        """Return the hash of all that a row depends on.

        Args:
            what: "result", or "answer" of an evaluator.
            answer: what the evaluator said about this length.
        """
        return digest({
            "what": what,
            "measure": measure.name,
            "length": n,
            "model": self._identity(source),
            "options": measure.depends(),
            "answer": answer,
        })  # fmt: skip

    def _identity(self, source: Source) -> str:
        """Return the hash of all that a model's answers depend on; the display name does not count."""
        return digest({
            "weights": [
                fingerprints.of_model(source.base), source.revision, fingerprints.of_model(source.path)
            ],
            # It is the path as it was typed, and `weights` have that of the folder.
            "config": {key: value for key, value in source.config.to_dict().items() if key != "_name_or_path"},
            "dtype": self._dtype,
            # Another version may ask otherwise.
            "version": __version__,
        })  # fmt: skip


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise PoSEError if the disk refuses: no permission, no space, a file where a folder should be, …"""
    try:
        yield
    except OSError as error:
        raise PoSEError(
            f"--output {folder} cannot be used ({error}); name a folder that can be written. What is finished is kept"
        ) from error
