"""Questions to a model, the answers that are known already, and what answers them in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pose_plugin._version import __version__
from pose_plugin.utils.journal import Journal, digest


class Question(Protocol):
    """One prompt.

    Attributes:
        ids: its tokens.
        budget: the most tokens of the answer.
        shared: how many of the first tokens the neighbouring questions have too; they are read once. 0: none.
    """

    @property
    def ids(self) -> list[int]: ...
    @property
    def budget(self) -> int: ...
    @property
    def shared(self) -> int: ...


class Answers:
    """The answers of one model by prompt.

    Args:
        journal: where they are kept; None: in memory only.
        model: hash of everything that the model's answers depend on.
    """

    def __init__(self, journal: Journal | None = None, model: str = "") -> None:
        self._journal, self._model = journal, model
        self._found: dict[str, str] = {}

    def get(self, question: Question) -> str | None:
        """Return the answer; None if there is none yet."""
        key = self._key(question)
        if key not in self._found and self._journal is not None:
            rows = [row for row in self._journal.get(key) if isinstance(row.get("answer"), str)]
            if rows:
                self._found[key] = rows[-1]["answer"]
        return self._found.get(key)

    def keep(self, question: Question, answer: str, **more: Any) -> None:
        """Keep an answer, with `more` columns in the journal; it is on the disk when this returns."""
        key = self._key(question)
        self._found[key] = answer
        if self._journal is not None:
            self._journal.add(key, version=__version__, model=self._model, answer=answer, **more)

    def rows(self) -> list[dict[str, Any]]:
        """Return the journal's rows of this model."""
        return [] if self._journal is None else [row for row in self._journal.all() if row.get("model") == self._model]

    def _key(self, question: Question) -> str:
        return digest([self._model, question.ids, question.budget, list(getattr(question, "stop", ()))])


class Answerer:
    """Something that answers questions and is not a model of this process, e.g. a server."""

    def answer(self, questions: Sequence[Question], keep: Callable[..., None]) -> None:
        """Answer questions, and call `keep` with each and its answer as soon as it is there."""
        raise NotImplementedError

    def require_fits(self, length: int) -> None:
        """Raise TooLittleMemory if a prompt of `length` tokens, with its answer, is too long."""
        raise NotImplementedError


def unanswered(questions: Sequence[Question], kept: Answers) -> list[Question]:
    """Return the questions without an answer, equal ones once."""
    found = {kept._key(question): question for question in questions if kept.get(question) is None}
    return list(found.values())


def groups(questions: Sequence[Question]) -> list[list[Question]]:
    """Return questions in groups of neighbours that share their first tokens; others are groups of one."""
    found: list[list[Question]] = []
    start: list[int] | None = None
    for question in questions:
        begin = question.ids[: question.shared]
        if begin and begin == start:
            found[-1].append(question)
        else:
            found.append([question])
        start = begin or None
    return found
