"""The package's logger, visible wherever no framework has set one up."""

from __future__ import annotations

import logging
import sys
from typing import Any


def _plain_logger(name: str) -> logging.Logger:
    # Axolotl sets a logger class that drops INFO from everyone but itself.
    current = logging.getLoggerClass()
    logging.setLoggerClass(logging.Logger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(current)


log = _plain_logger("pose_plugin")


# Cannot be subscripted in Python 3.10.
class _Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is at the time of the message: notebooks and test runners put others in its place."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """The base class sets the one of the moment it was made; it is not kept."""


def show_log() -> None:
    """Lets messages of level INFO reach the terminal, unless the caller has configured the logger otherwise.

    Called when a run starts, never at import: what a run checked and decided is meant to be seen.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers:
        handler = _Terminal()
        handler.setFormatter(logging.Formatter("[pose_plugin] %(message)s"))
        log.addHandler(handler)
        log.propagate = False
