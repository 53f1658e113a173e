"""`axolotl pose COMMAND …`: the same commands as `pose-plugin COMMAND …`, listed in `axolotl --help`."""

from __future__ import annotations

import sys

import click  # Axolotl depends on it, and only Axolotl imports this module

from pose_plugin.cli.main import main


# Pass every word on, `--help` included: argparse reads them.
@click.command(
    "pose",
    short_help="plan, check, evaluate and export context window extension",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def pose(words: tuple[str, ...]) -> None:
    """Run a command of pose-plugin, for example `axolotl pose plan config.yaml`."""
    sys.exit(main(words))
