"""Parse what the model wrote: find its JSON and validate it. Quotes are checked in quotes.py."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from pose_plugin.utils.clean import tidy


class UnusableError(Exception):
    """An answer that cannot be used. The text says why, to the user and to the model when it is asked again."""


# JSON can spell control characters that no answer held, so texts are cleaned once it is read.
Text = Annotated[str, AfterValidator(tidy)]


class _Answer(BaseModel):
    # Servers that enforce schemas demand additionalProperties. Other models may add names, which are ignored.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})


class Question(_Answer):
    question: Text
    answer: Text
    # Only for servers that enforce schemas: in an endless list small models repeat themselves until they are cut off.
    quotes: list[Text] = Field(json_schema_extra={"maxItems": 6})

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Accept `Question` for `question`, and `quote` for `quotes`."""
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
        """Collect the texts of one quote, or of quotes with their places. Other texts are not found in the document."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [text for each in value for text in cls._texts(each)]
        return [value] if isinstance(value, str) else []


class Questions(_Answer):
    questions: list[Question]


class Characters(_Answer):
    characters: list[Text]


class Biography(_Answer):
    biography: Text


Form = TypeVar("Form", bound=_Answer)


def parse(content: str, form: type[Form]) -> Form:
    """Read an answer that may be wrapped in a code fence, thoughts or prose.

    Raises:
        UnusableError: there is no JSON of this form.
    """
    reason = "its JSON is broken or cut off" if "{" in content else "it holds no JSON object"
    for value, whole in _values(content):
        for each in _objects(value):
            if whole and form.model_fields.keys() & each.keys():
                try:
                    return form.model_validate(each)
                except ValidationError as error:
                    first = error.errors()[0]
                    raise UnusableError(f"{'.'.join(map(str, first['loc']))}: {first['msg'][:120]}") from None
            reason = f"its JSON has none of the names {', '.join(form.model_fields)}"
        if not whole:
            reason = "its JSON is broken or cut off"
    raise UnusableError(reason)


def parse_questions(content: str) -> tuple[list[Question], bool]:
    """Read an answer of questions: in the requested form, as a list, or a single one.

    Complete questions of an answer that was cut off or broken are kept, because they were paid for.

    Returns:
        The questions, and whether the answer was complete.

    Raises:
        UnusableError: the answer has no question.
    """
    found: list[Question] = []
    complete = True
    for value, whole in _values(content):
        complete = complete and whole
        for each in _objects(value):
            names = {name.casefold() for name in each}
            # The quotes come last. Once they have begun, question and answer are complete.
            if "question" in names and (whole or names & {"quote", "quotes"}):
                try:
                    found.append(Question.model_validate(each))
                except ValidationError:
                    complete = False
        if found and "question" not in value:
            break  # a list of questions is an answer; single questions may follow each other
    return (found, complete) if found else (parse(content, Questions).questions, True)


def _values(content: str) -> Iterator[tuple[Any, bool]]:
    """Yield each JSON object or list in a text, and whether it is whole. One that was cut off has its whole parts."""
    # A thinking model's draft is not its answer. Templates that open <think> in the prompt leave only </think> here.
    text = content.rpartition("</think>")[2].partition("<think>")[0]
    place = 0
    while start := re.compile(r"[\[{]").search(text, place):
        place = start.start()
        try:
            # strict=False, because small models write line breaks into strings.
            value, place = json.JSONDecoder(strict=False).raw_decode(text, place)
            yield value, True
        except RecursionError:
            return  # nested beyond any answer; each of its brackets would be tried in vain
        except json.JSONDecodeError as error:
            if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
                with suppress(ValueError):
                    yield from_json(text[place:], allow_partial=True), False
                    return
            place += 1  # a bracket in prose, or broken JSON, in which objects may be whole


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value, the outer ones first."""
    waiting = deque([value])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
