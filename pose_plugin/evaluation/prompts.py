"""Passkey prompts of an exact token length: a short key hidden in a long filler (PoSE paper, Figure 2a).

    [BOS] prefix \\n filler … \\n key sentence \\n … filler \\n question | answer
          ├──────────────────── prompt ────────────────────────────────┤ ├────┤
          ├──────────────────────────── length tokens ────────────────────────┤

A *length* is prompt plus answer: the last answer token is the last token of the window, so a length equal
to the window still fits it. The pieces are tokenised one by one and joined as ids, which makes the length
exact for every tokenizer and one prompt as cheap as its key sentence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class PasskeyTemplate:
    """The texts of a passkey prompt; the default is that of Mohtashami & Jaggi (2023, arXiv 2305.16300).

    Attributes:
        prefix: the task, at the start of the prompt.
        filler: the irrelevant text, repeated as often as the length needs.
        key_sentence: holds the key, as `{key}`, once or more.
        question: the end of the prompt; the answer follows it.
        answer: what the model should write, with `{key}`; begins with the space behind the question.
    """

    prefix: str = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there."
    )
    filler: str = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    key_sentence: str = "The pass key is {key}. Remember it. {key} is the pass key."
    question: str = "What is the pass key? The pass key is"
    answer: str = " {key}"

    def __post_init__(self) -> None:
        for name in ("key_sentence", "answer"):
            if "{key}" not in getattr(self, name):
                value = getattr(self, name)
                raise PoSEError(f"PasskeyTemplate.{name}={value!r} has no {{key}}; put it where the key goes")
        if not self.filler:
            raise PoSEError("PasskeyTemplate.filler is empty; give at least one word to fill the prompt with")


@dataclass(frozen=True)
class PasskeyDocument:
    """One prompt with its answer, as token ids.

    Attributes:
        input_ids: prompt and answer, exactly `length` ids.
        answer_start: index of the first answer id; the prompt is everything before it.
        text: the same as text. Tokenised anew it can differ by a few tokens where the filler was cut.
        key: the hidden digits.
        depth: where the key sentence stands in the filler, 0 (start) to 1 (end).
    """

    input_ids: list[int]
    answer_start: int
    text: str
    key: str
    depth: float

    @property
    def prompt(self) -> list[int]:
        return self.input_ids[: self.answer_start]

    @property
    def answer(self) -> list[int]:
        return self.input_ids[self.answer_start :]


class PasskeyBuilder:
    """Builds passkey documents for one tokenizer; keeps the tokenised filler, so make one and use it often.

    Args:
        tokenizer: a transformers tokenizer (or a processor that holds one).
        template: the texts.
        filler_text: a real text in place of the template's filler; repeated where it is too short.
    """

    def __init__(self, tokenizer: Any, template: PasskeyTemplate | None = None, filler_text: str | None = None) -> None:
        self.tokenizer = plain_tokenizer(tokenizer)
        self.template = template or PasskeyTemplate()
        if filler_text is not None and not filler_text.strip():
            raise PoSEError("filler_text is empty; give a text, or leave it out for the template's filler")
        self._filler_text = self.template.filler if filler_text is None else filler_text.rstrip() + "\n"
        self._newline = self._piece("\n", after="x")
        self._prefix = leading_ids(self.tokenizer) + _ids(self.tokenizer, self.template.prefix)
        self._question = self._piece(self.template.question)
        self._filler = self._piece(self._filler_text)
        self._filler_once = len(self._filler)

    def fixed_tokens(self, key: str = "12345") -> int:
        """Tokens of everything but the filler, answer included: the smallest possible length."""
        pieces = self._prefix, self._key_ids(key), self._question, self._answer_ids(key)
        return sum(map(len, pieces)) + 4 * len(self._newline)

    def document(self, length: int, depth: float, key: str, start: float = 0.0) -> PasskeyDocument:
        """One document of exactly `length` tokens.

        Args:
            length: tokens of prompt plus answer.
            depth: share of the filler that stands before the key sentence, 0 to 1.
            key: the digits to hide.
            start: where in a long real filler text to begin, as a share (0 to 1) of what is left over.

        Raises:
            PoSEError: a length below what the template takes (which is named), a depth outside 0…1.
        """
        if not 0 <= depth <= 1:
            raise PoSEError(f"depth={depth} is outside 0…1; 0 puts the key before the filler, 1 behind it")
        room = length - self.fixed_tokens(key)
        if room < 0:
            raise PoSEError(
                f"length={length} is smaller than the passkey template, which takes {length - room} tokens "
                f"with this tokenizer; use a length of at least {length - room}"
            )
        skipped = round(start * max(0, self._filler_once - room))
        filler = self._filler_ids(room)[skipped : skipped + room]
        cut = round(depth * room)
        lines = [self._prefix, filler[:cut], self._key_ids(key), filler[cut:], self._question]
        prompt = [*lines[0], *(token for line in lines[1:] for token in [*self._newline, *line])]
        answer = self._answer_ids(key)
        # Where a space is a token of its own, it is no part of the key: the prompt ends behind it. A small model that
        # knows the key may still write another word there, as "is" is followed by colours all over the filler.
        spaces = next((i for i, token in enumerate(answer) if self.tokenizer.decode([token]).strip()), 0)
        prompt, ids = prompt + answer[:spaces], prompt + answer
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return PasskeyDocument(ids, len(prompt), text, key, depth)

    def _key_ids(self, key: str) -> list[int]:
        return self._piece(self.template.key_sentence.replace("{key}", key))

    def _answer_ids(self, key: str) -> list[int]:
        return self._piece(self.template.answer.replace("{key}", key), after=self.template.question)

    def _filler_ids(self, room: int) -> list[int]:
        if len(self._filler) < room:
            # Tokenised as a whole: where two copies meet, a tokenizer may join what is apart at an end.
            copies = 2 * room // max(len(self._filler), 1) + 2
            grown = self._piece(self._filler_text * copies)
            while len(grown) < room:
                copies *= 2
                grown = self._piece(self._filler_text * copies)
            self._filler = grown
        return self._filler

    def _piece(self, text: str, after: str = "\n") -> list[int]:
        """Ids of `text` as it reads behind `after`, without the mark some tokenizers put before a text."""
        before = _ids(self.tokenizer, after)
        both = _ids(self.tokenizer, after + text)
        return both[len(before) :] if both[: len(before)] == before else _ids(self.tokenizer, text)


def build_document(
    tokenizer: Any,
    length: int,
    depth: float,
    key: str,
    template: PasskeyTemplate | None = None,
    filler_text: str | None = None,
) -> PasskeyDocument:
    """One passkey document, prompt and answer, of exactly `length` tokens; for many, use `PasskeyBuilder`."""
    return PasskeyBuilder(tokenizer, template, filler_text).document(length, depth, key)


def build_prompt(
    tokenizer: Any,
    length: int,
    depth: float,
    key: str,
    template: PasskeyTemplate | None = None,
    filler_text: str | None = None,
) -> list[int]:
    """The prompt of `build_document`: its tokens plus those of the answer are exactly `length`."""
    return build_document(tokenizer, length, depth, key, template, filler_text).prompt


def random_key(rng: random.Random, digits: int = 5) -> str:
    """A key of exactly `digits` digits that does not begin with 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def plain_tokenizer(processing_class: Any) -> Any:
    """The text tokenizer of a processor (text and images), or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def leading_ids(tokenizer: Any) -> list[int]:
    """[BOS] if this tokenizer puts one before a text by itself, else []."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and list(tokenizer("x")["input_ids"][:1]) == [bos] else []


def _ids(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: no warning that the text is longer than model_max_length, which is the point here.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
