"""Lengths that a user gives. Imports nothing heavy."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from pose_plugin.utils.errors import PoSEError


def whole(lengths: Any, name: str = "lengths") -> list[int]:
    """The lengths, if they are a list of whole numbers.

    Args:
        lengths: in tokens.
        name: of the argument.

    Raises:
        PoSEError: text, one number, parts of a token.
    """
    one = isinstance(lengths, str | Integral) or not hasattr(lengths, "__iter__")
    if one or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in lengths):
        raise PoSEError(f"{name}={lengths!r} must be a list of whole numbers of tokens, e.g. [2048, 8192]")
    return list(lengths)
