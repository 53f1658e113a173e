"""Runs a case in a forked child: frameworks are imported once, and no case sees another's patches."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
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
    return _Child(case, args, {}).outcome(timeout)


def ranks(case: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 300, **environment: str) -> list[Any]:
    """Calls `case(*args)` in `world` children at once, each with the environment that torchrun would give it.

    Args:
        environment: more variables.

    Returns:
        For each rank its Outcome, or the CaseError: the failure of one rank may be what a test is about.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    launched |= {"MASTER_PORT": port, **environment}
    children = [_Child(case, args, launched | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
    end = time.monotonic() + timeout
    found: list[Any] = []
    for child in children:
        try:
            found.append(child.outcome(max(1.0, end - time.monotonic())))
        except CaseError as error:
            found.append(error)
    return found


def good_ranks(*args: Any, **kwargs: Any) -> list[Outcome]:
    """`ranks`, where every rank must succeed.

    Raises:
        CaseError: with the failures of all ranks; what failed first is seldom what failed on rank 0.
    """
    found = ranks(*args, **kwargs)
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(found) if isinstance(one, CaseError)]
    if failed:
        raise CaseError("\n".join(failed))
    return found


class _Child:
    """A case that has been started."""

    def __init__(self, case: Callable[..., Any], args: tuple, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "output"

        def child() -> None:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            # pytest has put its own capture in their place.
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            os.environ.update(environment)
            try:
                send.send((True, case(*args)))
            except BaseException as error:
                send.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

        self._process = context.Process(target=child)
        self._process.start()
        send.close()

    def outcome(self, timeout: float) -> Outcome:
        answered = self._receive.poll(timeout)
        try:
            good, value = self._receive.recv() if answered else (False, f"no answer within {timeout:.0f} s")
        except EOFError:
            good, value = False, "the child died"
        if not answered:
            self._process.kill()
        self._process.join()
        output = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._folder.cleanup()
        if not good:
            raise CaseError(f"{value}\n--- output ---\n{output[-6000:]}")
        return Outcome(value, output)
