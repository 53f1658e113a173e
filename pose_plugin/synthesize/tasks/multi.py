"""Multi-detail questions over one document: each needs several places that are far apart."""

from __future__ import annotations

from collections.abc import Sequence

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Questions
from pose_plugin.synthesize.client import Client, Request
from pose_plugin.synthesize.documents import Document
from pose_plugin.synthesize.quotes import Finder
from pose_plugin.synthesize.settings import Settings
from pose_plugin.synthesize.tasks.common import (
    PROMPT_TOKENS,
    Item,
    Made,
    ask_all,
    excerpts,
    questions_into,
    shortened,
    tokens_of,
)


def forecast(documents: Sequence[Document], settings: Settings) -> list[int]:
    """Return the most prompt tokens of each request."""
    return [min(settings.request_tokens, documents[0].tokens) + PROMPT_TOKENS]


async def make(item: Item, settings: Settings, client: Client) -> Made:
    """Make the turns of a row. Raises StopError."""
    (document,) = item.documents
    shown = excerpts(document, document.text, settings)
    made = Made()
    accept = questions_into(made, settings.questions, Finder([document.text]).apart, settings)
    text = prompts.prompt(
        shown,
        *shortened(shown),
        prompts.MULTI.format(count=settings.questions),
        prompts.QUOTES.format(where="the document", least="at least two, from different places"),
        form=prompts.QUESTIONS_FORM,
    )
    request = Request(item.id, "document", text, Questions, tokens_of(document, shown), accept)
    made.turns = (await ask_all(client, [request], made))[0] or []
    return made
