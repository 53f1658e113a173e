"""Where sentences end, told by how a tokenizer spells its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from pose_plugin.utils.errors import PoSEError

# Marks behind which a sentence has ended if a blank follows: 3.14 and example.org have none.
_SPACED = (".", "!", "?", "…", ".\u201d", "।", "؟")
# Scripts that write no blanks.
_ALONE = ("。", "！", "？", "｡")
_CLOSING = "\"'”’»)]}*_"


class SentenceEnds:
    """Ends of sentences in token ids: a mark of punctuation with a blank behind it, or the end of a line.

    Every token is decoded once, behind another one, since a tokenizer drops a blank at the beginning of a text.

    Args:
        tokenizer: with `decode` and `encode`.

    Raises:
        PoSEError: there is none; its ids alone do not tell what they spell.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "decode"):
            raise PoSEError(
                f"sampler=sentences reads the ends of sentences out of the tokenizer, but got {tokenizer!r}. Give "
                "PoSECollator the tokenizer as its first argument, or use sampler: pose"
            )
        self._tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = [int(anchor[-1])] if anchor else []
        self._anchor_text = tokenizer.decode(self._anchor)
        # By token id: 0 for not looked at yet, else the sum of what it is.
        self._kinds = np.zeros(0, dtype=np.uint8)

    def borders(self, tokens: np.ndarray) -> np.ndarray | None:
        """Indices at which a sentence begins and another has ended, of 1…n−1, shape (borders,); None where none is.

        Blanks between sentences belong to the one before.
        """
        kinds = self._of(np.asarray(tokens))
        ended, closed = kinds[:-1], kinds[1:]
        after = np.flatnonzero(((ended & _LINE) > 0) | (((ended & _MARK) > 0) & ((closed & _BLANK_FIRST) > 0))) + 1
        filled = np.flatnonzero((kinds & _BLANK) == 0)
        where = np.searchsorted(filled, after)
        borders = np.unique(filled[where[where < len(filled)]])
        borders = borders[borders > 0]
        return borders if borders.size else None

    def _of(self, tokens: np.ndarray) -> np.ndarray:
        most = int(tokens.max(initial=0))
        if most >= len(self._kinds):
            self._kinds = np.concatenate([self._kinds, np.zeros(most + 1 - len(self._kinds), dtype=np.uint8)])
        for token in np.unique(tokens[self._kinds[tokens] == 0]):
            self._kinds[token] = self._kind(int(token))
        return self._kinds[tokens]

    def _kind(self, token: int) -> int:
        text = self._tokenizer.decode([*self._anchor, token])
        text = text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else text
        kind = _SEEN
        if not text.strip():
            # A token that is nothing at all (a part of a character) is no blank.
            kind |= _BLANK if text else 0
        if text[:1].isspace():
            kind |= _BLANK_FIRST
        bare = text.rstrip().rstrip(_CLOSING)
        if "\n" in text[len(text.rstrip()) :] or bare.endswith(_ALONE):
            kind |= _LINE
        if bare.endswith(_SPACED):
            kind |= _MARK
        return kind


_SEEN, _BLANK, _BLANK_FIRST, _LINE, _MARK = 1, 2, 4, 8, 16
