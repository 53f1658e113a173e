"""What all retrieval measures share: prompts of an exact length, greedy answers, one row per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, StrictInt

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.measure import Measure, Windows
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError


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
    """

    kind: str
    ids: list[int]
    budget: int
    length: int
    depth: float | None
    expected: tuple[str, ...]
    distance: int | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        # A prompt of another length would silently measure another length.
        tokens = len(self.ids) + self.budget
        if tokens > self.length or (self.exact and tokens < self.length):
            raise AssertionError(f"a prompt of {len(self.ids)} + {self.budget} tokens is not {self.length}")


class Retrieval(Measure):
    """A measure that asks for something hidden in a prompt; subclasses make the prompts and score the answers.

    Attributes:
        rules: by kind, how an answer is scored.
    """

    higher_is_better: ClassVar[bool] = True
    x_label: ClassVar[str] = "prompt length (tokens)"
    rules: ClassVar[dict[str, str]]

    trials: PositiveInt = Field(50, description="prompts per length and kind", json_schema_extra={"training": 10})
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

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        """Also make the prompts of the shortest length: the longer ones can only be easier to make."""
        super().prepare(tokenizer, lengths, windows)
        self.prompts(self._lengths[0])

    def work(self, length: int) -> Work:
        return Work(length, self.trials * len(self.asked()), steps=16)

    def run(self, model: Any, length: int) -> Result:
        import torch

        from pose_plugin.evaluation.memory import in_batches
        from pose_plugin.evaluation.model import device_of, evaluating, greedy, progress_bar

        prompts, ends = self.prompts(length), end_tokens(self._tokenizer, model)
        answers: dict[int, str] = {}

        def run(batch: Sequence[int], chunk: int | None) -> list[None]:
            ids = torch.tensor([prompts[i].ids for i in batch], device=device_of(model))
            for i, tokens in zip(batch, greedy(model, ids, prompts[batch[0]].budget, chunk).tolist(), strict=True):
                end = next((at for at, token in enumerate(tokens) if token in ends), None)
                answers[i] = self._tokenizer.decode(tokens[:end], skip_special_tokens=True)
            bar.update(len(batch))
            return [None] * len(batch)

        with evaluating(model), progress_bar(f"{self.name} {length}", len(prompts), "prompt", self.progress) as bar:
            # A batch has no padding: its prompts have the same number of tokens, and of tokens to decode.
            sizes = [(prompt.budget, len(prompt.ids)) for prompt in prompts]
            for size in dict.fromkeys(sizes):
                same = [i for i, other in enumerate(sizes) if other == size]
                in_batches(model, same, length, run, self.batch_size)
        first = {prompt.kind: prompt for prompt in reversed(prompts)}
        notes = {kind: chance and f"chance {chance}" for kind, p in first.items() for chance in [self.chance(p)]}
        rows = []
        for i, prompt in enumerate(prompts):
            score, details = self.score(answers[i], prompt), {"expected": list(prompt.expected), "answer": answers[i]}
            details |= self.details(answers[i], prompt)
            where = (prompt.kind, prompt.depth, prompt.distance)
            rows.append(Row(length, score, 1, *where, note=notes[prompt.kind], details=details))
        examples = {kind: self._tokenizer.decode(first[kind].ids) for kind in self.asked()}
        return Result(self.name, self._definition(), tuple(rows), examples)

    def _definition(self) -> str:
        rules = "; ".join(f"{kind}: {self.rules[kind]}" if kind else self.rules[kind] for kind in self.asked())
        return (
            f"{self.name.capitalize()}: {self.trials} prompts per length and kind, {self.setting()}, seed {self.seed}; "
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


def end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Return the tokens that end an answer, by the tokenizer and by the model's generation config."""
    config = getattr(model, "generation_config", None)
    ends = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    return {i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None}
