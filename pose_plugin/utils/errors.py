"""The exceptions of the package. Each message names the key, its value, the limit and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class PoSEError(ValueError):
    """Something that the user can fix: a setting, a model or a data set that cannot work as it is."""


class RopeMismatchError(PoSEError):
    """The live model's rotary frequencies differ from the requested ones."""


class SelfTestError(PoSEError):
    """The model, collator and attention implementation together would train without learning."""


def shown(value: Any, limit: int = 100) -> str:
    """Return a value from outside as it is shown in messages: one line, long ones without their middle.

    Args:
        value: an exception is shown by its message, anything else as Python writes it.
        limit: the most characters that are shown.
    """
    text = " ".join((str(value) or type(value).__name__).split()) if isinstance(value, Exception) else repr(value)
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" :")


def regular_expression(key: str, text: str) -> re.Pattern[str]:
    """Return a compiled regular expression.

    Args:
        key: the setting, for the message.
        text: its value.

    Raises:
        PoSEError: the text is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise PoSEError(f"{key}: {text!r} is not a regular expression ({error}); give a list of names") from None


class Complaints:
    """Collect PoSEErrors, to raise all of them at once.

    Example:
        >>> complaints = Complaints()
        >>> with complaints:
        ...     lengths = parse_lengths(text)
        >>> with complaints:
        ...     texts = [read(path) for path in paths]
        >>> complaints.raise_all()  # one line each
    """

    def __init__(self) -> None:
        # A dict, because the same complaint about several models counts once.
        self.found: dict[str, None] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, PoSEError):
            self.found[str(error)] = None
        return isinstance(error, PoSEError)

    def raise_all(self) -> None:
        """Raise PoSEError with all complaints, if there are any."""
        if self.found:
            raise PoSEError("\n".join(self.found))


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, e.g. 'pip install "matplotlib>=3.8"'.

    It names the packages themselves, as the installed metadata list them: pip finds them even if this package was
    installed from a clone or a file and is on no index.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("pose-plugin") or []
    except PackageNotFoundError:  # a checkout on the path, without an installation
        return f'pip install ".[{extra}]" in a clone of pose-plugin'
    needed = [line.partition(";")[0].strip() for line in lines if re.search(rf"extra == .{extra}\W", line)]
    return " ".join(["pip install", *(f'"{each}"' for each in needed)])


def module_of_extra(name: str, needed: str, extra: str) -> Any:
    """Return a module of an extra. Without it, raise PoSEError: `needed` ("… needs openai"), and how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise PoSEError(f"{needed}: {pip_install(extra)}") from None


FORGOTTEN_LINE = (
    "the config has a `pose:` block, but `plugins:` does not name the plugin that reads it, so it would have no "
    "effect. Add `plugins: [pose_plugin]`, or remove the block"
)


def flag(name: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known name most like a misspelt one, or "" if none is like it.

    Args:
        name: what the user wrote.
        known: possible names; one such as "rope.theta" is also found by its last part.
    """
    by_last_part = {each.rsplit(".", 1)[-1]: each for each in reversed(list(known))}
    close = get_close_matches(name.lower(), by_last_part, n=1)
    return f" (did you mean {by_last_part[close[0]]}?)" if close else ""
