"""Biographies of a book's main characters: first their names, then each life from the passages that name them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Biography, Characters, UnusableError, parse
from pose_plugin.synthesize.client import Client, Request
from pose_plugin.synthesize.documents import Document, pieces, spread
from pose_plugin.synthesize.output import Turn
from pose_plugin.synthesize.settings import Settings
from pose_plugin.synthesize.tasks.common import PROMPT_TOKENS, Item, Made, ask_all, excerpts, shortened, tokens_of

# Tokens of each passage that a biography is written from.
PASSAGE = 512
# Characters of the shortest biography that is accepted.
SHORTEST = 200


def forecast(documents: Sequence[Document], settings: Settings) -> list[int]:
    """Return the most prompt tokens of each request, for as many characters as are wanted."""
    return [min(settings.request_tokens, documents[0].tokens) + PROMPT_TOKENS] * (1 + settings.characters)


async def make(item: Item, settings: Settings, client: Client) -> Made:
    """Make the turns of a row. Raises StopError."""
    (document,) = item.documents
    book, made = document.text, Made()
    shown = excerpts(document, book, settings)

    def names_in(content: str) -> list[str]:
        names = list(dict.fromkeys(" ".join(name.split()) for name in parse(content, Characters).characters))
        known = [name for name in names if _mentions(name, book)]
        if names and not known:
            raise UnusableError(f"the text names no such character: {', '.join(names)[:100]}")
        if len(known) < len(names):
            made.dropped["named otherwise in the text"] += len(names) - len(known)
        return known[: settings.characters]

    text = prompts.prompt(
        shown, *shortened(shown), prompts.CHARACTERS.format(count=settings.characters), form=prompts.CHARACTERS_FORM
    )
    request = Request(item.id, "characters", text, Characters, tokens_of(document, shown), names_in)
    names = (await ask_all(client, [request], made))[0]
    if names == []:
        made.dropped["tells of no persons"] += 1
    requests = [_request(item, name, book, settings) for name in names or []]
    written = await ask_all(client, requests, made)
    made.turns = [
        Turn(prompts.ASKED_BIOGRAPHY.format(name=name), life)
        for name, life in zip(names or [], written, strict=True)
        if life
    ]
    return made


def _mentions(name: str, text: str) -> bool:
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _request(item: Item, name: str, book: str, settings: Settings) -> Request[str]:
    (document,) = item.documents
    size = min(PASSAGE, settings.request_tokens)
    about = [part for part in pieces(book, document.tokens, size) if _mentions(name, part)]
    shown = spread(about or [book[: len(book) * size // document.tokens]], max(1, settings.request_tokens // size))

    def accept(content: str) -> str:
        life = parse(content, Biography).biography
        if len(life) < SHORTEST:
            raise UnusableError(f"the biography is too short ({len(life)} characters, give at least {SHORTEST})")
        return life

    text = prompts.prompt(shown, prompts.BIOGRAPHY.format(name=name), form=prompts.BIOGRAPHY_FORM)
    return Request(item.id, f"biography of {name}", text, Biography, tokens_of(document, shown), accept)
