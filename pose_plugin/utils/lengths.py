"""Lengths in tokens, as people write them: 81920, 80k or 1M. Every option and setting follows this one rule."""

from __future__ import annotations

import re
from typing import Any

from pose_plugin.utils.errors import PoSEError

# The longest position that every backend can hold, 32-bit kernels included.
LONGEST = 2**31 - 1
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str, least: int = 1) -> int:
    """Return the number of tokens that a text names. `k` stands for 1,024 and `m` for 1,048,576, in either case.

    Example:
        >>> parse_length("80K"), parse_length("81920")
        (81920, 81920)

    Raises:
        PoSEError: it is not such a number, or not from `least` to 2³¹ - 1.
    """
    length = length_or_same(text)
    if not isinstance(length, int) or not least <= length <= LONGEST:
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise PoSEError(f"{shown!r} is not a number of tokens from {least} to {LONGEST}; write e.g. 81920, 32k or 1M")
    return length


def length_or_same(value: Any) -> Any:
    """Return the length that a text names, of any size, and other values as they are, for pydantic to check."""
    # Ten digits hold every length; int() raises its own error for texts of thousands of digits.
    found = re.fullmatch(r"([0-9]{1,10})([km]?)", value.strip().lower()) if isinstance(value, str) else None
    return int(found[1]) * _UNITS[found[2]] if found else value


def parse_lengths(text: str) -> list[int]:
    """Return the lengths in a list with commas, sorted, each once.

    Raises:
        PoSEError: naming every part that is not a length.
    """
    lengths, complaints = set(), []
    for part in text.split(","):
        try:
            lengths.add(parse_length(part))
        except PoSEError as error:
            complaints.append(str(error))
    if complaints:
        raise PoSEError("; ".join(complaints))
    return sorted(lengths)


def lengths_of(values: Any) -> list[int]:
    """Return lengths that a Python program gives, one or several: numbers, or texts such as "32k".

    Raises:
        PoSEError: naming the first that is no length.
    """
    listed = [values] if isinstance(values, (int, str)) else list(values)
    found = [length_or_same(value) for value in listed]
    for value in found:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise PoSEError(f"lengths={values!r}: {value!r} is not a number of tokens; give e.g. [81920], or ['80k']")
    return [int(value) for value in found]
