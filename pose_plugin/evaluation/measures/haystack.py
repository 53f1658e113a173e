"""Many questions on one cached haystack: facts hidden in a real text, which is read once; each is asked for alone.

    intro | text … fact … text … fact … text | question answer
    ├───────────── read once ────────────────┤ ├── removed ──┤

Reading 32,768 tokens takes minutes on a CPU, and answering a question takes seconds. So forty facts cost little more
than one, and the distance from a fact to the end of the text says how far back the model can look.

`build`, `score` and `band` are pure. The cache is that of `evaluation/generation.py`, or a server's own prefix cache.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, StrictInt

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.asking import Asking
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.prompts import ids_of_each, leading_ids, random_key, require_room, token_ids
from pose_plugin.evaluation.results import Result, Row, Work
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.tables import counted

TOKENS_PER_FACT = 200
"""Short texts hold fewer facts, so that most of a haystack is text."""
INTRO = (
    "There is important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
# Each is a sentence without its number. Facts that share their words are confused with each other by small models.
NAMES = (
    "The code for the green door is", "Captain Harlow has telephone extension",
    "The lighthouse was built with serial number", "Our accountant filed invoice number",
    "The bus depot is stop number", "The oldest vase has museum number",
    "Mrs. Albright won the lottery with ticket number", "The satellite sends on frequency",
    "The stolen bicycle carries frame number", "Patient Rosenthal has file number",
    "The bakery opens its till with PIN", "The atlas stands on shelf number", "The elephant wears the ear tag",
    "Inspector Boyle wears badge number", "Springfield is voting district number", "The oldest wine is bottle number",
    "The gate keeper wants the password", "The printer needs cartridge number",
    "Professor Ito published theorem number", "Grandmother opens her safe with combination",
    "The pirate buried his chest at mile", "The organ builder tuned pipe number", "Pilots call the airport by code",
    "The chess club registered member number", "Engineers tightened valve number", "The comet has catalogue number",
    "The Kyoto hotel gave us room number", "The shepherd branded his ram with number",
    "Customs officers opened container number", "The telescope points at star number",
    "Judge Whitmore closed case number", "The vending machine accepts coupon number",
    "Divers found the wreck at buoy number", "The tailor ordered button number", "Nurse Okafor answers on pager",
    "The harbour tram is line number", "Beekeepers painted on the hive the number",
    "The soup is made from recipe number", "Scouts radio the camp on channel", "Widows fill in tax form number",
)  # fmt: skip


@dataclass(frozen=True)
class Wording:
    """The words of a haystack. `{name}` and `{key}` stand for a fact's name and its digits.

    Attributes:
        intro: the beginning of the text.
        fact: one fact, on its own line.
        question: what follows the text; the answer follows it. It may hold `{name}` only.
        names: what facts are about; each is used at most once in a haystack.
        digits: length of a key.
    """

    intro: str = INTRO
    fact: str = "{name} {key}.\n{name} {key}.\n{name} {key}."
    question: str = "\n\n{name}"
    names: tuple[str, ...] = NAMES
    digits: int = 4


@dataclass(frozen=True)
class Fact:
    """One fact of a text; `distance` counts the tokens between its end and the end of the text."""

    name: str
    key: str
    distance: int


@dataclass(frozen=True)
class FactText:
    """A text with facts, as token ids; `facts` are in reading order."""

    ids: list[int]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class FactQuestion:
    """The question for one fact of a text; `asked` are its token ids."""

    text: FactText
    fact: Fact
    asked: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.text.ids, *self.asked]

    @property
    def budget(self) -> int:
        # One token per digit is the most that a tokenizer takes; a space and a line break may be before them.
        return len(self.fact.key) + 2

    @property
    def shared(self) -> int:
        return len(self.text.ids)


def haystack(model: Any, tokenizer: Any, texts: str | Sequence[Any], lengths: Sequence[int], **options: Any) -> Result:
    """Measure retrieval by distance; `options` are the fields of `Haystack`.

    Example:
        >>> haystack(model, tokenizer, [book], [8192]).by_length("8192")[2048].score  # 1,024 to 2,048 tokens back
        0.8
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    return Haystack(texts=texts, **options).measure(model, tokenizer, lengths)


class Haystack(Asking):
    """Facts in real texts, each asked for alone on the cache of its text.

    Every text makes one haystack of each length. A text that is too short goes on with the next ones, then with itself.

    Attributes:
        wording: the words.
    """

    name: ClassVar[str] = "haystack"
    title: ClassVar[str] = "Haystack of {kind} tokens: facts found, by largest distance to the end"
    label: ClassVar[str] = "facts found"
    x_label: ClassVar[str] = "distance to the end (tokens)"
    needs_texts: ClassVar[bool] = True

    facts: PositiveInt = Field(
        40, description=f"facts per text, at most one in {TOKENS_PER_FACT} tokens", json_schema_extra={"training": 10}
    )
    seed: StrictInt = Field(0, description="random seed for what is hidden and where")
    wording: Wording = Wording()

    _documents: list[list[int]] = PrivateAttr([])

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        super().prepare(tokenizer, lengths, windows)
        if self.facts > len(self.wording.names):
            raise PoSEError(f"facts={self.facts} is too many; give at most {len(self.wording.names)}")
        self._documents = ids_of_each(self._tokenizer, self.texts)
        if not all(self._documents):
            raise PoSEError("texts: one of them is empty; give texts with words")
        self._build(self._lengths[0], 0)

    def work(self, length: int) -> Work:
        # Questions and answers are read token by token, more or less.
        return Work(length, len(self.texts), steps=self._count(length) * self._tail)

    def questions(self, length: int) -> list[FactQuestion]:
        texts = [self._build(length, number) for number in range(len(self._documents))]
        return [FactQuestion(text, fact, self._question(fact.name)) for text in texts for fact in text.facts]

    def judge(self, length: int, questions: Sequence[FactQuestion], answers: Sequence[str]) -> Result:
        edges = [0, *(length >> shift for shift in (4, 3, 2, 1, 0))]
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            fact, found = question.fact, score(answer, question.fact.key)
            details = {"name": fact.name, "expected": fact.key, "answer": answer}
            far = band(fact.distance, edges)[1]
            rows.append(Row(far, float(found), kind=str(length), distance=fact.distance, details=details))
        rows.sort(key=lambda row: row.length)
        example = self._tokenizer.decode(questions[0].ids)
        return Result(self.name, self._definition(), tuple(rows), {str(length): example})

    def _count(self, length: int) -> int:
        return max(1, min(self.facts, length // TOKENS_PER_FACT))

    def _question(self, name: str) -> list[int]:
        return token_ids(self._tokenizer, filled(self.wording.question, name))

    @property
    def _tail(self) -> int:
        """The most tokens of a question and its answer."""
        return max(len(self._question(name)) for name in self.wording.names) + self.wording.digits + 2

    def _build(self, length: int, number: int) -> FactText:
        filler: list[int] = []
        for ids in itertools.cycle([*self._documents[number:], *self._documents[:number]]):
            filler += ids
            if len(filler) >= length:
                break
        tail, seed = self._tail, self.seed + number
        require_room("longest question", length, length - tail)
        return build(self._tokenizer, self.wording, filler, length - tail, self._count(length), seed)

    def _definition(self) -> str:
        texts = counted(len(self.texts), "text")
        return (
            f"Haystack: {texts}, each read once, with up to {self.facts} facts at even depths (at most "
            f"one in {TOKENS_PER_FACT} tokens), seed {self.seed}. Each fact is asked for alone, with greedy decoding; "
            "text, longest question and answer together are exactly `length` tokens. Score: 1 if the first run of "
            f"digits begins with the {self.wording.digits} digits of the fact. Distances are from the end of the fact "
            "to the end of the text. A guess among the numbers of a text with n facts scores 1/n."
        )

    @classmethod
    def show(cls, row: Row) -> str:
        return f"{row.score:.2f} ±{row.standard_error:.2f}"

    @classmethod
    def summary(cls, result: Result) -> dict[str, int]:
        return {"k_max": result.k_max()}


def build(tokenizer: Any, wording: Wording, filler: Sequence[int], length: int, count: int, seed: int) -> FactText:
    """Build a text of exactly `length` tokens with `count` facts at even depths.

    A fact goes behind the last line break before its depth, so that it cuts no line.

    Args:
        wording: intro, fact and names; at least `count` names.
        filler: token ids of a real text, at least as many as the facts leave room for.
        length: in tokens, questions not counted.
        seed: of names and keys.

    Raises:
        PoSEError: the facts or the text are too long or too short for the length.
    """
    draw = random.Random(f"{seed}/{length}/{count}")
    names = draw.sample(wording.names, count)
    keys = [random_key(draw, wording.digits) for _ in names]
    lines = [token_ids(tokenizer, "\n" + filled(wording.fact, n, k) + "\n") for n, k in zip(names, keys, strict=True)]
    head = leading_ids(tokenizer) + token_ids(tokenizer, wording.intro + "\n")
    room = length - len(head) - sum(map(len, lines))
    require_room(f"intro with {count} facts", length, room)
    if room > len(filler):
        raise PoSEError(f"length={length}: the text has {len(filler)} tokens, and {room} are needed; use a longer one")
    ids, facts, before = list(head), [], 0
    for i, line in enumerate(lines):
        cut = _line_end(tokenizer, filler, round((i + 0.5) / count * room))
        ids += [*filler[before:cut], *line]
        before = cut
        # What is still to come: the rest of the filler and the other facts.
        behind = room - cut + sum(map(len, lines[i + 1 :]))
        facts.append(Fact(names[i], keys[i], behind))
    return FactText([*ids, *filler[before:room]], tuple(facts))


def _line_end(tokenizer: Any, filler: Sequence[int], place: int, reach: int = 200) -> int:
    """Return the end of the last line before a place, within `reach` tokens; else the place itself."""
    for cut in range(place, max(0, place - reach), -1):
        if "\n" in tokenizer.decode([filler[cut - 1]]):
            return cut
    return place


def filled(template: str, name: str, key: str = "") -> str:
    """Return a template with a name and a key in it; other braces stay."""
    return template.replace("{name}", name).replace("{key}", key)


def score(text: str, key: str) -> bool:
    """Return whether the first run of digits in an answer begins with the key."""
    run = re.search("[0-9]+", text)
    return run is not None and run.group().startswith(key)


def band(distance: int, edges: Sequence[int]) -> tuple[int, int]:
    """Return the edges that a distance is between, the first included; the last band also holds what is beyond it.

    Example:
        >>> band(9000, [0, 8192, 16384, 32768])
        (8192, 16384)
    """
    pairs = list(itertools.pairwise(edges))
    return next((pair for pair in pairs if distance < pair[1]), pairs[-1])
