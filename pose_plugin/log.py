"""The package's logger, visible wherever no framework has set one up."""

from __future__ import annotations

import logging


def _plain_logger(name: str) -> logging.Logger:
    # Axolotl sets a logger class that drops INFO from everyone but itself.
    current = logging.getLoggerClass()
    logging.setLoggerClass(logging.Logger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(current)


log = _plain_logger("pose_plugin")


def show_log() -> None:
    """Lets messages of level INFO reach the terminal, unless the caller has configured the logger otherwise.

    Called when a run starts, never at import: what a run checked and decided is meant to be seen.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[pose_plugin] %(message)s"))
        log.addHandler(handler)
        log.propagate = False
