"""`pose-plugin synthesize`. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pose_plugin.synthesize.settings import FORMATS, JOURNAL, LONGER, ROWS, Settings, parse_tasks
from pose_plugin.utils.errors import PoSEError

EPILOG = """\
example, with a server of your own:
  pose-plugin synthesize books/ --output data --tokenizer my-model --window 81920 \\
    --model served-name --base-url http://localhost:8000/v1 --tasks single,multi --plan
The key of a server that wants one is read from the environment, and stands in no file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("inputs", nargs="+", metavar="PATH", type=Path, help="files or folders: .txt, .md, .jsonl, .parquet")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of rows, journal and manifest; resumed if there",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="of the model that will be trained; lengths are in its tokens",
    )
    add("--window", required=True, type=int, help="tokens of a row; longer rows are dropped")
    add("--model", required=True, help="name of the model that writes, as the server knows it")
    add("--base-url", metavar="URL", help="of the server, up to /v1; default: $OPENAI_BASE_URL, else OpenAI's")
    add("--key-variable", metavar="NAME", help="environment variable with the key (default OPENAI_API_KEY)")
    add(
        "--tasks",
        help="of single, multi, compare, biography, with the most rows of each: single=200,multi (default single)",
    )
    add("--plan", action="store_true", help="only say how many requests, tokens and how much money it would take")
    group = parser.add_argument_group("documents")
    add = group.add_argument
    add("--text-field", metavar="NAME", help="field of .jsonl and .parquet rows (default text)")
    add("--languages", help="keep these only, e.g. en,de (ISO 639-1); default: all")
    add("--min-tokens", type=int, help="shortest long document (default: one chunk, or half of --max-tokens)")
    add("--max-tokens", type=int, help="longest document (default: the window less room for questions)")
    add("--min-short", type=int, help="shortest document to compare (default 64); the longest is below --min-tokens")
    add("--longer", choices=LONGER, help="what becomes of longer documents (default drop)")
    group = parser.add_argument_group("questions")
    add = group.add_argument
    add("--questions", type=int, help="on one document, all in one conversation (default 10)")
    add("--characters", type=int, help="biographies of one book (default 3)")
    add("--group-size", type=int, help="short documents compared in one row (default 4)")
    add("--chunk-tokens", type=int, help="piece that a single-detail question is about (default 4096)")
    add(
        "--request-tokens",
        type=int,
        help="most document tokens in one request; of more, pieces are sent (default 32768)",
    )
    add("--answer-tokens", type=int, help="most tokens of one answer (default 4096)")
    add("--no-check-quotes", dest="check_quotes", action="store_false", default=None,
        help="keep questions whose quotes are not in the text")  # fmt: skip
    add("--temperature", type=float, help="of the model that writes (default 0.7)")
    add("--seed", type=int, help="of the choice of documents and pieces, and sent with requests (default 0)")
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--concurrency", type=int, help="requests at a time (default 8)")
    add("--requests-per-minute", type=float, help="default: no limit")
    add("--tokens-per-minute", type=float, help="input and longest answer together; default: no limit")
    add("--tries", type=int, help="answers asked for until one is usable (default 3)")
    add("--retries", type=int, help="repeats of a request that got no answer (default 6)")
    add("--retry-wait", type=float, help="seconds before the first repeat, doubled each time (default 1)")
    add("--timeout", type=float, help="seconds for one answer (default 300)")
    add("--answer-format", choices=FORMATS, help="how JSON is asked for; auto finds what the server can (default auto)")
    group = parser.add_argument_group("money")
    add = group.add_argument
    add("--price-input", type=float, help="per million tokens read, in any currency")
    add("--price-output", type=float, help="per million tokens written")
    add("--budget", type=float, help="stop before the whole folder has cost more than this")
    add = parser.add_argument
    add("--accept-changes", action="store_true", help="go on in a folder that was begun with other settings")
    add("--quiet", action="store_true", help="no progress bar")
    return run


def settings_from(args: argparse.Namespace) -> Settings:
    """Raises PoSEError for values that cannot work."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name in ("command", "plan", "accept_changes", "quiet"):
        given.pop(name, None)
    given["inputs"] = tuple(given["inputs"])
    if "tasks" in given:
        given["tasks"] = parse_tasks(given["tasks"])
    if "languages" in given:
        given["languages"] = tuple(filter(None, (each.strip().lower() for each in given["languages"].split(","))))
    return Settings(**given)


def run(args: argparse.Namespace) -> int:
    """Plans, then asks and writes.

    Returns:
        0; 1 where something was given up, a stop left rows undone, or no row came out.

    Raises:
        PoSEError: input that cannot work.
    """
    settings = settings_from(args)
    if settings.output.exists() and not settings.output.is_dir():
        raise PoSEError(f"--output {settings.output} is a file; name a folder")

    from pose_plugin.synthesize.estimate import Plan, describe
    from pose_plugin.synthesize.journal import Journal
    from pose_plugin.synthesize.output import require_own, require_same
    from pose_plugin.synthesize.run import key_from
    from pose_plugin.synthesize.run import run as run_items
    from pose_plugin.synthesize.select import assign, collect
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
    items = assign(found, settings)
    journal = Journal(settings.output / JOURNAL, read_only=True)
    print(describe(Plan(items, settings), found, items, journal, settings), flush=True)
    if args.plan:
        return 0
    result = run_items(items, found, settings, tokenizer, progress=not args.quiet)
    return _report(result, settings)


def load_tokenizer(name: str) -> Any:
    """Raises PoSEError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise PoSEError(
            f"--tokenizer {name} cannot be loaded ({reason[0] if reason else error}); name the folder or the hub name "
            "of the model that will be trained"
        ) from None


def _report(result: Any, settings: Settings) -> int:
    print(f"rows: {result.rows} in {settings.output / ROWS}")
    for reason, count in sorted(result.dropped.items()):
        print(f"  left out: {count} {reason}")
    if result.given_up:
        print(f"  given up: {len(result.given_up)} requests; the same command asks again for those without any answer")
    if result.stopped:
        print(f"stopped: {result.stopped}", file=sys.stderr)
        print(f"  {result.unfinished} rows are not finished; the same command goes on from here", file=sys.stderr)
    elif not result.rows:
        print("no row came out: everything was left out, for the reasons above", file=sys.stderr)
    return 1 if result.given_up or result.stopped or not result.rows else 0
