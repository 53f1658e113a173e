"""Questions over several short documents on one subject: what they share and where they differ."""

from __future__ import annotations

from collections.abc import Sequence

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Questions
from pose_plugin.synthesize.client import Client, Request
from pose_plugin.synthesize.documents import Document
from pose_plugin.synthesize.quotes import Finder
from pose_plugin.synthesize.settings import Settings
from pose_plugin.synthesize.tasks.common import PROMPT_TOKENS, Item, Made, ask_all, questions_into


def forecast(documents: Sequence[Document], settings: Settings) -> list[int]:
    """Return the most prompt tokens of each request."""
    return [sum(document.tokens for document in documents) + PROMPT_TOKENS]


async def make(item: Item, settings: Settings, client: Client) -> Made:
    """Make the turns of a row. Raises StopError."""
    texts = [document.text for document in item.documents]
    made = Made()
    accept = questions_into(made, settings.questions, Finder(texts).several, settings)
    text = prompts.prompt(
        texts,
        prompts.COMPARE.format(count=settings.questions),
        prompts.QUOTES.format(where="the documents", least="from at least two documents"),
        form=prompts.QUESTIONS_FORM,
    )
    request = Request(item.id, "group", text, Questions, item.tokens + PROMPT_TOKENS, accept)
    made.turns = (await ask_all(client, [request], made))[0] or []
    return made
