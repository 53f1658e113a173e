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
from typing import Any, ClassVar

from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.questions import Answerer, Answers, Question, unanswered
from pose_plugin.evaluation.results import Result


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

        kept: Answers = self._kept or Answers()
        missing = unanswered(questions, kept)
        if not missing:
            return kept
        with progress_bar(f"{self.name} {length}", len(missing), "prompt", self.progress) as bar:

            def keep(question: Question, text: str, **more: Any) -> None:
                kept.keep(question, text, measure=self.name, length=length, **more)
                bar.update()

            if isinstance(model, Answerer):
                model.answer(missing, keep)
            else:
                from pose_plugin.evaluation.generation import generate

                generate(model, self._tokenizer, missing, keep, length, self.batch_size)
        return kept
