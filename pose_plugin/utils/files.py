"""Files that appear whole: they hold what they held, or all that is new, whatever a kill or a full disk comes upon."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def appearing(file: Path) -> Iterator[Path]:
    """A part to write beside a file, which it replaces when the block ends; where the block fails, it is removed.

    The mode of a file that is there stays.
    """
    # Uploads leave out what begins with an underscore; and two processes, on two machines perhaps, do not meet.
    # Of a long name the beginning, or the part's would be too long.
    part = file.with_name(f"_{file.name[:50]}.{uuid.uuid4().hex}.part")
    try:
        yield part
        # Where there is none, or another process has just taken it away, or the disk knows no modes.
        with suppress(OSError):
            shutil.copymode(file, part)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
