"""The package's logger. Its messages are visible even if no framework has configured logging."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

# Control characters, except line feed and tab, and lone surrogates: a terminal obeys the first, no file holds the last.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# They reverse the direction of text, so that it shows something else than it is.
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def _plain_logger(name: str) -> logging.Logger:
    # Axolotl sets a logger class that drops INFO from everyone but itself.
    current = logging.getLoggerClass()
    logging.setLoggerClass(logging.Logger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(current)


log = _plain_logger("pose_plugin")


def printable(text: str) -> str:
    """Return a text that cannot control the terminal: control characters as escapes. File names may hold them."""
    for pattern in (CONTROLS, _DIRECTIONS):
        text = pattern.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
    return text


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


# Cannot be subscripted in Python 3.10.
class _Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current `sys.stderr`, because notebooks and test runners replace it."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignore the stream that the base class sets when it is created."""


def show_log() -> None:
    """Let messages of level INFO reach the terminal, unless the caller has configured this logger.

    Runs call it when they start, so that users see what was checked and decided. Nothing calls it at import.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers:
        handler = _Terminal()
        handler.setFormatter(_Printable("[pose_plugin] %(message)s"))
        log.addHandler(handler)
        log.propagate = False
