"""The `pose-plugin` command. Each subcommand is a row in COMMANDS; its module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from pose_plugin._version import __version__
from pose_plugin.cli.parser import Parser
from pose_plugin.utils.errors import PoSEError, did_you_mean, shown
from pose_plugin.utils.files import OF_THE_DISK, space_left
from pose_plugin.utils.log import printable

# Command: its line in the help.
COMMANDS = {
    "init": "write a complete Axolotl YAML or TRL script for a base, a data set and GPUs, with the reason for each "
    "choice",
    "plan": "show what a training run will do: window, RoPE, distances, tokens and memory, from its config alone",
    "coverage": "show which distances a setting trains, and in how many rows, before anything is trained",
    "synthesize": "make long-document question answering data from your own documents, with any OpenAI-compatible "
    "server",
    "check": "reload a saved folder in a clean process and compare it with the model that was trained",
    "doctor": "find out why a folder of any trainer, or a running server, does not use its long window",
    "evaluate": "measure retrieval, perplexity and more by length, for several models and adapters side by side",
    "export": "print the lines that serve a saved folder with an engine, and write the files that the engine needs",
    "card": "write or renew a saved folder's model card, with the tables and pictures of an evaluation",
}
# Several commands in one module: `check` is in `checkpoints`, as `add_check`. Others have a module of their name.
_MODULES = dict.fromkeys(("check", "export", "card"), "checkpoints")
# Set to anything to see where an error came from, instead of one sentence.
TRACEBACK = "POSE_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: default: those of the command line.

    Returns:
        the exit code: 0; 1 if something was left undone; 2 for input that cannot work; 130 after Ctrl-C.
    """
    line = list(sys.argv[1:] if arguments is None else arguments)
    name = line[0] if line and line[0] in COMMANDS else None
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal may lack the letters of a file name, or an arrow.
            stream.reconfigure(errors="backslashreplace")
    code = [0]
    with _errors(f"pose-plugin {name}" if name else "pose-plugin", code):
        code[0] = _run(name, line[1:]) if name else _without_command(line)
        # Flush here, so that a broken pipe is raised inside this block.
        sys.stdout.flush()
    return code[0]


def _run(name: str, words: list[str]) -> int:
    parser = Parser(prog=f"pose-plugin {name}", description=COMMANDS[name])
    run = add_arguments(name, parser)
    return run(parser.read(words))


def add_arguments(name: str, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of a command and return the function that runs it."""
    module = import_module(f"pose_plugin.cli.{_MODULES.get(name, name)}")
    add = getattr(module, f"add_{name}" if name in _MODULES else "add_arguments")
    run: Callable[[argparse.Namespace], int] = add(parser)
    return run


def _without_command(line: list[str]) -> int:
    """Print help or version, or raise PoSEError for a line that names no command."""
    parser = Parser(
        prog="pose-plugin",
        description="Extend a model's context window, and check that it worked.",
        epilog="`pose-plugin COMMAND --help` lists the options of a command. Lengths are in tokens: 81920 or 80k.",
    )
    parser.add_argument("--version", action="version", version=f"pose-plugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    if line and not line[0].startswith("-"):
        raise PoSEError(f"{shown(line[0])} is not a command{did_you_mean(line[0], COMMANDS)}; see pose-plugin --help")
    parser.read(line)
    raise PoSEError(f"name a command: {', '.join(COMMANDS)}; see pose-plugin --help")


# A damaged file may hold a name or a value of any length.
_LONG_WORD = re.compile(r"\S{600,}")


@contextlib.contextmanager
def _errors(command: str, code: list[int]) -> Iterator[None]:
    """Turn what a command raises into a sentence on stderr and an exit code.

    Only errors of the package itself keep their traceback: there, something else than the input is wrong.
    """
    try:
        yield
        return
    except KeyboardInterrupt:
        code[0], sentence = 130, "interrupted"
    except BrokenPipeError:
        # `… | head` closed the pipe. Python flushes stdout once more at exit, which must not fail again. 141 is what a
        # shell reports for a program that SIGPIPE ended.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code[0] = 141
        return
    except PoSEError as error:
        code[0], sentence = 2, str(error)
    except (OSError, MemoryError, ValueError) as error:
        if os.environ.get(TRACEBACK):
            raise
        code[0], sentence = _of_system(error)
    short = _LONG_WORD.sub(lambda found: f"{found[0][:50]}...{found[0][-50:]}", sentence)
    print(printable(f"{command}: {short}"), file=sys.stderr)


def _of_system(error: Exception) -> tuple[int, str]:
    """Return the exit code and the sentence for an error of the operating system or of a library."""
    if isinstance(error, MemoryError):
        return 1, f"there is not enough memory ({str(error) or 'no details'}); give smaller numbers"
    if not isinstance(error, OSError) or error.strerror is None:
        return 1, f"{type(error).__name__}: {shown(error, 500)} (set {TRACEBACK}=1 to see where)"
    if error.errno in OF_THE_DISK:
        space = space_left(error.filename) if error.filename else ""
        mend = "Free space there, or write to another place, and run it again"
        return 1, f"{error.filename or 'a file'} cannot be written: {error.strerror}{space}. {mend}"
    if error.filename is None:
        return 1, f"{error.strerror} (set {TRACEBACK}=1 to see where)"
    return 2, f"{error.filename} cannot be used ({error.strerror}); give a path that can be read and written"


if __name__ == "__main__":
    sys.exit(main())
