"""Runs a case in a forked child: frameworks are imported once, and no case sees another's patches."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CaseError(AssertionError):
    """The case failed in its child; the text is its traceback, and what it printed."""


@dataclass
class Outcome:
    """What a case returned, and everything it printed, its logs included."""

    value: Any
    output: str


def forked(case: Callable[..., Any], *args: Any, timeout: float = 300) -> Outcome:
    """Calls `case(*args)` in a child and returns its value, which must pickle.

    Raises:
        CaseError: it raised, died or ran past `timeout` seconds.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"

        def child() -> None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            # pytest has put its own capture in their place.
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            try:
                send.send((True, case(*args)))
            except BaseException as error:
                send.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

        process = context.Process(target=child)
        process.start()
        send.close()
        answered = receive.poll(timeout)
        try:
            good, value = receive.recv() if answered else (False, f"no answer within {timeout} s")
        except EOFError:
            good, value = False, "the child died"
        if not answered:
            process.kill()
        process.join()
        output = log.read_text(errors="replace") if log.exists() else ""
    if not good:
        raise CaseError(f"{value}\n--- output ---\n{output[-6000:]}")
    return Outcome(value, output)
