"""The helper that kills runs finds what a kill would break, and leaves alone what no kill can break."""

from __future__ import annotations

from pathlib import Path

import pytest

from pose_plugin.utils.files import write_whole
from tests.kill import survives


def _write_as_one(folder: Path) -> int:
    for name in ("a", "b"):
        write_whole(folder / name, name * 10)
    return 0


def _keep_what_is_there(folder: Path) -> int:
    """A file that a kill cut off is taken for a whole one by the next run."""
    if not (folder / "a").exists():
        with (folder / "a").open("w") as file:
            file.write("a" * 10)
            file.flush()
            file.write("b" * 10)
    return 0


def test_a_run_that_does_not_recover_is_found(tmp_path):
    with pytest.raises(AssertionError):
        survives(_keep_what_is_there, tmp_path, kills=20)


def test_a_run_that_raises_is_no_kill(tmp_path):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        survives(lambda folder: 1 // 0, tmp_path)
