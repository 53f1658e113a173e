"""The `pose-plugin` command. Each subcommand is a row in COMMANDS; its module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from pose_plugin.utils.errors import PoSEError

# Command: (its module in this folder, the function there that adds its options, its line in the help).
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
        "measure retrieval, perplexity and more by length, for several models and adapters side by side",
    ),
    "export": (
        "checkpoints",
        "add_export",
        "print the lines that serve a saved folder with an engine, and write the files that the engine needs",
    ),
    "plan": (
        "plan",
        "add_arguments",
        "show what a training run will do: window, RoPE, distances, tokens and memory, from its config alone",
    ),
    "synthesize": (
        "synthesize",
        "add_arguments",
        "make long-document question answering data from your own documents, with any OpenAI-compatible server",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: default: those of the command line.

    Returns:
        the exit code; 2 for input that cannot work, with one sentence on stderr and no traceback.
    """
    line = list(sys.argv[1:] if arguments is None else arguments)
    about = "Extend a model's context window, and prove that it worked."
    parser = argparse.ArgumentParser(prog="pose-plugin", description=about)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run: Callable[[argparse.Namespace], int] | None = None
    for name, (module, add, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # No option but --help comes before the command, so the first word decides which module is needed.
        if line[:1] == [name]:
            run = getattr(import_module(f"pose_plugin.cli.{module}"), add)(command)
    args = parser.parse_args(line)
    assert run is not None, "argparse exits if the command is missing or unknown"
    try:
        code = run(args)
        # Flush here, so that a broken pipe is raised inside this `try`.
        sys.stdout.flush()
        return code
    except PoSEError as error:
        print(f"pose-plugin {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `… | head` closed the pipe. Python flushes stdout once more at exit, which must not fail again. 141 is what a
        # shell reports for a program that SIGPIPE ended.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:  # not about a file, so there is no path to name
            raise
        print(
            f"pose-plugin {args.command}: {error.filename} cannot be used ({error.strerror}); give a path that can be "
            "read and written",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
