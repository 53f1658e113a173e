"""Kill a command with SIGKILL at random moments, run it again, and compare with a run that nobody killed.

$POSE_KILLS sets how many moments each test tries; the default is small. A moment is either a point, just before a call
that changes files, or a time. What is tested must hold at every moment, so no result depends on the machine's speed.
$POSE_KILLS_LOG names a file to which each test adds a line: its name, and how its runs ended.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import LIMIT

KILLS = int(os.environ.get("POSE_KILLS", "3"))
# The calls before which a run is killed: those of the operating system, and those of open files.
_SYSTEM = {"open", "fsync", "replace", "rename", "link", "symlink", "mkdir", "unlink", "rmdir", "chmod", "sendfile"}
_FILE = {"write", "writelines", "flush", "close", "truncate", "__exit__"}


@dataclass
class Child:
    """How a forked run ended.

    Attributes:
        killed: whether it was killed; else it returned `value`.
        points: calls that changed files, up to the end.
        seconds: how long it took.
    """

    killed: bool
    value: Any = None
    points: int = 0
    seconds: float = 0.0
    output: str = ""


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their relative paths; temporary ones that a kill left behind are among them."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def survives(
    command: Callable[[Path], Any],
    root: Path,
    result: Callable[[Path], Any] = files,
    prepare: Callable[[Path], None] = lambda folder: None,
    seed: int = 0,
    kills: int | None = None,
    whole: bool = False,
) -> Counter[str]:
    """Assert that a run that was killed, once or twice, and then run again ends as one that was not.

    Args:
        command: runs in a forked child, on the folder that it is given. It must not raise.
        root: folder for the folders of all runs.
        result: what is compared, after the run.
        prepare: fills a folder before its first run.
        seed: chooses the moments.
        kills: default: $POSE_KILLS.
        whole: assert that each file after a kill is as before, as at the end, or in a folder that uploads leave out.

    Returns:
        How many runs were killed at a point, at a time, or had ended before.

    Example:
        >>> survives(lambda folder: main(["card", str(folder)]), tmp_path, prepare=lambda f: shutil.copytree(saved, f))
    """
    draw = random.Random(seed)
    before = files(_new(root / "before", prepare)) if whole else {}
    unbroken, ended = run(command, _new(root / "whole", prepare), count=True), Counter[str]()
    expected, after = result(root / "whole"), files(root / "whole")
    for number in range(KILLS if kills is None else kills):
        folder = _new(root / f"killed{number}", prepare)
        moments = []
        for _ in range(draw.choice((1, 1, 2))):
            # Files change at points. Times serve single calls that last long, such as saving weights.
            if number % 4 != 3:
                moments.append(("point", draw.randrange(max(1, unbroken.points))))
                killed = run(command, folder, point=moments[-1][1]).killed
            else:
                moments.append(("time", draw.random()))
                killed = run(command, folder, seconds=moments[-1][1] * unbroken.seconds).killed
            ended[moments[-1][0] if killed else "ended before"] += 1
            half = [name for name, content in files(folder).items() if not _unfinished(name)
                    and content not in (before.get(name), after.get(name))]  # fmt: skip
            assert not (whole and half), (half, moments)
        again = run(command, folder)
        assert again.value == unbroken.value, (moments, again)
        found = result(folder)
        assert found == expected, (found, moments, again.output)
    if log := os.environ.get("POSE_KILLS_LOG"):
        with open(log, "a") as file:
            file.write(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {dict(ended)}\n")
    return ended


def _unfinished(name: str) -> bool:
    return any(part.startswith("_") and part.endswith(".part") for part in Path(name).parts)


def _new(folder: Path, prepare: Callable[[Path], None]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    folder.mkdir(exist_ok=True)
    return folder


def run(
    command: Callable[[Path], Any],
    folder: Path,
    point: int | None = None,
    seconds: float | None = None,
    count: bool = False,
) -> Child:
    """Run `command(folder)` in a forked child.

    Args:
        count: count its points, which makes it several times slower.
        point: kill it before the call of this number that changes files, from 0.
        seconds: kill it after this time.

    Raises:
        AssertionError: it raised, or died otherwise.
    """
    where = folder.with_name(f".{folder.name}.child")
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(command, folder, where, point, count or point is not None)
    # A child that hangs is killed too, and fails the test below.
    timer = threading.Timer(LIMIT if seconds is None else seconds, _kill, (pid,))
    timer.start()
    _, status = os.waitpid(pid, 0)
    # The child is a zombie until it is waited for, so its number cannot have become another process's in time.
    timer.cancel()
    _kill(pid)  # what it started itself, e.g. a process that reloads a folder
    output = where.with_suffix(".output").read_text(errors="replace") if where.with_suffix(".output").exists() else ""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and (point, seconds) != (None, None):
        return Child(killed=True, output=output)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, output
    value, points = pickle.loads(where.read_bytes())
    return Child(False, value, points, time.monotonic() - started, output)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or is not a group yet
        os.killpg(group, signal.SIGKILL)


def _child(command: Callable[[Path], Any], folder: Path, where: Path, point: int | None, watched: bool) -> None:
    """Run the command, store what it returned, and exit. Never returns."""
    os.setsid()
    gc.freeze()  # see tests/forked.py
    code = 1
    try:
        with where.with_suffix(".output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        _own_locks()
        watch = _Watch(point)
        value = watch.over(command, folder) if watched else command(folder)
        where.write_bytes(pickle.dumps((value, watch.points)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_locks() -> None:
    """Give this process its own lock of progress bars.

    Forked processes share tqdm's lock, and a child that is killed while it holds the lock never releases it.
    """
    if "tqdm" in sys.modules:
        pending = [sys.modules["tqdm"].tqdm]
        lock = threading.RLock()
        while pending:
            bar = pending.pop()
            bar.set_lock(lock)
            pending += bar.__subclasses__()


class _Watch:
    """Counts the calls that change files, in all threads, and kills this process before one of them."""

    def __init__(self, point: int | None) -> None:
        self.points = 0
        self._point = point

    def over(self, command: Callable[[Path], Any], folder: Path) -> Any:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            return command(folder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def __call__(self, frame: Any, event: str, called: Any) -> None:
        if event != "c_call" or not _changes_files(called):
            return
        if self.points == self._point:
            os.killpg(0, signal.SIGKILL)
        self.points += 1


def _changes_files(called: Any) -> bool:
    owner = getattr(called, "__self__", None)
    if isinstance(owner, io.IOBase):
        return called.__name__ in _FILE and owner not in (sys.stdout, sys.stderr)
    return called.__name__ in _SYSTEM and getattr(owner, "__name__", None) in ("posix", "io", "_io")
