"""Documents' texts on disk: a collection for windows of 80K tokens does not fit in memory."""

from __future__ import annotations

import hashlib
import re
import tempfile
import unicodedata
from dataclasses import dataclass


class Spool:
    """Texts in a temporary file that is gone with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the documents do

    def add(self, text: str) -> tuple[int, int]:
        """Returns (offset, bytes)."""
        data = text.encode("utf-8")
        offset = self._file.seek(0, 2)
        self._file.write(data)
        return offset, len(data)

    def read(self, place: tuple[int, int]) -> str:
        self._file.seek(place[0])
        return self._file.read(place[1]).decode("utf-8")


@dataclass(frozen=True)
class Document:
    """A text to ask about.

    Attributes:
        source, index: file, and line or row in it, from 0; pieces of a split text add `part`.
        sha256: of the text as it is used.
        tokens, characters: its length in the training tokenizer, and in characters.
    """

    source: str
    index: int
    part: int
    sha256: str
    tokens: int
    characters: int
    _spool: Spool
    _place: tuple[int, int]

    @property
    def text(self) -> str:
        return self._spool.read(self._place)

    def described(self) -> dict[str, object]:
        """For the manifest."""
        return {"source": self.source, "index": self.index, "part": self.part, "sha256": self.sha256}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def tidy(text: str) -> str:
    """One form of line ends, no control characters or lone surrogates, nothing blank around.

    Templates strip what they are given, and a turn that changes on its way cannot be found again by its text.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def pieces(text: str, tokens: int, size: int) -> list[str]:
    """Cuts a text of `tokens` tokens into pieces of about `size`, at the end of a paragraph, sentence or word.

    Sizes are by the text's own characters a token, so that any tokenizer serves. No piece is longer than that; what is
    left at the end joins none if it is short, so the last piece may be shorter.
    """
    target = max(1, int(len(text) * size / max(tokens, 1)))
    found, start = [], 0
    while len(text) - start > target:
        end = start + _border(text[start : start + target])
        found.append(text[start:end])
        start = end
    found.append(text[start:])
    return [piece for piece in (piece.strip() for piece in found) if piece]


def _border(text: str) -> int:
    """Where to cut: the last end of a paragraph, line, sentence or word in the second half, else the end."""
    half = len(text) // 2
    for mark in ("\n\n", "\n", ". ", "。", " "):
        place = text.rfind(mark, half)
        if place >= 0:
            return place + len(mark)
    return len(text)


def spread(parts: list[str], count: int) -> list[str]:
    """`count` of the parts, evenly over the whole, first and last among them."""
    if count >= len(parts):
        return parts
    if count == 1:
        return [parts[len(parts) // 2]]
    return [parts[round(i * (len(parts) - 1) / (count - 1))] for i in range(count)]
