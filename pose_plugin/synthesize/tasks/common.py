"""What the tasks share."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Question, UnusableError, parse_questions
from pose_plugin.synthesize.client import Asker, GivenUpError, Request
from pose_plugin.synthesize.documents import Document, pieces, spread
from pose_plugin.synthesize.output import Turn
from pose_plugin.synthesize.quotes import Span
from pose_plugin.synthesize.settings import Settings

# A prompt's own words, in tokens of any tokenizer that has seen English.
PROMPT_TOKENS = 350


@dataclass(frozen=True)
class Item:
    """A row to be made.

    Attributes:
        id: of task and documents; the same in every run.
        text: gives what the first user turn carries.
    """

    id: str
    task: str
    documents: tuple[Document, ...]

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)


@dataclass
class Made:
    """What came of an item: turns for the row, what was left out of them and why."""

    turns: list[Turn] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    given_up: list[str] = field(default_factory=list)


def item_of(task: str, documents: list[Document]) -> Item:
    name = "\0".join([task, *(document.sha256 for document in documents)])
    return Item(hashlib.sha256(name.encode("ascii")).hexdigest()[:16], task, tuple(documents))


def excerpts(document: Document, text: str, settings: Settings) -> list[str]:
    """The whole text if it fits into one request, else pieces of it that do, evenly spread."""
    if document.tokens <= settings.request_tokens:
        return [text]
    parts = pieces(text, document.tokens, min(settings.chunk_tokens, settings.request_tokens))
    return spread(parts, max(1, settings.request_tokens // settings.chunk_tokens))


def shortened(shown: list[str]) -> list[str]:
    """What a prompt says where `excerpts` had to leave something out."""
    return [prompts.EXCERPTS] if len(shown) > 1 else []


def tokens_of(document: Document, texts: list[str]) -> int:
    """Tokens of passages, by the document's own characters a token, with the prompt around them."""
    return round(sum(map(len, texts)) * document.tokens / max(1, document.characters)) + PROMPT_TOKENS


def questions_from(
    content: str, count: int, shown: Callable[[list[str]], list[Span]], settings: Settings
) -> tuple[list[Turn], Counter[str]]:
    """Reads an answer of questions and keeps what can be relied on.

    Args:
        shown: where the texts hold a question's quotes; nothing where that is less than the task asks for.

    Raises:
        UnusableError: none is left.
    """
    turns: list[Turn] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    questions, whole = parse_questions(content)
    if not whole:
        dropped["rest of an answer that was cut off or broken"] += 1
    for question in questions:
        quotes = shown(question.quotes)
        problem = _problem(question, quotes, settings, seen)
        if problem:
            dropped[problem] += 1
        elif len(turns) < count:
            turns.append(Turn(question.question, question.answer, tuple(quotes)))
    if not turns:
        why = f"all {len(questions)} questions were dropped: {', '.join(dropped)}" if questions else "no question"
        raise UnusableError(why)
    return turns, dropped


def questions_into(
    made: Made, count: int, shown: Callable[[list[str]], list[Span]], settings: Settings
) -> Callable[[str], list[Turn]]:
    """`questions_from` as what a request accepts; the questions that are dropped are counted in `made`."""

    def accept(content: str) -> list[Turn]:
        turns, dropped = questions_from(content, count, shown, settings)
        made.dropped += dropped
        return turns

    return accept


def _problem(question: Question, quotes: list[Span], settings: Settings, seen: set[str]) -> str | None:
    if not question.question or not question.answer:
        return "without a question or an answer"
    plain = " ".join(question.question.casefold().split())
    if plain in seen:
        return "asked twice"
    seen.add(plain)
    return "quotes are not where they should be in the text" if settings.check_quotes and not quotes else None


async def ask_all(ask: Asker, requests: list[Request[Any]], made: Made) -> list[Any]:
    """Asks at once. Returns a value for each request, None where it was given up, which is noted."""

    async def one(request: Request[Any]) -> Any:
        try:
            return await ask(request)
        except GivenUpError as error:
            made.given_up.append(f"{request.part}: {error}")
            return None

    waiting: list[Coroutine[Any, Any, Any]] = [one(request) for request in requests]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    # Answers that were on their way are in the journal by now.
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
