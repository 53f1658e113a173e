"""Run the command as a separate process that can be killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.forked import LIMIT


def start(line: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pose_plugin", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
