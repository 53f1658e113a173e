"""What was paid for: the answers on disk, and the tokens and the money that they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pose_plugin.utils.clean import Cleaner
from pose_plugin.utils.journal import Journal
from pose_plugin.utils.log import log
from pose_plugin.utils.server import MOST_TOKENS

Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class Answer(BaseModel):
    """One answer of the server, usable or not, as both are paid for. One line of `journal.jsonl`.

    Attributes:
        key: hash of the request.
        attempt: from 1; a request whose answer is unusable is sent again.
        item, part: the row, and the part of it, that it is for.
        content: what the model wrote.
        finish: why it stopped.
        input_tokens, output_tokens: as billed, or estimated if the server does not count.
        model: the model that answered, as the server says.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    attempt: int = Field(ge=1)
    item: str
    part: str
    content: str
    finish: str
    input_tokens: Tokens
    output_tokens: Tokens
    model: str


class Answers:
    """The answers of an output folder. Each is on disk before it is used, so none is paid for twice.

    Args:
        path: the journal. A line of it that is not an answer is ignored, and requested again.
        clean: the door for what servers wrote, now or in an earlier run.
        write: lock the file for this run. PoSEError if another run writes to it.
    """

    def __init__(self, path: Path, clean: Cleaner, write: bool = False) -> None:
        self._journal, self._clean = Journal(path), clean
        if write:
            self._journal.open(lock=True)
        self._by_key: dict[str, list[Answer]] = {}
        damaged = self._journal.damaged
        for row in self._journal.all():
            try:
                self._keep(self._cleaned(Answer.model_validate(row)))
            except ValidationError:
                damaged += 1
        if damaged:
            log.warning("%s: %d damaged lines are ignored, and requested again", path, damaged)

    def _cleaned(self, answer: Answer) -> Answer:
        line, content = self._clean.line, self._clean.text(answer.content)
        return answer.model_copy(
            update={"content": content, "finish": line(answer.finish), "model": line(answer.model)}
        )

    def _keep(self, answer: Answer) -> None:
        self._by_key.setdefault(answer.key, []).append(answer)

    def of(self, key: str) -> list[Answer]:
        """Return the answers to a request, the oldest first."""
        return self._by_key.get(key, [])

    def all(self) -> list[Answer]:
        return [answer for answers in self._by_key.values() for answer in answers]

    def add(self, answer: Answer) -> Answer:
        """Store an answer, and return it as it is stored. It is on the disk when this returns."""
        answer = self._cleaned(answer)
        self._journal.add(**answer.model_dump())
        self._keep(answer)
        return answer

    def close(self) -> None:
        self._journal.close()


@dataclass
class Ledger:
    """Tokens and money of an output folder, over all its runs. Prices are per million tokens.

    The cost of a request is unknown before it is answered, because the server counts with its own tokenizer. So
    `margin` times our count of the prompt is reserved, and the longest answer.
    """

    price_input: float | None = None
    price_output: float | None = None
    budget: float | None = None
    margin: float = 1.25
    input_tokens: int = 0
    output_tokens: int = 0
    reserved: float = 0.0

    def cost(self, input_tokens: float, output_tokens: float) -> float | None:
        """Return the price of these tokens, None without prices."""
        if self.price_input is None or self.price_output is None:
            return None
        return (input_tokens * self.price_input + output_tokens * self.price_output) / 1e6

    @property
    def spent(self) -> float | None:
        return self.cost(self.input_tokens, self.output_tokens)

    def reserve(self, input_tokens: int, output_tokens: int) -> float | None:
        """Reserve the most that a request may cost. Returns it for `settle`, None if the budget might be exceeded."""
        price = self.cost(input_tokens * self.margin, output_tokens) or 0.0
        if self.budget is not None and (self.spent or 0.0) + self.reserved + price > self.budget:
            return None
        self.reserved += price
        return price

    def settle(self, price: float, input_tokens: int = 0, output_tokens: int = 0, estimate: int = 0) -> None:
        """Replace a reservation by what was used.

        Args:
            estimate: our count of the prompt. The margin grows if the server counts more.
        """
        self.reserved -= price
        self.add(input_tokens, output_tokens)
        if estimate > 0:
            self.margin = max(self.margin, input_tokens / estimate)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
