"""Tables and counts in texts for people."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def counted(number: float, noun: str, form: str = "") -> str:
    """Return a number with its noun: "1 text" or "2 texts".

    Args:
        noun: in the singular; its plural ends in s.
        form: of the number, e.g. "," for 1,024.
    """
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"
