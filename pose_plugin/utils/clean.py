"""The one door for texts from outside: documents, answers, errors of a server, and answers of earlier runs."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote, urlsplit

from pose_plugin.utils.log import CONTROLS

# A shorter secret is a placeholder such as `none`, which is also a word of documents.
SHORTEST_SECRET = 8
# What may stand between two characters of a secret: spaces, also as JSON writes them, and control characters.
_GAP = r"(?:\s|\\[bfnrt]|(?i:\\u00[0189][0-9a-f]))*"
# Also those of Word, of pages and of EBCDIC: without them, two words would become one.
_LINE_ENDS = re.compile("(?:\r?\n)?\x0c|\r\n?|\x0b|\x85")


class Cleaner:
    """Makes texts of a server safe to store, to publish and to show.

    A server or a proxy may repeat the key that it refuses. The manifest is published with the data, so all text from a
    server passes here before it is written, shown or used.

    Args:
        secrets: are replaced by `[key]`, also if they are spaced out, or escaped as in JSON and in addresses.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        long = sorted({each for each in secrets if len(each) >= SHORTEST_SECRET}, key=len, reverse=True)
        # An answer may be cut off within the key, and half of it is too much.
        self._halves = [each[: max(SHORTEST_SECRET, len(each) // 2)] for each in long]
        half = [re.escape(each) + r"[^\s\"',;<>]*" for each in self._halves]
        spelled = [_GAP.join(map(_spellings, each)) for each in long]
        self._secret = re.compile("|".join([*spelled, *half])) if long else None

    def text(self, text: str) -> str:
        """Return a text of several lines without secrets and control characters."""
        text = without_controls(text)
        return self._secret.sub("[key]", text) if self._secret else text

    def hides_words_of(self, text: str) -> bool:
        """Return whether a text holds a secret or its first half: then that is a word, and would be lost."""
        return any(half in text for half in self._halves)

    def line(self, text: str, length: int = 300) -> str:
        """Return the same in one line, cut off after `length` characters."""
        text = " ".join(self.text(text).split())
        return text if len(text) <= length else text[:length] + "…"


def _spellings(character: str) -> str:
    code = ord(character)
    slash = r"|\\/" if character == "/" else ""
    return rf"(?:{re.escape(character)}|(?i:\\u{code:04x}|%{code:02x}){slash})"


def without_controls(text: str) -> str:
    """Normalize line ends, and remove control characters and lone surrogates, which no file can hold."""
    return CONTROLS.sub("", _LINE_ENDS.sub("\n", text))


def tidy(text: str) -> str:
    """Return a text as it is trained: without control characters, long gaps and blanks at both ends.

    Chat templates strip their texts. A turn that is changed by its template could not be found again for its labels.
    """
    return re.sub(r"\n{4,}", "\n\n\n", without_controls(text).lstrip("\ufeff")).strip()


def secrets_of(key: str, address: str | None) -> list[str]:
    """Return what must not be repeated: the key, and the user, password and query of the server's address."""
    parts = urlsplit(address or "")
    names = [parts.username or "", parts.password or ""]
    user, password = map(unquote, names)
    basic = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    return [key, *names, user, password, basic, *(value for _, value in parse_qsl(parts.query))]


def without_password(url: str) -> str:
    """Remove what may be secret from an address: user, password and query."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]
