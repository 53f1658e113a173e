"""Look up quotes in texts by their letters and digits only, and return where they are in the text.

A faithful copy may still have other line breaks, hyphens at line ends, spaces, quotation marks, dashes, case and
Markdown. Footnote numbers may be missing, and dots may replace words. None of this makes a quote wrong.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from dataclasses import dataclass

# Footnote numbers; and with them the addresses of Markdown links.
_NOTE = re.compile(r"\[\d{1,3}\]")
_ASIDE = re.compile(r"(?<=\])\([^()\s]*\)|" + _NOTE.pattern)
_LEFT_OUT = re.compile(r"[\[(]\s*(?:\.{3}|…)\s*[\])]|\.(?:\s?\.){2,}|…")
# Most letters between two parts of a quote that are joined by dots.
_NEAR = 1000
# Marks of the plain form, which has them within numbers only.
_IN_NUMBERS = (".", ",")


@dataclass(frozen=True, order=True)
class Span:
    """The place of a quote: characters `start` to `end` of text number `text`."""

    text: int
    start: int
    end: int


class Finder:
    """Finds quotes in texts.

    Args:
        texts: the texts that the model was shown.
        starts: the place of each in its document; 0 unless it is a piece of one.
    """

    def __init__(self, texts: list[str], starts: list[int] | None = None) -> None:
        self._starts = starts or [0] * len(texts)
        self._texts = texts
        self._plain = [_plain(text) for text in texts]

    def any(self, quotes: list[str]) -> list[Span]:
        """Return the places of quotes that are in the texts and long enough to prove something, in order, each once."""
        return sorted({span for quote in quotes for span in self._spans(quote)})

    def apart(self, quotes: list[str]) -> list[Span]:
        """Return the same if they come from two texts, or from distant places in one; else nothing.

        Distant is a twentieth of the text, at most 2000 characters.
        """
        spans = self.any(quotes)
        if not spans or spans[0].text != spans[-1].text:
            return spans
        least = max(1, min(len(self._texts[spans[0].text]) // 20, 2000))
        return spans if spans[-1].start - spans[0].start >= least else []

    def several(self, quotes: list[str]) -> list[Span]:
        """Return the same if they come from at least two texts; else nothing."""
        spans = self.any(quotes)
        return spans if len({span.text for span in spans}) > 1 else []

    def _spans(self, quote: str) -> list[Span]:
        if not _proves(quote):
            return []
        parts = [part for part in _LEFT_OUT.split(quote) if _plain(part)[0]]
        wanted = [[quote]] + ([parts] if len(parts) > 1 and any(map(_proves, parts)) else [])
        for number in range(len(self._plain)):
            for each in wanted:
                if found := self._in_order(number, [_plain(part)[0] for part in each], _NOTE.findall(quote)):
                    return found
        return []

    def _in_order(self, number: int, parts: list[str], notes: list[str]) -> list[Span]:
        """Find all parts of a quote, in order and close to each other, or nothing.

        Footnote numbers may be missing, but those in a quote must be the text's.
        """
        plain, _ = self._plain[number]
        first = self._find(number, parts[0], 0, len(plain))
        while first >= 0:
            places, end = [first], first + len(parts[0])
            for part in parts[1:]:
                place = self._find(number, part, end, end + _NEAR + len(part))
                if place < 0:
                    break
                places.append(place)
                end = place + len(part)
            else:
                text = self._texts[number][self._plain[number][1][first] : self._plain[number][1][end - 1] + 8]
                if all(note in text for note in notes):
                    return [self._span(number, place, len(part)) for place, part in zip(places, parts, strict=True)]
            first = self._find(number, parts[0], first + 1, len(plain))
        return []

    def _find(self, number: int, part: str, start: int, end: int) -> int:
        """Find a part in whole words and numbers, or return -1: "able" is not in "unable", nor 5 in 15 or 3.5."""
        plain, offsets = self._plain[number]
        text = self._texts[number]
        place = plain.find(part, start, end)
        while place >= 0:
            last = place + len(part) - 1
            before, after = plain[max(place - 1, 0) : place], plain[last + 1 : last + 2]
            cut = before in _IN_NUMBERS or after in _IN_NUMBERS or (after and unicodedata.category(after)[0] == "M")
            for at in (offsets[place] - 1, offsets[last]):
                cut = cut or _one_word(text[max(at, 0) : at + 2])
            if not cut:
                return place
            place = plain.find(part, place + 1, end)
        return -1

    def _span(self, number: int, place: int, length: int) -> Span:
        offsets = self._plain[number][1]
        start = self._starts[number]
        return Span(number, start + offsets[place], start + offsets[place + length - 1] + 1)


def _one_word(pair: str) -> bool:
    """Whether two characters belong to one word: letters of a script with capitals, or digits."""
    return len(pair) == 2 and (pair.isdigit() or all(letter.upper() != letter.lower() for letter in pair))


def _proves(quote: str) -> bool:
    """Whether a quote has 8 letters, and three words in scripts with capitals. A name is found anywhere."""
    return len(_plain(quote)[0]) >= 8 and (len(quote.split()) >= 3 or quote.upper() == quote.lower())


def _plain(text: str) -> tuple[str, array[int]]:
    """Return (letters and digits in a normal form, the place of each in the text).

    Full stops and commas within numbers stay, or 3.5 would be 35. Marks on letters stay: in many scripts they are
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
