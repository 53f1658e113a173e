"""Texts that a user names by file. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from pose_plugin.utils.errors import PoSEError


def read_text(path: str, where: str = "") -> str:
    """A UTF-8 file that is not empty.

    Args:
        path: the file.
        where: the setting that names it, for the error.

    Raises:
        PoSEError: no such file, not UTF-8, or nothing in it.
    """
    named = f"{where}: {path}" if where else path
    try:
        # Without the mark that some editors put before a text: it would be a token.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PoSEError(f"{named} could not be read as a UTF-8 text file: {error}") from error
    if not text.strip():
        raise PoSEError(f"{named} is empty; give a file with text")
    return text
