"""What all retrieval measures share: prompts of an exact length, greedy answers, one row per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, StrictInt

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.asking import Asking
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.tables import counted


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        kind: e.g. "single".
        ids: the prompt; with `budget` tokens of answer it is exactly `length` tokens, or at most (`exact`).
        budget: tokens that are decoded.
        length: tokens of prompt plus answer.
        depth: where the answer is, 0 (start) to 1 (end); None if that does not apply.
        expected: what has to be in the answer.
        distance: tokens from the beginning of the fact asked for to the end of prompt and answer, if known.
        exact: whether prompt and answer must have exactly `length` tokens.
        shared: how many of the first tokens the neighbouring prompts have too; see `asking.Question`.
    """

    kind: str
    ids: list[int]
    budget: int
    length: int
    depth: float | None
    expected: tuple[str, ...]
    distance: int | None = None
    exact: bool = True
    shared: int = 0

    def __post_init__(self) -> None:
        # A prompt of another length would silently measure another length.
        tokens = len(self.ids) + self.budget
        if tokens > self.length or (self.exact and tokens < self.length):
            raise AssertionError(f"a prompt of {len(self.ids)} + {self.budget} tokens is not {self.length}")


class Retrieval(Asking):
    """A measure that asks for something hidden in a prompt; subclasses make the prompts and score the answers.

    Attributes:
        rules: by kind, how an answer is scored.
        steps: about how many tokens an answer has.
    """

    x_label: ClassVar[str] = "prompt length (tokens)"
    rules: ClassVar[dict[str, str]]
    steps: ClassVar[int] = 16

    trials: PositiveInt = Field(
        50, description="prompts per length and kind, rounded up to equally many for each depth",
        json_schema_extra={"training": 10},
    )  # fmt: skip
    filler: str | None = Field(
        None, description="a file with a real text to hide things in; default: a few sentences, repeated",
        json_schema_extra={"file": True},
    )  # fmt: skip
    seed: StrictInt = Field(0, description="random seed for what is hidden and where")

    def asked(self) -> Sequence[str]:
        """Return the kinds of prompts."""
        return list(self.rules)

    def prompts(self, length: int) -> list[Prompt]:
        """Return the prompts of a length, by kind. They depend on the settings alone."""
        raise NotImplementedError

    def score(self, answer: str, prompt: Prompt) -> float:
        """Return how much of what was asked for is in an answer, 0 to 1."""
        raise NotImplementedError

    def details(self, answer: str, prompt: Prompt) -> dict[str, Any]:
        """Return more to keep with an answer."""
        return {}

    def setting(self) -> str:
        """Return what the definition says about the prompts."""
        raise NotImplementedError

    def chance(self, prompt: Prompt) -> str:
        """Return what guessing among all that is in the prompt is worth; "" for nothing."""
        return ""

    def note(self, prompts: Sequence[Prompt]) -> str:
        """Return what a reader must know about prompts of one kind and length; "" for nothing."""
        chance = self.chance(prompts[0])
        return chance and f"chance {chance}"

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        """Also make the prompts of the shortest length: the longer ones can only be easier to make."""
        super().prepare(tokenizer, lengths, windows)
        self.prompts(self._lengths[0])

    def work(self, length: int) -> Work:
        return Work(length, self.trials * len(self.asked()), self.steps)

    def questions(self, length: int) -> list[Prompt]:
        return self.prompts(length)

    def judge(self, length: int, questions: Sequence[Prompt], answers: Sequence[str]) -> Result:
        first = {prompt.kind: prompt for prompt in reversed(questions)}
        notes = {kind: self.note([p for p in questions if p.kind == kind]) for kind in first}
        rows = []
        for prompt, answer in zip(questions, answers, strict=True):
            score, details = self.score(answer, prompt), {"expected": list(prompt.expected), "answer": answer}
            details |= self.details(answer, prompt)
            where = (prompt.kind, prompt.depth, prompt.distance)
            rows.append(Row(length, score, 1, *where, note=notes[prompt.kind], details=details))
        examples = {kind: self._tokenizer.decode(first[kind].ids) for kind in self.asked()}
        return Result(self.name, self._definition(), tuple(rows), examples)

    def _definition(self) -> str:
        rules = "; ".join(f"{kind}: {self.rules[kind]}" if kind else self.rules[kind] for kind in self.asked())
        prompts = counted(self.trials, "prompt")
        return (
            f"{self.name.capitalize()}: {prompts} per length and kind, {self.setting()}, seed {self.seed}; "
            "prompt and answer together are exactly `length` tokens; plain text without a chat template, greedy "
            f"decoding. Score: {rules}."
        )

    @classmethod
    def show(cls, row: Row) -> str:
        return f"{row.score:.2f} ±{row.standard_error:.2f}"


def require_depths(depths: Sequence[float], trials: int) -> None:
    """Raise PoSEError for a depth outside 0…1, or for more depths than prompts."""
    if not 1 <= len(depths) <= trials:
        raise PoSEError(
            f"depths has {len(depths)} values for trials={trials}; each depth needs a trial: raise trials to "
            f"{max(len(depths), 1)} or give 1 to {trials} depths"
        )
    outside = [depth for depth in depths if not 0 <= depth <= 1]
    if outside:
        raise PoSEError(f"depths={outside[0]} is outside 0…1; 0 is the start of the text, 1 its end")


def for_each_depth(trials: int, depths: Sequence[float]) -> int:
    """Return the trials, rounded up to equally many for each depth: otherwise the first depths would weigh more."""
    return -(-trials // len(depths)) * len(depths)
