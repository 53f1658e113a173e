"""Prompts of an exact token length: short facts hidden in a long filler (PoSE paper, Figure 2a).

    [BOS] prefix \\n filler … \\n key sentence \\n … filler \\n question | answer
          ├──────────────────── prompt ────────────────────────────────┤ ├────┤
          ├──────────────────────────── length tokens ────────────────────────┤

A *length* is prompt plus answer: the last answer token is the last token of the window, so a length equal
to the window still fits it. The pieces are tokenized one by one and joined as ids, which makes the length
exact for every tokenizer and one prompt as cheap as its key sentence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pose_plugin.utils.errors import PoSEError

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The filler of Mohtashami & Jaggi (2023), repeated as often as the length needs."""


class Haystack:
    """A filler text, tokenized once, and pieces of text that read naturally inside it.

    Args:
        tokenizer: a transformers tokenizer (or a processor that holds one).
        filler: a real text to hide things in; it is repeated if it is too short. Default: `default`.
        default: a few sentences to repeat.
    """

    def __init__(self, tokenizer: Any, filler: str | None = None, default: str = GRASS) -> None:
        self._text = default if filler is None else filler.rstrip() + "\n"
        if not self._text.strip():
            # Repeating nothing would never fill a prompt.
            raise PoSEError("filler is empty; give a text, or leave it out for the default")
        self.tokenizer = plain_tokenizer(tokenizer)
        self.begin = leading_ids(self.tokenizer)
        self.newline = self.piece("\n", after="x")
        self._filler = self.piece(self._text)
        self.once = len(self._filler)

    def piece(self, text: str, after: str = "\n") -> list[int]:
        """Return the ids of `text` as it reads after `after`, without the mark some tokenizers put before a text."""
        before = token_ids(self.tokenizer, after)
        both = token_ids(self.tokenizer, after + text)
        return both[len(before) :] if both[: len(before)] == before else token_ids(self.tokenizer, text)

    def line(self, text: str) -> list[int]:
        """Return the ids of `text` on its own line."""
        return [*self.newline, *self.piece(text), *self.newline]

    def filler(self, count: int, start: float = 0.0) -> list[int]:
        """Return `count` tokens of filler.

        Args:
            start: where in a long filler to begin, as a share (0 to 1) of what is left over.
        """
        if len(self._filler) < count:
            # Tokenize the copies as a whole: where two of them meet, a tokenizer may merge tokens.
            copies = 2 * count // max(len(self._filler), 1) + 2
            grown = self.piece(self._text * copies)
            while len(grown) < count:
                copies *= 2
                grown = self.piece(self._text * copies)
            self._filler = grown
        skipped = round(start * max(0, self.once - count))
        return self._filler[skipped : skipped + count]

    def hide(self, facts: Sequence[tuple[float, list[int]]], count: int, start: float = 0.0) -> list[int]:
        """Return `count` tokens of filler with facts inside.

        Args:
            facts: (depth, ids) by ascending depth: the share of the filler before the fact, 0 to 1.
            start: see `filler`.
        """
        filler, ids, before = self.filler(count, start), list[int](), 0
        for depth, fact in facts:
            ids += filler[before : round(depth * count)] + fact
            before = round(depth * count)
        return ids + filler[before:]


@dataclass(frozen=True)
class PasskeyTemplate:
    """The texts of a passkey prompt; the default is that of Mohtashami & Jaggi (2023, arXiv 2305.16300).

    Attributes:
        prefix: the task, at the start of the prompt.
        filler: the irrelevant text, repeated as often as the length needs.
        key_sentence: holds the key, as `{key}`, once or more.
        question: the end of the prompt; the answer follows it.
        answer: what the model should write, with `{key}`; begins with the space after the question.
    """

    prefix: str = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there."
    )
    filler: str = GRASS
    key_sentence: str = "The pass key is {key}. Remember it. {key} is the pass key."
    question: str = "What is the pass key? The pass key is"
    answer: str = " {key}"

    def __post_init__(self) -> None:
        # Without the key in either text every model would silently score 0.
        for name in ("key_sentence", "answer"):
            if "{key}" not in getattr(self, name):
                value = getattr(self, name)
                raise PoSEError(f"PasskeyTemplate.{name}={value!r} has no {{key}}; put it where the key goes")


@dataclass(frozen=True)
class PasskeyDocument:
    """One prompt with its answer, as token ids.

    Attributes:
        input_ids: prompt and answer, exactly `length` ids.
        answer_start: index of the first answer id; the prompt is everything before it.
        text: the same as text. Tokenized again, it can differ by a few tokens where the filler was cut.
        key: the hidden digits.
        depth: where the key sentence is in the filler, 0 (start) to 1 (end).
        distance: tokens from the beginning of the key sentence to the end of the answer. A model that sees the last
            `distance` tokens sees the key.
    """

    input_ids: list[int]
    answer_start: int
    text: str
    key: str
    depth: float
    distance: int

    @property
    def prompt(self) -> list[int]:
        return self.input_ids[: self.answer_start]

    @property
    def answer(self) -> list[int]:
        return self.input_ids[self.answer_start :]


class PasskeyBuilder:
    """Builds passkey documents for one tokenizer; it keeps the tokenized filler, so make one and reuse it.

    Args:
        tokenizer: a transformers tokenizer (or a processor that holds one).
        template: the texts.
        filler: a real text in place of the template's filler; repeated if it is too short.
    """

    def __init__(self, tokenizer: Any, template: PasskeyTemplate | None = None, filler: str | None = None) -> None:
        self.template = template or PasskeyTemplate()
        self.haystack = Haystack(tokenizer, filler, default=self.template.filler)
        self.tokenizer = self.haystack.tokenizer
        self.prefix = self.haystack.begin + token_ids(self.tokenizer, self.template.prefix)
        self.question = self.haystack.piece(self.template.question)

    def fixed_tokens(self, key: str = "12345") -> int:
        """Return the tokens of everything but the filler, answer included: the smallest possible length."""
        pieces = self.prefix, self.key_line(key), self.question, self.answer_ids(key)
        return sum(map(len, pieces)) + 2 * len(self.haystack.newline)

    def document(self, length: int, depth: float, key: str, start: float = 0.0) -> PasskeyDocument:
        """Return one document of exactly `length` tokens.

        Args:
            length: tokens of prompt plus answer.
            depth: share of the filler that is before the key sentence, 0 to 1.
            start: where in a long real filler text to begin, as a share (0 to 1) of what is left over.

        Raises:
            PoSEError: a length below what the template takes, a depth outside 0…1.
        """
        if not 0 <= depth <= 1:
            raise PoSEError(f"depth={depth} is outside 0…1; 0 puts the key before the filler, 1 behind it")
        room = length - self.fixed_tokens(key)
        require_room("passkey template", length, room)
        newline = self.haystack.newline
        filled = self.haystack.hide([(depth, self.key_line(key))], room, start)
        prompt = [*self.prefix, *newline, *filled, *newline, *self.question]
        answer = self.answer_ids(key)
        # A space that is a separate token ends the prompt, as it is not part of the key. A small model that
        # knows the key may still write another word there, since "is" is followed by colours all over the filler.
        spaces = next((i for i, token in enumerate(answer) if self.tokenizer.decode([token]).strip()), 0)
        prompt, ids = prompt + answer[:spaces], prompt + answer
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        distance = length - len(self.prefix) - len(newline) - round(depth * room)
        return PasskeyDocument(ids, len(prompt), text, key, depth, distance)

    def answer_ids(self, key: str) -> list[int]:
        """Return the ids of the answer, as it reads after the question."""
        return self.haystack.piece(self.template.answer.replace("{key}", key), after=self.template.question)

    def key_line(self, key: str) -> list[int]:
        """Return the ids of the key sentence, on its own line."""
        return self.haystack.line(self.template.key_sentence.replace("{key}", key))


def require_room(what: str, length: int, room: int) -> None:
    """Raise PoSEError if a prompt has more tokens than its length.

    Args:
        what: the prompt, for the message.
        length: tokens of prompt plus answer.
        room: tokens that are left for filler.
    """
    if room < 0:
        raise PoSEError(
            f"length={length} is smaller than the {what}, which takes {length - room} tokens with this tokenizer; "
            f"use a length of at least {length - room}"
        )


def random_key(rng: random.Random, digits: int = 5) -> str:
    """Return a key of exactly `digits` digits that does not begin with 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def plain_tokenizer(processing_class: Any) -> Any:
    """Return the text tokenizer of a processor (text and images), or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def leading_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that this tokenizer puts before a text by itself: mostly [BOS] or none."""
    whole, plain = list(tokenizer("x")["input_ids"]), token_ids(tokenizer, "x")
    bos = getattr(tokenizer, "bos_token_id", None)
    known = [bos] if bos is not None and whole[:1] == [bos] else []
    places = range(len(whole) - len(plain) + 1) if plain else ()
    return next((whole[:at] for at in places if whole[at : at + len(plain)] == plain), known)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without special tokens."""
    # verbose=False: no warning that the text is longer than model_max_length, which is the point here.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def ids_of_each(tokenizer: Any, texts: Sequence[Any]) -> list[list[int]]:
    """Return the ids of texts; those of the texts that are ids already, as they are."""
    return [token_ids(tokenizer, text) if isinstance(text, str) else list(text) for text in texts]
