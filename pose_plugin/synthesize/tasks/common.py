"""What the tasks share: items, excerpts of documents, and the questions of an answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Question, UnusableError, parse_questions
from pose_plugin.synthesize.client import Client, GivenUpError, Request
from pose_plugin.synthesize.documents import Document, pieces, spread
from pose_plugin.synthesize.output import Turn
from pose_plugin.synthesize.quotes import Span
from pose_plugin.synthesize.settings import Settings

# Tokens of a prompt's own words, in any tokenizer that was trained on English.
PROMPT_TOKENS = 350
TWICE = "asked twice"


@dataclass(frozen=True)
class Item:
    """A row to be made.

    Attributes:
        id: hash of the task and its documents, the same in every run.
    """

    id: str
    task: str
    documents: tuple[Document, ...]

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)


@dataclass
class Made:
    """The turns that were made for a row, and what was left out and why."""

    turns: list[Turn] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    given_up: list[str] = field(default_factory=list)


def item_of(task: str, documents: list[Document]) -> Item:
    name = "\0".join([task, *(document.sha256 for document in documents)])
    return Item(hashlib.sha256(name.encode("ascii")).hexdigest()[:16], task, tuple(documents))


def excerpts(document: Document, text: str, settings: Settings) -> list[str]:
    """Return the whole text if it fits into one request, else pieces that do, evenly spaced."""
    if document.tokens <= settings.request_tokens:
        return [text]
    parts = pieces(text, document.tokens, min(settings.chunk_tokens, settings.request_tokens))
    return spread(parts, max(1, settings.request_tokens // settings.chunk_tokens))


def shortened(shown: list[str]) -> list[str]:
    """Return what a prompt adds if `excerpts` left something out."""
    return [prompts.EXCERPTS] if len(shown) > 1 else []


def tokens_of(document: Document, texts: list[str]) -> int:
    """Estimate the tokens of a prompt with these passages, by the document's mean characters per token."""
    return round(sum(map(len, texts)) * document.tokens / max(1, document.characters)) + PROMPT_TOKENS


def questions_into(
    made: Made, count: int, find: Callable[[list[str]], list[Span]], settings: Settings
) -> Callable[[str], list[Turn]]:
    """Return the `accept` of a request for questions: it keeps up to `count` that are grounded in the text.

    It raises UnusableError if none is left.

    Args:
        made: counts the questions that are dropped, if others of their answer are kept.
        find: returns where a question's quotes are in the text; nothing if they prove less than the task asks for.
    """

    def accept(content: str) -> list[Turn]:
        turns: list[Turn] = []
        dropped: Counter[str] = Counter()
        seen: set[str] = set()
        questions, whole = parse_questions(content)
        if not whole:
            dropped["rest of an answer that was cut off or broken"] += 1
        for question in questions:
            quotes = find(question.quotes)
            problem = _problem(question, quotes, settings, seen)
            if problem:
                dropped[problem] += 1
            elif len(turns) < count:
                turns.append(Turn(question.question, question.answer, tuple(quotes)))
        if not turns:
            why = f"all {len(questions)} questions were dropped: {', '.join(dropped)}" if questions else "no question"
            raise UnusableError(why)
        made.dropped += dropped
        return turns

    return accept


def _problem(question: Question, quotes: list[Span], settings: Settings, seen: set[str]) -> str | None:
    if not question.question or not question.answer:
        return "without a question or an answer"
    plain = _plain(question.question)
    if plain in seen:
        return TWICE
    seen.add(plain)
    return "quotes are not where they should be in the text" if settings.check_quotes and not quotes else None


def _plain(question: str) -> str:
    return " ".join(question.casefold().split())


def each_once(turns: list[Turn], made: Made) -> list[Turn]:
    """Return the turns of several answers without repeated questions, which may have different answers."""
    kept: dict[str, Turn] = {}
    for turn in turns:
        kept.setdefault(_plain(turn.question), turn)
    made.dropped += Counter({TWICE: len(turns) - len(kept)})
    return list(kept.values())


async def ask_all(client: Client, requests: list[Request[Any]], made: Made) -> list[Any]:
    """Send requests at once. Returns a value for each, None if it was given up, which `made` records."""

    async def one(request: Request[Any]) -> Any:
        try:
            return await client(request)
        except GivenUpError as error:
            made.given_up.append(f"{request.part}: {error}")
            return None

    # Wait for all, so that answers in flight reach the journal, before an error is raised.
    results = await asyncio.gather(*map(one, requests), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
