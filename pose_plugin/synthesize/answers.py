"""From what a model wrote to what a row may hold: JSON found, form checked, quotes looked up in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class UnusableError(Exception):
    """An answer that cannot be used; the text says why, to the user and to the model that is asked again."""


class _Answer(BaseModel):
    # `additionalProperties: false`, which strict schemas of servers demand.
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)


class Question(_Answer):
    question: str
    answer: str
    # For servers that hold a model to the schema: in an endless list small models repeat themselves until they are cut
    # off. Nothing is refused for more.
    quotes: list[str] = Field(json_schema_extra={"maxItems": 6})


class Questions(_Answer):
    questions: list[Question]


class Characters(_Answer):
    characters: list[str]


class Biography(_Answer):
    biography: str


Form = TypeVar("Form", bound=_Answer)


def parse(content: str, form: type[Form]) -> Form:
    """Reads an answer that may be wrapped in a code fence, thoughts or a sentence.

    Raises:
        UnusableError: no JSON, or not of this form.
    """
    value = _find_object(re.sub(r"<think>.*?</think>", "", content, flags=re.S), form.model_fields.keys())
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the object"
        raise UnusableError(f"{place}: {first['msg'][:120]}") from None


def parse_questions(content: str) -> tuple[list[Question], bool]:
    """Reads an answer of questions. Of one that was cut off or broken, those that are whole: they are paid.

    Returns:
        The questions, and whether the answer was whole.

    Raises:
        UnusableError: there is none.
    """
    try:
        return parse(content, Questions).questions, True
    except UnusableError:
        found = []
        # Not those of a draft in its thoughts, which may be what was cut off.
        for _, value in _objects(re.sub(r"<think>.*?(</think>|\Z)", "", content, flags=re.S)):
            with suppress(ValidationError):
                found.append(Question.model_validate(value))
        if not found:
            raise
        return found, False


def _find_object(text: str, names: Set[str]) -> Any:
    """The first JSON object with one of the names in it."""
    reason = "it holds no JSON object"
    for error, value in _objects(text):
        if error is None and names & value.keys():
            # In an object that was cut off, those inside may be whole.
            return value
        if reason.startswith("it holds"):
            reason = f"its JSON has none of the names {', '.join(sorted(names))}" if error is None else error
    raise UnusableError(reason)


def _objects(text: str) -> Iterator[tuple[str | None, Any]]:
    """(None, object) of everything that is one, (what is wrong with it, None) of what begins like one."""
    for match in re.finditer(r"\{", text):
        try:
            # strict=False: small models write line breaks into strings.
            yield None, json.JSONDecoder(strict=False).raw_decode(text, match.start())[0]
        except json.JSONDecodeError as error:
            yield f"its JSON is broken or cut off ({error.msg} at character {error.pos} of {len(text)})", None
        except RecursionError:
            continue


class Finder:
    """Finds quotes in texts, forgiving of line breaks, case and typographic signs."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = [_plain(text) for text in texts]

    def places(self, quotes: list[str]) -> set[tuple[int, int]]:
        """(text, character of its plain form) of each quote that is there and long enough to prove something."""
        found = set()
        for quote in map(_plain, quotes):
            for number, text in enumerate(self._texts):
                place = text.find(quote) if _proves(quote) else -1
                if place >= 0:
                    found.add((number, place))
                    break
        return found

    def apart(self, quotes: list[str]) -> bool:
        """Whether quotes come from two texts, or from places in one that are apart.

        That is a twentieth of the text, at most 2000 characters.
        """
        places = self.places(quotes)
        if len({number for number, _ in places}) > 1:
            return True
        if not places:
            return False
        offsets = [place for _, place in places]
        length = len(self._texts[next(iter(places))[0]])
        return max(offsets) - min(offsets) >= max(1, min(length // 20, 2000))

    def several(self, quotes: list[str]) -> bool:
        """Whether quotes come from at least two texts."""
        return len({number for number, _ in self.places(quotes)}) > 1


def _proves(quote: str) -> bool:
    """Not a name, which is found anywhere: 8 characters, and three words in scripts with capitals, which part words."""
    return len(quote) >= 8 and (len(quote.split()) >= 3 or quote.upper() == quote.lower())


def _plain(text: str) -> str:
    text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-", 0x2026: "..."})
    return " ".join(text.casefold().split()).strip(" .\"'")
