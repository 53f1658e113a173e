"""Single-detail questions: each is about one passage of a long document, and the reader has to find it.

The model that writes sees only passages of `chunk_tokens`, one from each fifth of the document. So a row costs a
fraction of the document's length, and all depths are asked about. (arXiv 2404.19553 takes one passage per document.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Questions
from pose_plugin.synthesize.client import Client, Request
from pose_plugin.synthesize.documents import Document, pieces
from pose_plugin.synthesize.output import Turn
from pose_plugin.synthesize.quotes import Finder
from pose_plugin.synthesize.settings import Settings
from pose_plugin.synthesize.tasks.common import (
    PROMPT_TOKENS,
    Item,
    Made,
    ask_all,
    each_once,
    questions_into,
    tokens_of,
)

PIECES = 5


def forecast(documents: Sequence[Document], settings: Settings) -> list[int]:
    """Return the most prompt tokens of each request."""
    (document,) = documents
    most = min(PIECES, settings.questions)
    # Pieces end with paragraphs, so their number must be counted if it may be smaller than `most`.
    if document.tokens < most * settings.chunk_tokens:
        most = min(most, len(pieces(document.text, document.tokens, settings.chunk_tokens)))
    return [min(settings.chunk_tokens, document.tokens) + PROMPT_TOKENS] * most


async def make(item: Item, settings: Settings, client: Client) -> Made:
    """Make the turns of a row. Raises StopError."""
    (document,) = item.documents
    draw = random.Random(f"{settings.seed} {item.id}")
    text = document.text
    parts = pieces(text, document.tokens, settings.chunk_tokens)
    chosen = _one_of_each_stretch(parts, min(PIECES, settings.questions), draw)
    made, requests = Made(), []
    for number, part in enumerate(chosen):
        # The first pieces get the remainder of the questions.
        count = settings.questions // len(chosen) + (number < settings.questions % len(chosen))
        requests.append(_request(item, number, part, text.index(part), count, settings, made))
    turns = each_once([turn for found in await ask_all(client, requests, made) if found for turn in found], made)
    # In the order of the text, the last answer's place would reveal where the next one is.
    draw.shuffle(turns)
    made.turns = turns
    return made


def _one_of_each_stretch(parts: list[str], count: int, draw: random.Random) -> list[str]:
    count = min(count, len(parts))
    borders = [round(i * len(parts) / count) for i in range(count + 1)]
    return [parts[draw.randrange(borders[i], borders[i + 1])] for i in range(count)]


def _request(
    item: Item, number: int, part: str, start: int, count: int, settings: Settings, made: Made
) -> Request[list[Turn]]:
    accept = questions_into(made, count, Finder([part], [start]).any, settings)
    text = prompts.prompt(
        [part],
        prompts.SINGLE.format(count=count),
        prompts.QUOTES.format(where="the passage", least="at least one"),
        form=prompts.QUESTIONS_FORM,
    )
    tokens = tokens_of(item.documents[0], [part])
    return Request(item.id, f"piece {number + 1}", text, Questions, tokens, accept)
