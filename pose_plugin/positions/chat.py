"""What a tokenizer's chat template writes around the turns of a chat, found by rendering one."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from pose_plugin.positions.borders import TurnTokens
from pose_plugin.utils.log import log

# Words that no template holds.
_WORDS = ("qqqfirst", "aaafirst", "qqqsecond", "aaasecond")


def turn_tokens(tokenizer: Any) -> TurnTokens | None:
    """What opens and closes turns, as the tokenizer splits it between the words of a chat.

    Returns:
        None where the tokenizer has no chat template, or the template cannot be read: one that refuses a plain chat,
        or changes what is said in it.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    ask, answer, again, last = _WORDS
    chat = [{"role": role, "content": word} for role, word in zip(("user", "assistant") * 2, _WORDS, strict=True)]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False)
    except Exception as error:  # a template raises what it likes
        log.info("the chat template cannot be read for turns (%s); labels alone tell where answers are", error)
        return None
    if any(text.count(word) != 1 for word in _WORDS) or ask not in asked:
        return None
    ids, spans = _split(tokenizer, text)
    if ids is None:
        return None
    end = {word: text.index(word) + len(word) for word in _WORDS}
    # What closes a turn is what also stands behind the last one; the rest opens the next.
    closed = _common(text[end[answer] : text.index(again)], text[end[last] :])
    closed_user = _common(text[end[ask] : text.index(answer)], asked[asked.index(ask) + len(ask) :])

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


def _split(tokenizer: Any, text: str) -> tuple[list[int] | None, list[tuple[int, int]]]:
    """Token ids and the characters each stands for."""
    if not getattr(tokenizer, "is_fast", False):
        return None, []
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(found["input_ids"]), [tuple(span) for span in found["offset_mapping"]]


def _common(first: str, second: str) -> str:
    """What both begin with."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
