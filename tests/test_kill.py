"""The helper that kills runs finds what a kill would break, and leaves alone what no kill can break."""

from __future__ import annotations

from pathlib import Path

import pytest

from pose_plugin.utils.files import write_whole
from tests.kill import run, survives


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


def test_a_killed_child_keeps_no_lock_of_progress_bars(tmp_path):
    from tqdm import tqdm

    list(tqdm(range(1)))

    def killed_with_the_lock(folder):
        tqdm.get_lock().acquire()
        (folder / "file").touch()

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    assert run(killed_with_the_lock, tmp_path / "one", point=0).killed
    assert run(lambda folder: len(list(tqdm(range(2)))), tmp_path / "other", seconds=60).value == 2
