"""The command line of all commands: it reports every complaint at once, suggests what was meant, and shows no values
that may be secret. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pose_plugin.utils.errors import PoSEError, did_you_mean, shown

ADDRESS = "give the address of the server, up to /v1"


class Parser(argparse.ArgumentParser):
    """Parses a command line as argparse does, but goes on after a complaint.

    `type=` functions raise PoSEError, whose sentence follows the option's name.
    """

    def __init__(self, **options: Any) -> None:
        # With abbreviations, `--token KEY` would be --tokens-per-second, and the message would show the key.
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})
        self._complaints: list[str] = []
        self._wrong: set[str] = set()

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            PoSEError: one line for each unknown option, wrong value and missing argument.
        """
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False  # argparse would stop at the first one
        try:
            args, rest = self.parse_known_args(words)
        finally:
            for action in required:
                action.required = True
        self._complaints += self._unknown(rest)
        for action in required:
            if not getattr(args, action.dest) and action.dest not in self._wrong:
                self._complaints.append(f"{_name(action)} is missing: {action.help}")
        if self._complaints:
            raise PoSEError("\n".join([*self._complaints, f"See {self.prog} --help"]))
        return args

    def error(self, message: str) -> Any:
        """Raise PoSEError for what leaves no line to parse, such as an option without its value."""
        message = re.sub(r"ignored explicit argument .*", "it takes no value", message, flags=re.DOTALL)
        raise PoSEError("\n".join([*self._complaints, message, f"See {self.prog} --help"]))

    # The two functions of argparse that raise for a value. If a version of Python calls others, it stops at the first
    # complaint, in its own words.
    def _get_value(self, action: argparse.Action, text: str) -> Any:
        kind: Callable[[str], Any] = action.type or str  # type: ignore[assignment]
        try:
            return kind(text)
        except ValueError as error:
            reason = str(error) if isinstance(error, PoSEError) else f"{shown(text)} is not a number"
            self._complain(action, reason)
            return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not None and action.choices is not None and value not in action.choices:
            known = action.choices
            if isinstance(known, range):
                self._complain(action, f"{value} is not from {known.start} to {known.stop - 1}")
            else:
                names = [str(each) for each in known]
                self._complain(action, f"{shown(value)} is not one of {', '.join(names)}{did_you_mean(value, names)}")

    def _complain(self, action: argparse.Action, reason: str) -> None:
        self._wrong.add(action.dest)
        self._complaints.append(f"{_name(action)}: {reason}")

    def _unknown(self, words: list[str]) -> list[str]:
        known = [name for action in self._actions for name in action.option_strings]
        options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
        if words and not options:
            return [f"{shown(words[0])} is one argument too many"]
        # Without their values, because somebody may have tried to pass a key.
        return [f"{shown(name)} is not an option{did_you_mean(name, known)}" for name in options]


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def count(text: str, least: int = 1, most: int = 10**15) -> int:
    """Return a whole number from `least` to `most`. Raise PoSEError for anything else."""
    # int() raises its own error for texts of thousands of digits.
    number = int(text) if re.fullmatch(r"[0-9]{1,16}", text) else -1
    if not least <= number <= most:
        raise PoSEError(f"{shown(text)} is not a whole number from {least} to {most}")
    return number


def amount(text: str, most: float = math.inf) -> float:
    """Return a finite number above 0 and up to `most`. Raise PoSEError for anything else."""
    number = _number(text)
    if not (0 < number <= most and number < math.inf):
        limit = "" if most == math.inf else f" and up to {most:g}"
        unit = "; leave its unit out" if math.isnan(number) and text[:1].isdigit() else ""
        raise PoSEError(f"{shown(text)} is not a number above 0{limit}{unit}")
    return number


def share(text: str) -> float:
    """Return a number from 0 to 1. Raise PoSEError for anything else."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise PoSEError(f"{shown(text)} is not a number from 0 to 1")
    return number


def require_option(args: argparse.Namespace, needed: str, options: Iterable[str], mend: str) -> None:
    """Raise PoSEError for options that were given and have no effect without another one.

    Args:
        args: of the command line; an option that was not given is None, False or empty.
        needed: the other option.
        options: those that need it.
        mend: what to do.
    """
    given = [_with_value(option, value) for option in options if (value := getattr(args, _dest(option)))]
    if given and not getattr(args, _dest(needed)):
        have = "has" if len(given) == 1 else "have"
        raise PoSEError(f"{', '.join(given)} {have} no effect without {needed}; {mend}")


def _with_value(option: str, value: Any) -> str:
    # Somebody may have given the key itself as the name of its variable.
    if value is True or option == "--key-variable":
        return option
    return f"{option} {' '.join(value) if isinstance(value, list) else value}"


def _dest(option: str) -> str:
    return option[2:].replace("-", "_")


def _number(text: str) -> float:
    """Return a number, or NaN, which no comparison accepts."""
    try:
        return float(text)
    except ValueError:
        return math.nan
