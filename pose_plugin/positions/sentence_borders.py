"""Borders between sentences, from how a tokenizer spells its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from pose_plugin.utils.errors import PoSEError

# These end a sentence if white space follows, unlike the points of 3.14 and example.org.
_ENDS_BEFORE_SPACE = (".", "!", "?", "…", ".\u201d", "।", "؟")
# Scripts that write no spaces.
_ENDS_ALONE = ("。", "！", "？", "｡")
_CLOSING = "\"'”’»)]}*_"

# What a token is, as bits; 0 means that it has not been decoded yet.
_SEEN, _SPACE, _SPACE_FIRST, _LINE_END, _MARK = 1, 2, 4, 8, 16


class SentenceBorders:
    """Finds the ends of sentences in token ids: punctuation with white space after it, or the end of a line.

    Args:
        tokenizer: with `decode` and `encode`.

    Raises:
        PoSEError: there is no tokenizer; ids alone do not show what they spell.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "decode"):
            raise PoSEError(
                f"sampler=sentences finds the ends of sentences with the tokenizer, but got {tokenizer!r}. Give "
                "PoSECollator the tokenizer as its first argument, or use sampler: pose"
            )
        self._tokenizer = tokenizer
        # Each token is decoded after this one, because tokenizers drop a space at the beginning of a text.
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = [int(anchor[-1])] if anchor else []
        self._anchor_text = tokenizer.decode(self._anchor)
        # By token id, so that each id of the vocabulary is decoded only once.
        self._kinds = np.zeros(0, dtype=np.uint8)

    def __call__(self, tokens: np.ndarray, supervised: np.ndarray | None = None) -> np.ndarray | None:
        """Return the indices of 1…n−1 at which a sentence begins, shape (borders,), or None if there are none.

        White space between two sentences belongs to the first one.

        Args:
            tokens: token ids, shape (n,).
            supervised: not read.
        """
        kinds = self._of(np.asarray(tokens))
        before, behind = kinds[:-1], kinds[1:]
        ended = ((before & _LINE_END) > 0) | (((before & _MARK) > 0) & ((behind & _SPACE_FIRST) > 0))
        filled = np.flatnonzero((kinds & _SPACE) == 0)
        where = np.searchsorted(filled, np.flatnonzero(ended) + 1)
        borders = np.unique(filled[where[where < len(filled)]])
        borders = borders[borders > 0]
        return borders if borders.size else None

    def _of(self, tokens: np.ndarray) -> np.ndarray:
        most = int(tokens.max(initial=0))
        if most >= len(self._kinds):
            self._kinds = np.concatenate([self._kinds, np.zeros(most + 1 - len(self._kinds), dtype=np.uint8)])
        for token in np.unique(tokens[self._kinds[tokens] == 0]):
            self._kinds[token] = self._kind(int(token))
        kinds: np.ndarray = self._kinds[tokens]
        return kinds

    def _kind(self, token: int) -> int:
        text = self._tokenizer.decode([*self._anchor, token]).removeprefix(self._anchor_text)
        kind = _SEEN
        # An empty text is a part of a character, not white space.
        if text and not text.strip():
            kind |= _SPACE
        if text[:1].isspace():
            kind |= _SPACE_FIRST
        bare = text.rstrip().rstrip(_CLOSING)
        if "\n" in text[len(text.rstrip()) :] or bare.endswith(_ENDS_ALONE):
            kind |= _LINE_END
        if bare.endswith(_ENDS_BEFORE_SPACE):
            kind |= _MARK
        return kind
