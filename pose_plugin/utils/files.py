"""Atomic file writes, and JSON files."""

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
def atomic_file(file: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path in the same folder, which replaces the file when the block ends.

    If the block raises, the temporary file is removed and the old file stays. An existing file keeps its mode. A
    symbolic link is replaced by a file, and its target stays: in the hub's cache, several revisions share it.

    Example:
        >>> with atomic_file(Path("weights.pt")) as part:
        ...     torch.save(weights, part)
    """
    # The underscore: uploads to the hub leave such names out. The random part: several processes may write the same
    # file. The cut: file systems limit names to 255 bytes.
    part = file.with_name(f"_{file.name[:50]}.{uuid.uuid4().hex}.part")
    try:
        yield part
        # There may be no old file, another process may just have removed it, or the file system has no modes.
        with suppress(OSError):
            shutil.copymode(file, part)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

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
    """Write values as indented JSON, atomically."""
    write_whole(file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically, with the line ends as they are in the text."""
    with atomic_file(file) as part:
        part.write_text(text, encoding="utf-8", newline="")
