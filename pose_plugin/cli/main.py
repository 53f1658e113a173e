"""The `pose-plugin` command. Each subcommand is a row in COMMANDS."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from pose_plugin.utils.errors import PoSEError

Run = Callable[[argparse.Namespace], int]

# Command: (its module in this folder, the function there that adds its arguments, its line in the help).
COMMANDS = {
    "card": (
        "checkpoints",
        "add_card",
        "write or renew a saved folder's model card, with the tables and pictures of an evaluation",
    ),
    "check": (
        "checkpoints",
        "add_check",
        "reload a saved folder in a clean process and compare it with the model that was trained",
    ),
    "coverage": (
        "coverage",
        "add_arguments",
        "show which distances a setting trains, and in how many rows, before anything is trained",
    ),
    "evaluate": (
        "evaluate",
        "add_arguments",
        "measure retrieval, perplexity and more of models and adapters by length, side by side",
    ),
    "export": (
        "checkpoints",
        "add_export",
        "print the lines that serve a saved folder with an engine, and write what it needs",
    ),
    "plan": (
        "plan",
        "add_arguments",
        "show what a training run will do: window, rope, distances, tokens and memory, from its config alone",
    ),
    "synthesize": (
        "synthesize",
        "add_arguments",
        "make long-document question answering data from your own documents, with any OpenAI-compatible server",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: default: those of the command line.

    Returns:
        the exit code; 2 for input that cannot work, which is told in a sentence, without a traceback.
    """
    about = "Extend a model's context window, and prove that it worked."
    parser = argparse.ArgumentParser(prog="pose-plugin", description=about)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runs: dict[str, Run] = {}
    for name, (module, add, line) in COMMANDS.items():
        command = import_module(f"pose_plugin.cli.{module}")
        runs[name] = getattr(command, add)(commands.add_parser(name, help=line, description=line))
    args = parser.parse_args(arguments)
    try:
        code = runs[args.command](args)
        # What is still held back would otherwise be written when nobody can catch what comes of it.
        sys.stdout.flush()
        return code
    except PoSEError as error:
        print(f"pose-plugin {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `… | head` has read enough. As the shell reports a program that this signal has ended.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:  # no matter of the disk's, or nobody knows which
            raise
        print(
            f"pose-plugin {args.command}: {error.filename} cannot be used ({error.strerror}); name a place that can "
            "be read and written",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
