"""Files that appear whole: they hold what they held, or all that is new, whatever a kill or a full disk comes upon."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError


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


def read_json(file: Path) -> dict[str, Any]:
    """
    Raises:
        PoSEError: the file is not JSON, or not an object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PoSEError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise PoSEError(f"{file} holds a {type(values).__name__}, not an object {{…}}; save the folder again")
    return values


def write_json(file: Path, values: Any) -> None:
    write_whole(file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Writes a file that others may read, or that a kill may come upon: it holds what it held, or the text, never half.

    The mode of a file that is there stays. A link gives way to a file, and what it points to stays as it is: in the
    hub's cache that is shared.
    """
    with appearing(file) as part:
        part.write_text(text, encoding="utf-8", newline="")
