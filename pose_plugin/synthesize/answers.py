"""From what a model wrote to questions: JSON found, form checked. Quotes are looked up in quotes.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json


class UnusableError(Exception):
    """An answer that cannot be used; the text says why, to the user and to the model that is asked again."""


class _Answer(BaseModel):
    # Strict schemas of servers demand it; a model that no schema holds may number its questions all the same.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False}, str_strip_whitespace=True)


class Question(_Answer):
    question: str
    answer: str
    # For servers that hold a model to the schema: in an endless list small models repeat themselves until they are cut
    # off. Nothing is refused for more.
    quotes: list[str] = Field(json_schema_extra={"maxItems": 6})

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """`Question` and `quote` are meant as what they are called here."""
        if not isinstance(value, dict):
            return value
        named = {str(name).casefold(): each for name, each in value.items()}
        return {**named, "quotes": named.get("quotes", named.get("quote"))}

    @field_validator("answer", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("quotes", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> list[str]:
        """Of one quote, or of quotes with their places, the texts: whatever is not in the document proves nothing."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [text for each in value for text in cls._texts(each)]
        return [value] if isinstance(value, str) else []


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
    """Reads an answer of questions: in the form that was asked for, as a list, one alone. Of one that was cut off or
    broken, those that are whole: they are paid.

    Returns:
        The questions, and whether the answer was whole.

    Raises:
        UnusableError: there is none.
    """
    try:
        return parse(content, Questions).questions, True
    except UnusableError:
        found, whole = [], True
        # Not those of a draft in its thoughts, which may be what was cut off.
        text = re.sub(r"<think>.*?(</think>|\Z)", "", content, flags=re.S)
        for place, error, value in _objects(text):
            if error is not None:
                whole, value = False, _cut_in_quotes(text[place:])
            try:
                found.append(Question.model_validate(value))
            except ValidationError:
                whole = whole and "question" not in value
        if not found:
            raise
        return found, whole


def _cut_in_quotes(text: str) -> dict[str, Any]:
    """A question that was cut off in its quotes, which stand last: those before are whole, and so is the answer."""
    with suppress(ValueError):
        value = from_json(text, allow_partial=True)
        if isinstance(value, dict) and "quotes" in value:
            return value
    return {}


def _find_object(text: str, names: Set[str]) -> Any:
    """The first JSON object with one of the names in it."""
    reason = "it holds no JSON object"
    for _, error, value in _objects(text):
        if error is None and names & value.keys():
            # In an object that was cut off, those inside may be whole.
            return value
        if reason.startswith("it holds"):
            reason = f"its JSON has none of the names {', '.join(sorted(names))}" if error is None else error
    raise UnusableError(reason)


def _objects(text: str) -> Iterator[tuple[int, str | None, Any]]:
    """(place, None, object) of everything that is one, (place, what is wrong with it, None) of what begins like one."""
    whole_to = 0
    for match in re.finditer(r"\{", text):
        place = match.start()
        try:
            # strict=False: small models write line breaks into strings.
            value, end = json.JSONDecoder(strict=False).raw_decode(text, place)
            whole_to = max(whole_to, end)
            yield place, None, value
        except json.JSONDecodeError as error:
            if place < whole_to:
                continue  # a brace in a string
            yield place, f"its JSON is broken or cut off ({error.msg} at character {error.pos} of {len(text)})", None
        except RecursionError:
            continue
