"""`pose-plugin coverage`: which distances a setting trains, before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin.cli.parser import count, share
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import parse_length, parse_lengths
from pose_plugin.utils.tables import columns, counted

if TYPE_CHECKING:
    from pose_plugin.config import PoSESettings
    from pose_plugin.positions.coverage import Coverage

EPILOG = """\
example, 64000 rows (1000 steps of 64) that extend a window of 2048 tokens to 16384:
  pose-plugin coverage --target-length 16384 --train-length 2048 \\
    --compare pose:3,clamped,none --rows 64000 --output coverage.png
"""
_DRAWS = 8000
# Enough for a standard error of 0.02 %; more would take hours.
MOST_DRAWS = 10**7
_SETTINGS = (
    "target_length",
    "train_length",
    "sampler",
    "chunks",
    "variant",
    "unskipped_ratio",
    "target_margin",
)


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command and return the function that runs it."""
    from pose_plugin.positions import SAMPLERS

    bordered = [name for name, kind in SAMPLERS.items() if kind.border_finder is not None]
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--target-length", type=partial(parse_length, least=2), required=True, help="L_t, the target window in tokens")
    add("--train-length", type=parse_length, required=True, help="L_c, the trained window (Axolotl: sequence_len)")
    add("--sampler", default="pose", choices=SAMPLERS, metavar="NAME", help=f"{', '.join(SAMPLERS)} (default pose)")
    add("--chunks", type=count, default=2, help="N, the number of chunks of a window (default 2)")
    add("--variant", default="paper", choices=("paper", "reference"), help="reference: first chunk at most half a "
        "window (default paper)")  # fmt: skip
    add("--unskipped-ratio", type=share, default=0.0, help="share of rows that keep plain positions (default 0)")
    add("--target-margin", type=partial(parse_length, least=0), default=0, help="draw positions up to the "
        "target + margin (default 0)")  # fmt: skip
    add("--compare", metavar="LIST", default="", help="more samplers, separated by commas; :N sets their chunks, "
        "e.g. pose:3,clamped,randpos")  # fmt: skip
    add("--every", type=parse_length, metavar="TOKENS", help=f"{', '.join(bordered)}: tokens from one border of the "
        "simulated rows to the next (default: turns: an eighth of the window, sentences: 25)")  # fmt: skip
    add("--rows", type=count, help="rows of the training run: also print how many of them hold each distance")
    add("--distances", type=parse_lengths, help="tokens, separated by commas (default: some up to the target)")
    add(
        "--draws",
        type=partial(count, most=MOST_DRAWS),
        help=f"simulated rows (default {_DRAWS}, fewer with many chunks)",
    )
    add("--seed", type=partial(count, least=0), default=0, help="random seed of the simulation (default 0)")
    add("--output", metavar="FILE", help="the figure, .png, .svg or .pdf; a .csv is written next to it")
    add("--no-figures", action="store_true", help="write only the .csv, which needs no matplotlib")
    return run


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table, write the figure and the CSV file.

    Raises:
        PoSEError: an option that cannot work; raised before anything is simulated.
    """
    from pose_plugin.positions import affordable_draws, coverage
    from pose_plugin.positions.figure import draw_coverage, write_coverage
    from pose_plugin.utils.files import staged
    from pose_plugin.utils.plots import check_ending, require_matplotlib

    settings = _settings(args)
    distances = _distances(args)
    output = Path(args.output) if args.output else None
    if output is not None:
        _check_output(output)
        if not args.no_figures:
            require_matplotlib("--no-figures")
            check_ending(output)
    seen = {}
    for name, values in settings.items():
        draws = args.draws or affordable_draws(values, _DRAWS)
        seen[name] = coverage(values, draws=draws, seed=args.seed, every=args.every, progress=True)
    print(text(seen, distances, args.rows))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        names = [output.with_suffix(".csv").name, *([] if args.no_figures else [output.name])]
        with staged(output.parent) as stage:
            with stage.new(names[0]) as part:
                write_coverage(seen, part, args.rows)
            for name in names[1:]:
                with stage.new(name) as part:
                    draw_coverage(seen, part)
        print(f"\nWritten: {', '.join(str(output.with_name(name)) for name in names)}")
    return 0


def text(seen: Mapping[str, Coverage], distances: list[int], rows: int | None) -> str:
    """Return the tables for the terminal: chances, and with `rows` how many of them hold each distance."""
    values = next(iter(seen.values())).settings
    title = f"{values.train_length} → {values.target_length} tokens"
    head = ["distance", *map(str, distances)]
    chances = [[name, *(f"{c.probability[d]:.3f}" for d in distances)] for name, c in seen.items()]
    parts = [f"Chance that a training row holds two tokens at a distance ({title})"]
    parts.append(columns([head, *chances]))
    if rows:
        counts = [[name, *(f"{c.after(rows)[d]:.0f}" for d in distances)] for name, c in seen.items()]
        parts += [f"\nRows that hold it, of {rows}", columns([head, *counts])]
    parts.append("")
    for name, c in seen.items():
        error = 50 / c.draws**0.5
        parts.append(f"{name}: {_rare(c)}; {c.draws} simulated rows, standard error at most {error:.1g} %")
    return "\n".join(parts)


def _rare(seen: Coverage) -> str:
    """Say how much of the target is rarely trained; the last distances before it always are the rarest."""
    rare = seen.probability[1:] < 0.01
    if not rare.any():
        return "every distance is in 1 % of the rows or more"
    first = int(rare.argmax()) + 1
    return f"{rare.sum()} of {len(rare)} distances are in less than 1 % of the rows, the nearest {first}"


def _settings(args: argparse.Namespace) -> dict[str, PoSESettings]:
    """Return the settings by the name of their line, the user's own first."""
    from pose_plugin.config import parse_settings
    from pose_plugin.positions.coverage import require_simulable
    from pose_plugin.positions.samplers import SAMPLERS, unread_options

    own: dict[str, Any] = {name: getattr(args, name) for name in _SETTINGS}
    wanted = [own]
    for item in filter(None, map(str.strip, args.compare.split(","))):
        sampler, colon, chunks = item.partition(":")
        if colon and not chunks.isdecimal():
            raise PoSEError(f"--compare {item}: chunks must be a number, e.g. {sampler or 'pose'}:3")
        wanted.append(own | {"sampler": sampler} | ({"chunks": int(chunks)} if colon else {}))
    settings: dict[str, PoSESettings] = {}
    for values in wanted:
        # The options are for all samplers of --compare; one that does not read an option ignores it.
        if values["sampler"] in SAMPLERS:
            unread = unread_options(values["sampler"])
            values = {name: value for name, value in values.items() if name not in unread}
        if values.get("chunks", 1) > args.train_length:
            raise PoSEError(
                f"chunks={values['chunks']} are more than the tokens of a window, --train-length {args.train_length}"
            )
        parsed = parse_settings(values, where="pose")
        settings.setdefault(_label(parsed), parsed)
    bordered = [name for name, kind in SAMPLERS.items() if kind.border_finder is not None]
    if args.every is not None and not any(each.sampler in bordered for each in settings.values()):
        raise PoSEError(f"--every {args.every} has no effect without --sampler {' or '.join(bordered)}")
    for each in settings.values():
        require_simulable(each)
    return settings


def _label(settings: PoSESettings) -> str:
    from pose_plugin.positions import make_sampler

    options = make_sampler(settings).options()
    chunks = f", {counted(settings.chunks, 'chunk')}" if "chunks" in options else ""
    reference = ", reference" if settings.variant == "reference" else ""
    return f"{settings.sampler}{chunks}{reference}"


def _distances(args: argparse.Namespace) -> list[int]:
    from pose_plugin.positions import usual_distances

    target = args.target_length
    if args.distances is None:
        return usual_distances(target, args.train_length)
    outside = [d for d in args.distances if d >= target]
    if outside:
        raise PoSEError(f"--distances {outside[0]} must be from 1 to {target - 1}, below the target")
    return list(args.distances)


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise PoSEError(f"--output {output} is a folder; name a file, e.g. {output / 'coverage.png'}")
    if any(parent.is_file() for parent in output.parents):
        raise PoSEError(f"--output {output} lies inside a file, not a folder; name another place")
