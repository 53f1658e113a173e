"""Measures that read nothing but answers to prompts, so that they can also be asked of a server.

    class Colours(Asking):
        name, title, label = "colours", "Colours named", "share"

        def questions(self, length):
            return [Prompt("", ids, budget=4, length=length, depth=None, expected=("red",)) for ids in …]

        def judge(self, length, questions, answers):
            return Result(self.name, "…", tuple(Row(length, float("red" in text)) for text in answers))

The rest follows: batches, the cache of a shared beginning, servers, the division among ranks, and the journal that
keeps each answer, so that no prompt is answered twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from pose_plugin._version import __version__
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.results import Result
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
        """Keep an answer; it is on the disk when this returns.

        Args:
            question: what was asked.
            answer: what the model wrote.
            more: columns of the journal.
        """
        key = self._key(question)
        self._found[key] = answer
        if self._journal is not None:
            self._journal.add(key, version=__version__, model=self._model, answer=answer, **more)

    def rows(self) -> list[dict[str, Any]]:
        """Return the journal's rows of this model."""
        return [] if self._journal is None else [row for row in self._journal.all() if row.get("model") == self._model]

    def _key(self, question: Question) -> str:
        return digest([self._model, question.ids, question.budget, list(getattr(question, "stop", ()))])


class Asking(Measure):
    """A measure that asks questions and judges the answers; subclasses write `questions` and `judge`."""

    higher_is_better: ClassVar[bool] = True
    on_a_server: ClassVar[bool] = True

    def questions(self, length: int) -> Sequence[Question]:
        """Return what is asked at a length. It depends on the settings alone."""
        raise NotImplementedError

    def judge(self, length: int, questions: Sequence[Any], answers: Sequence[str]) -> Result:
        """Return the result, one answer per question."""
        raise NotImplementedError

    def run(self, model: Any, length: int) -> Result:
        questions = self.questions(length)
        kept = self.answer(model, length, questions)
        return self.judge(length, questions, [kept.get(question) or "" for question in questions])

    def answer(self, model: Any, length: int, questions: Sequence[Question]) -> Answers:
        """Answer the questions that have no answer yet; each answer is kept as soon as it is known."""
        from pose_plugin.evaluation.model import progress_bar
        from pose_plugin.evaluation.served import ServedModel

        kept: Answers = self._kept or Answers()
        missing = unanswered(questions, kept)
        with progress_bar(f"{self.name} {length}", len(missing), "prompt", self.progress) as bar:

            def keep(question: Question, text: str, **more: Any) -> None:
                kept.keep(question, text, **more)
                bar.update()

            if isinstance(model, ServedModel):
                model.answer(missing, keep)
            elif missing:
                from pose_plugin.evaluation.generation import generate

                generate(model, self._tokenizer, missing, keep, length, self.batch_size)
        return kept


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
