"""`pose-plugin synthesize`. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from pose_plugin.synthesize.settings import JOURNAL, RECIPES, ROWS, TRIES, Settings, parse_settings
from pose_plugin.utils.errors import PoSEError, first_line, flag

if TYPE_CHECKING:
    from pose_plugin.synthesize.run import Result

EPILOG = """\
example, with your own server:
  pose-plugin synthesize books/ --output data --tokenizer my-model --window 81920 \\
    --model served-name --base-url http://localhost:8000/v1 --tasks single,multi --plan
A key is read from the environment only, and is not written to any file.
"""
# The first option of each group in the help → the group's title.
GROUPS = {"text_field": "documents", "questions": "questions", "concurrency": "server", "price_input": "money"}


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add an option for each field of Settings. pydantic converts and validates the values."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--plan", action="store_true", help="only print how many requests and tokens a run takes and what it costs")
    add("--recipe", choices=RECIPES, help="take the options of a published recipe, unless they are given: "
        + "; ".join(f"{name} is {_line(values)}" for name, values in RECIPES.items()))  # fmt: skip
    add("--accept-changes", action="store_true", help="resume a folder that was started with other settings")
    add("--quiet", action="store_true", help="no progress bar")
    add("inputs", nargs="+", metavar="PATH", help=Settings.model_fields["inputs"].description)
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            add = parser.add_argument_group(GROUPS[name]).add_argument
        text = field.description or ""
        if field.annotation is bool:
            add(flag(f"no_{name}"), dest=name, action="store_false", default=None, help=text)
        elif name != "inputs":
            if "default" not in text and field.default is not None and not field.is_required():
                text += f" (default {field.default})"
            choices = [each for each in get_args(field.annotation) if isinstance(each, str)]
            # A recipe may give the window, so pydantic reports it if it is missing.
            required = field.is_required() and name != "window"
            add(flag(name), required=required, choices=choices or None, help=text.replace("%", "%%"))
    return run


def run(args: argparse.Namespace) -> int:
    """Print the plan, then request answers and write rows.

    Returns:
        0; 1 if a request was given up, a stop left rows unfinished, or there is no row.
    """
    settings = parse_settings(
        {name: getattr(args, name) for name in Settings.model_fields if getattr(args, name) is not None}, args.recipe
    )
    if settings.output.exists() and not settings.output.is_dir():
        raise PoSEError(f"--output {settings.output} is a file; name a folder")

    from pose_plugin.synthesize.estimate import Plan, describe
    from pose_plugin.synthesize.output import require_own, require_same, require_same_files
    from pose_plugin.synthesize.paid import Answers
    from pose_plugin.synthesize.run import key_from
    from pose_plugin.synthesize.run import run as run_items
    from pose_plugin.synthesize.select import assign, collect
    from pose_plugin.utils.clean import Cleaner
    from pose_plugin.utils.log import show_log

    show_log()
    if not args.plan:
        key_from(settings)
    require_own(settings.output)
    tokenizer = load_tokenizer(settings.tokenizer)
    if not args.accept_changes:
        require_same(settings.output, settings, tokenizer)
    from tqdm import tqdm

    with tqdm(desc="reading", unit="document", disable=args.quiet, leave=False) as bar:
        found = collect(settings, tokenizer, bar.update)
    if not args.accept_changes:
        require_same_files(settings.output, found.files)
    items = assign(found, settings)
    answers = Answers(settings.output / JOURNAL, Cleaner())
    print(describe(Plan(items, settings), found, items, answers, settings), flush=True)
    if args.plan:
        return 0
    result = run_items(items, found, settings, tokenizer, progress=not args.quiet)
    return _report(result, settings)


def _line(values: dict[str, Any]) -> str:
    return " ".join(f"{flag(name)} {value}" for name, value in values.items())


def load_tokenizer(name: str) -> Any:
    """Load the training tokenizer, or raise PoSEError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PoSEError(
            f"--tokenizer {name} cannot be loaded ({first_line(error)}); give the folder or hub name of the model to "
            "train"
        ) from None


def _report(result: Result, settings: Settings) -> int:
    print(f"rows: {result.rows} in {settings.output / ROWS}")
    for reason, count in sorted(result.dropped.items()):
        print(f"  left out: {count} {reason}")
    unusable = sum(TRIES in sentence for sentence in result.given_up)
    if unusable:
        more = f"--tries {settings.tries + 3} asks again"
        print(f"  given up: {unusable} requests with {settings.tries} unusable answers each; {more}")
    if len(result.given_up) > unusable:
        print(
            f"  given up: {len(result.given_up) - unusable} requests without an answer; the same command repeats them"
        )
    if result.stopped:
        print(f"stopped: {result.stopped}", file=sys.stderr)
        print(f"  {result.unfinished} rows are unfinished; run the same command again to resume", file=sys.stderr)
    elif not result.rows:
        print("there is no row: everything was left out, for the reasons above", file=sys.stderr)
    return 1 if result.given_up or result.stopped or not result.rows else 0
