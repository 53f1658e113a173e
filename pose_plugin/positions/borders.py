"""Where a jump may stand: between the turns of a chat, read from what a training row holds.

A row holds tokens, and labels that tell which of them an assistant has to write. A stretch of labels is never cut, so
no jump falls into an answer, whatever the text says. Headers, where the tokenizer's chat template has any, move a
border from the first word of an answer to the header before it, and from the end of an answer to the next header.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class TurnTokens:
    """What a chat template writes around the turns, as token ids without white space at the ends.

        <|im_start|>user\\n … <|im_end|>\\n<|im_start|>assistant\\n … <|im_end|>\\n

    Attributes:
        assistant: what opens an assistant's turn; empty where nothing does (Mistral: the end of the user's turn).
        user: what opens a user's turn.
        closing: the last tokens of turns, () where turns end without any.
    """

    assistant: tuple[int, ...]
    user: tuple[int, ...]
    closing: tuple[int, ...] = ()


def turn_borders(
    tokens: np.ndarray, supervised: np.ndarray | None, headers: TurnTokens | None = None
) -> np.ndarray | None:
    """Indices at which a turn begins and the one before has ended, next to an assistant's answer.

    Between two messages that no answer parts (system and user, say) there is no border, as a text that quotes the
    template looks the same there.

        tokens      <user> q q q <end> <assistant> a a <end> <user> q <end> <assistant> a <end>
        supervised     0   0 0 0   0        0      1 1   1      0   0   0        0      1   1
        borders                             5                   9                12

    Args:
        tokens: a document's token ids, shape (n,).
        supervised: which of them are in the loss, shape (n,), bool; None or all of them: the row does not say.
        headers: what opens turns; without them, or where a row holds none, answers end and begin where labels do.

    Returns:
        sorted indices of 1…n−1, shape (borders,); empty where there are answers and nothing between them to cut at;
        None for a row that shows no turns at all, as raw text does.
    """
    if supervised is None or supervised.all():
        # An answer may quote a header.
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


def _of_gap(begin: int, end: int, size: int, found: dict[int, bool], headers: TurnTokens | None) -> set[int]:
    """Borders in a stretch begin…end−1 without labels. `found`: where headers are, and whether the assistant's."""
    after_answer, before_answer = begin > 0, end < size
    if not found or headers is None:
        # Behind the last answer stands what closes its turn, if anything.
        return {begin, end} if before_answer else set()
    inside = [index for index in sorted(found) if begin <= index < end]
    borders = {inside[0]} if inside and after_answer else set()
    if before_answer and not headers.assistant:
        # A gap without a header is a part of an answer that is left out of the loss.
        borders |= {end} if inside or not after_answer else set()
    elif before_answer and inside and found[inside[-1]]:
        borders.add(inside[-1])
    elif found.get(end):
        # The header itself is in the loss.
        borders.add(end)
    return borders


def headers_behind_ends(tokens: np.ndarray, headers: TurnTokens | None) -> dict[int, bool]:
    """Headers that follow the end of a turn, or begin the row: index, and whether the assistant's.

    Text that quotes a header alone is left out so; a text that quotes whole chats is not.
    """
    found = _found(tokens, headers)
    if headers is None or not headers.closing:
        return found
    ends = np.flatnonzero(tokens == headers.closing[-1])
    # White space may stand between.
    return {i: v for i, v in found.items() if i == 0 or ((ends < i) & (ends >= i - 2)).any()}


def _found(tokens: np.ndarray, headers: TurnTokens | None) -> dict[int, bool]:
    """Index of each header, and whether it is an assistant's."""
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
    return np.flatnonzero(same).tolist()
