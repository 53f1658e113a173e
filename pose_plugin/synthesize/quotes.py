"""Quotes are looked up in texts by their letters and digits alone, and what is kept is the text's own span.

A model that copies in good faith still changes line breaks, hyphens at their ends, kinds of spaces, quotation marks and
dashes, case, Markdown, and leaves out footnote numbers, or words between dots. None of it makes a quote untrue.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from dataclasses import dataclass

# Addresses of Markdown links, and footnote numbers.
_ASIDE = re.compile(r"(?<=\])\([^()\s]*\)|\[\d{1,3}\]")
_LEFT_OUT = re.compile(r"[\[(]\s*(?:\.{3}|…)\s*[\])]|\.(?:\s?\.){2,}|…")
# Letters between the parts of a quote from which words were left out.
_NEAR = 1000


@dataclass(frozen=True, order=True)
class Span:
    """Where a quote stands: characters from `start` to `end` of text number `text`."""

    text: int
    start: int
    end: int


class Finder:
    """Finds quotes in texts.

    Args:
        texts: what is shown to the model that writes.
        starts: where each begins in its document; 0 unless it is a piece of one.
    """

    def __init__(self, texts: list[str], starts: list[int] | None = None) -> None:
        self._starts = starts or [0] * len(texts)
        self._lengths = [len(text) for text in texts]
        self._plain = [_plain(text) for text in texts]

    def any(self, quotes: list[str]) -> list[Span]:
        """The spans of quotes that are there and long enough to prove something, in order, none twice."""
        return sorted({span for quote in quotes for span in self._spans(quote)})

    def apart(self, quotes: list[str]) -> list[Span]:
        """The same if they come from two texts, or from places in one that are apart; else none.

        That is a twentieth of the text, at most 2000 characters.
        """
        spans = self.any(quotes)
        if not spans or spans[0].text != spans[-1].text:
            return spans
        least = max(1, min(self._lengths[spans[0].text] // 20, 2000))
        return spans if spans[-1].start - spans[0].start >= least else []

    def several(self, quotes: list[str]) -> list[Span]:
        """The same if they come from at least two texts; else none."""
        spans = self.any(quotes)
        return spans if len({span.text for span in spans}) > 1 else []

    def _spans(self, quote: str) -> list[Span]:
        if not _proves(quote):
            return []
        parts = [part for part in _LEFT_OUT.split(quote) if _plain(part)[0]]
        wanted = [[quote]] + ([parts] if len(parts) > 1 and any(map(_proves, parts)) else [])
        for number in range(len(self._plain)):
            for each in wanted:
                if found := self._in_order(number, [_plain(part)[0] for part in each]):
                    return found
        return []

    def _in_order(self, number: int, parts: list[str]) -> list[Span]:
        """All parts of a quote, one after the other and near, or none."""
        plain, _ = self._plain[number]
        first = plain.find(parts[0])
        while first >= 0:
            places, end = [first], first + len(parts[0])
            for part in parts[1:]:
                place = plain.find(part, end, end + _NEAR + len(part))
                if place < 0:
                    break
                places.append(place)
                end = place + len(part)
            else:
                return [self._span(number, place, len(part)) for place, part in zip(places, parts, strict=True)]
            first = plain.find(parts[0], first + 1)
        return []

    def _span(self, number: int, place: int, length: int) -> Span:
        offsets = self._plain[number][1]
        start = self._starts[number]
        return Span(number, start + offsets[place], start + offsets[place + length - 1] + 1)


def _proves(quote: str) -> bool:
    """Not a name, which is found anywhere: 8 letters, and three words in scripts with capitals, which part words."""
    return len(_plain(quote)[0]) >= 8 and (len(quote.split()) >= 3 or quote.upper() == quote.lower())


def _plain(text: str) -> tuple[str, array[int]]:
    """(letters and digits in one form, for each its place in the text).

    Full stops and commas within numbers stay, or 3.5 would be 35; marks on letters stay, as in many scripts they are
    vowels.
    """
    aside = {place for match in _ASIDE.finditer(text) for place in range(*match.span())}
    forms = {letter: _form(letter) for letter in set(text)}
    letters: list[str] = []
    places = array("l")
    for place, letter in enumerate(text):
        form = forms[letter]
        if not form and letter in ".," and text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit():
            form = letter
        if form and place not in aside:
            letters.append(form)
            places.extend([place] * len(form))
    return "".join(letters), places


def _form(letter: str) -> str:
    parts = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", letter).casefold())
    return "".join(part for part in parts if part.isalnum() or unicodedata.category(part).startswith("M"))
