"""The `pose-plugin` command. A subcommand is one function that adds its arguments, and one line in COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from pose_plugin.errors import PoSEError

Run = Callable[[argparse.Namespace], int]


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """measure passkey retrieval and perplexity of models and adapters, side by side"""
    from pose_plugin.evaluation import command

    command.add_arguments(parser)
    return command.run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {
    "evaluate": evaluate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns its exit code; 2 for input that cannot work, with one sentence and no traceback."""
    parser = argparse.ArgumentParser(prog="pose-plugin", description="Extend a context window and prove it worked.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runs = {}
    for name, add in COMMANDS.items():
        # The docstring of a subcommand is its line in the help.
        runs[name] = add(commands.add_parser(name, help=add.__doc__, description=add.__doc__))
    args = parser.parse_args(arguments)
    try:
        return runs[args.command](args)
    except PoSEError as error:
        print(f"pose-plugin {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
