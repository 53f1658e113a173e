"""The `pose-plugin` command. A subcommand is a function that adds its arguments, and a line in COMMANDS."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from pose_plugin.errors import PoSEError

Run = Callable[[argparse.Namespace], int]


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """measure retrieval, perplexity and more of models and adapters by length, side by side"""
    from pose_plugin.evaluation import command

    command.add_arguments(parser)
    return command.run


def coverage(parser: argparse.ArgumentParser) -> Run:
    """show which distances a setting trains, and in how many rows, before anything is trained"""
    from pose_plugin.positions import command

    command.add_arguments(parser)
    return command.run


def card(parser: argparse.ArgumentParser) -> Run:
    """write or renew a saved folder's model card, with the tables and pictures of an evaluation"""
    from pose_plugin.serving import command

    return command.add_card(parser)


def check(parser: argparse.ArgumentParser) -> Run:
    """reload a saved folder in a clean process and compare it with the model that was trained"""
    from pose_plugin.serving import command

    return command.add_check(parser)


def export(parser: argparse.ArgumentParser) -> Run:
    """print the lines that serve a saved folder with an engine, and write what it needs"""
    from pose_plugin.serving import command

    return command.add_export(parser)


def synthesize(parser: argparse.ArgumentParser) -> Run:
    """make long-document question answering data from your own documents, with any OpenAI-compatible server"""
    from pose_plugin.synthesize import command

    command.add_arguments(parser)
    return command.run


def plan(parser: argparse.ArgumentParser) -> Run:
    """tell what a training run will do: window, rope, distances, tokens and memory, from its config alone"""
    from pose_plugin.plan import command

    command.add_arguments(parser)
    return command.run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {
    "card": card,
    "check": check,
    "coverage": coverage,
    "evaluate": evaluate,
    "export": export,
    "plan": plan,
    "synthesize": synthesize,
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
    runs = {}
    for name, add in COMMANDS.items():
        # The docstring of a subcommand is its line in the help.
        runs[name] = add(commands.add_parser(name, help=add.__doc__, description=add.__doc__))
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
