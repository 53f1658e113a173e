"""Borders between the turns of a chat, from what a training row holds: its tokens and its loss mask.

The loss mask shows which tokens an assistant has to write. A stretch of such tokens is never cut, so no jump falls into
an answer, regardless of what the text says. The headers of the tokenizer's chat template, if it has any, move a border
from the first word of an answer to the header before it, and from the end of an answer to the next header.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from pose_plugin.utils.log import log


@dataclass(frozen=True)
class TurnTokens:
    """What a chat template writes around the turns, as token ids without white space at the ends.

        <|im_start|>user\\n … <|im_end|>\\n<|im_start|>assistant\\n … <|im_end|>\\n

    Attributes:
        assistant: what opens an assistant's turn; empty if nothing does (Mistral: the end of the user's turn).
        user: what opens a user's turn.
        closing: the last tokens of turns; empty if nothing closes them.
    """

    assistant: tuple[int, ...]
    user: tuple[int, ...]
    closing: tuple[int, ...] = ()


class TurnBorders:
    """Finds the borders of chats written by a tokenizer's chat template.

    Args:
        tokenizer: without a readable chat template, the loss mask alone decides.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._headers = turn_tokens(tokenizer)

    def __call__(self, tokens: np.ndarray, supervised: np.ndarray | None) -> np.ndarray | None:
        return turn_borders(tokens, supervised, self._headers)


def turn_borders(
    tokens: np.ndarray, supervised: np.ndarray | None, headers: TurnTokens | None = None
) -> np.ndarray | None:
    """Return the indices at which a turn begins and the one before has ended, next to an assistant's answer.

    There is no border between two messages without an answer between them (system and user, say), because a text that
    quotes the template looks the same there.

        tokens      <user> q q q <end> <assistant> a a <end> <user> q <end> <assistant> a <end>
        supervised     0   0 0 0   0        0      1 1   1      0   0   0        0      1   1
        borders                             5                   9                12

    Args:
        tokens: a document's token ids, shape (n,).
        supervised: which of them are in the loss, shape (n,), bool; None or all of them: the row does not say.
        headers: what opens turns. Without them, or in a row that holds none, answers begin and end where the loss mask
            changes.

    Returns:
        sorted indices of 1…n−1, shape (borders,); empty if there are answers and nothing between them to cut at; None
        for a row that shows no turns at all, as raw text does.
    """
    if supervised is None or supervised.all():
        # With every token in the loss, an answer that quotes a header would look like a turn.
        places = sorted(set(headers_behind_ends(tokens, headers)) - {0})
        return np.array(places, dtype=np.int64) if places else None
    found = _found(tokens, headers)
    edges = np.flatnonzero(np.diff(supervised.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), len(tokens)]
    borders: set[int] = set()
    for begin, end in pairwise(bounds):
        if not supervised[begin]:
            borders |= _of_gap(begin, end, len(tokens), found, headers)
    return np.array(sorted(borders - {0}), dtype=np.int64)


def headers_behind_ends(tokens: np.ndarray, headers: TurnTokens | None) -> dict[int, bool]:
    """Return the headers that follow the end of a turn or begin the row: index → whether it is the assistant's.

    This leaves out text that quotes a header alone, but not text that quotes whole chats.
    """
    found = _found(tokens, headers)
    if headers is None or not headers.closing:
        return found
    ends = np.flatnonzero(tokens == headers.closing[-1])
    # One token of white space may stand between the end of a turn and the next header.
    return {i: v for i, v in found.items() if i == 0 or ((ends < i) & (ends >= i - 2)).any()}


def turn_tokens(tokenizer: Any) -> TurnTokens | None:
    """Return what opens and closes turns, found by rendering a chat and reading the tokens between its messages.

    Returns:
        None if the tokenizer has no chat template, or one that cannot be read: it raises on a plain chat, or changes
        the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    ask, answer, again, last = _MESSAGES
    chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, _MESSAGES, strict=True)]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False)
    except Exception as error:  # Jinja templates raise any exception they like
        log.info("cannot read turns from the chat template (%s); only the loss mask shows where answers are", error)
        return None
    if any(text.count(message) != 1 for message in _MESSAGES) or ask not in asked:
        return None
    ids, spans = _split(tokenizer, text)
    if ids is None:
        return None
    end = {message: text.index(message) + len(message) for message in _MESSAGES}
    # What closes a turn also follows the last one; the rest of what is between two turns opens the second.
    closed = _common_start(text[end[answer] : text.index(again)], text[end[last] :])
    closed_user = _common_start(text[end[ask] : text.index(answer)], asked[asked.index(ask) + len(ask) :])

    def between(begin: int, stop: int) -> tuple[int, ...]:
        piece = text[begin:stop]
        begin += len(piece) - len(piece.lstrip())
        stop -= len(piece) - len(piece.rstrip())
        return tuple(t for t, (a, b) in zip(ids, spans, strict=True) if max(a, begin) < min(b, stop))

    return TurnTokens(
        assistant=between(end[ask] + len(closed_user), text.index(answer)),
        user=between(end[answer] + len(closed), text.index(again)),
        closing=between(end[answer], end[answer] + len(closed)),
    )


# Strings that no template contains.
_MESSAGES = ("qqqfirst", "aaafirst", "qqqsecond", "aaasecond")


def _of_gap(begin: int, end: int, size: int, found: dict[int, bool], headers: TurnTokens | None) -> set[int]:
    """Return the borders in a stretch begin…end−1 outside the loss. `found` is what `_found` returns."""
    after_answer, before_answer = begin > 0, end < size
    if not found or headers is None:
        # After the last answer there is only what closes its turn.
        return {begin, end} if before_answer else set()
    inside = [index for index in sorted(found) if begin <= index < end]
    borders = {inside[0]} if inside and after_answer else set()
    if before_answer and not headers.assistant:
        # A gap without a header is a part of an answer that is masked out of the loss.
        borders |= {end} if inside or not after_answer else set()
    elif before_answer and inside and found[inside[-1]]:
        borders.add(inside[-1])
    elif found.get(end):
        # The header itself is in the loss.
        borders.add(end)
    return borders


def _found(tokens: np.ndarray, headers: TurnTokens | None) -> dict[int, bool]:
    """Return the index of each header, and whether it is an assistant's."""
    if headers is None:
        return {}
    found = dict.fromkeys(_occurrences(tokens, headers.user), False)
    return found | dict.fromkeys(_occurrences(tokens, headers.assistant), True)


def _occurrences(tokens: np.ndarray, pattern: tuple[int, ...]) -> list[int]:
    places = len(tokens) - len(pattern) + 1
    if not pattern or places < 1:
        return []
    same = np.ones(places, dtype=bool)
    for offset, token in enumerate(pattern):
        same &= tokens[offset : offset + places] == token
    return [int(index) for index in np.flatnonzero(same)]


def _split(tokenizer: Any, text: str) -> tuple[list[int] | None, list[tuple[int, int]]]:
    """Return token ids and the characters of each; None for slow tokenizers, which do not know the characters."""
    if not getattr(tokenizer, "is_fast", False):
        return None, []
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(found["input_ids"]), [tuple(span) for span in found["offset_mapping"]]


def _common_start(first: str, second: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
