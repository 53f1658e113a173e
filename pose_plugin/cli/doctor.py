"""`pose-plugin doctor`: why a folder or a running server does not use its long window."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pose_plugin.cli.parser import ADDRESS, amount, require_option
from pose_plugin.doctor import Folder, Problem, diagnose, read_folder
from pose_plugin.doctor.engines import readings
from pose_plugin.doctor.folder import CONFIG
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import parse_lengths
from pose_plugin.utils.log import printable

EPILOG = """\
The folders may come from any trainer. No weights are read and nothing is changed or downloaded.
exit code: 0 no problem, 1 warnings, 2 errors

examples:
  pose-plugin doctor outputs/model
  pose-plugin doctor outputs/model --mend outputs/mended
  pose-plugin doctor --url http://localhost:8000/v1 --like outputs/model
"""
# Options of a running server. Without --url they have no effect.
SERVER: dict[str, dict[str, Any]] = {
    "--like": {"metavar": "FOLDER", "help": "the folder that it serves, with weights: shows whether the server "
               "ignores the RoPE scaling or the model is weak"},
    "--model": {"help": "the model's name on the server (default: the only one)"},
    "--key-variable": {"metavar": "NAME", "help": "the environment variable that holds the API key"},
    "--lengths": {"help": "prompts with a hidden number, in tokens, separated by commas: 16k,32k (default: inside the "
                  "old window, half of the new one, and nearly all of it)"},
    "--compare": {"metavar": "LENGTHS", "help": "with --like: tokens of the prompts that are continued and compared "
                  "(default: 64,128,256)"},
    "--timeout": {"type": partial(amount, most=86_400), "metavar": "SECONDS",
                  "help": "how long to wait for one answer (default 600)"},
    "--yes": {"action": "store_true", "help": "do not ask before requests are sent"},
}  # fmt: skip
_CODES = {"info": 0, "warning": 1, "error": 2}


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "folders",
        nargs="*",
        default=[],
        metavar="FOLDER",
        help="a model or adapter folder, or a hub name in the local cache",
    )
    add(
        "--base",
        help="the model before training: repairs take its rope_theta and window (default for an adapter: as its "
        "adapter_config.json says)",
    )
    add("--json", action="store_true", help="print one JSON object per folder instead of text")
    add("--mend", metavar="OUTPUT", help="write a copy of the folder with every repair that is certain to be right")
    server = parser.add_argument_group("a running server")
    server.add_argument("--url", help="address of an OpenAI-compatible server, with /v1 at the end")
    for flag, settings in SERVER.items():
        server.add_argument(flag, **settings)
    return run


def run(args: argparse.Namespace) -> int:
    """Diagnose each folder.

    Raises:
        PoSEError: no folder is given, one does not exist, an option has no effect, or --mend cannot write.
    """
    if args.url:
        if args.folders or args.mend:
            raise PoSEError(
                "--url checks a server, so FOLDER and --mend have no effect; name the folder that it serves with "
                "--like, or leave --url out"
            )
        require_option(args, "--like", ["--compare", "--base"], "give the folder that the server serves")
        return _ask(args)
    require_option(args, "--url", SERVER, ADDRESS)
    if not args.folders:
        raise PoSEError("name a folder, or a server with --url")
    if args.mend and len(args.folders) > 1:
        raise PoSEError(
            f"--mend {args.mend} takes one folder, and {len(args.folders)} are given; call it once for each"
        )
    code = 0
    for name in args.folders:
        folder = read_folder(name, args.base)
        problems = diagnose(folder)
        print(json.dumps(_as_dict(folder, problems)) if args.json else printable(_as_text(folder, problems)))
        code = max([code, *(_CODES[problem.finding.severity] for problem in problems)])
        if args.mend:
            from pose_plugin.doctor.mend import mended, write_mended

            if code == 0 and not mended(folder):
                print(f"nothing to repair, so {args.mend} is not written", file=sys.stderr)
                continue
            for file in write_mended(folder, Path(args.mend)):
                print(f"wrote {args.mend}/{file}", file=sys.stderr if args.json else sys.stdout)
    return code


def _ask(args: argparse.Namespace) -> int:
    """Probe a running server."""
    from pose_plugin.doctor.compare import compare, default_lengths, judge
    from pose_plugin.doctor.server import DEPTHS, Server, judge_needles, needles
    from pose_plugin.utils.server import key_of

    folder = read_folder(args.like, args.base) if args.like else None
    server = Server(args.url, args.model, key_of(args.key_variable), args.timeout or 600)
    hidden = parse_lengths(args.lengths) if args.lengths else _lengths(server.window, folder)
    given = parse_lengths(args.compare) if args.compare else default_lengths(server.window)
    compared = given if folder else []
    out = sys.stderr if args.json else sys.stdout
    print(printable(f"{server.model} at {server.address}: window {server.window or 'not stated'}"), file=out)
    requests, total = 1 + len(hidden) * len(DEPTHS) + len(compared), sum(hidden) * len(DEPTHS) + sum(compared)
    print(f"{requests} requests, about {total:,} tokens of prompts", file=out)
    if not args.yes and sys.stdin.isatty() and input("send them? [y/N] ").strip().lower() != "y":
        return 0
    findings, rope = [], None
    if folder:
        result = compare(server, folder, _text(max(compared)), compared)
        findings, rope = judge(server, folder, result), result.verdict
    asked = []
    for needle in tqdm(needles(server, hidden), total=len(hidden) * len(DEPTHS), desc="needles", disable=None):
        asked.append(needle)
        tqdm.write(printable(f"  {needle}"), file=out)
    findings += judge_needles(asked, rope)
    if args.json:
        facts = {"url": server.address, "model": server.model, "window": server.window, "chat": server.uses_chat,
                 "logprobs": server.logprobs, "stream": server.stream}  # fmt: skip
        distances = result.distances if folder else None
        asked_as_dicts = [vars(needle) for needle in asked]
        print(json.dumps({**facts, "rope": rope, "distances": distances, "needles": asked_as_dicts,
                          "findings": [vars(finding) for finding in findings]}))  # fmt: skip
    else:
        for finding in findings:
            print(printable(f"  {finding.severity:<8} {finding}"))
    return max([0, *(_CODES[finding.severity] for finding in findings)])


def _lengths(window: int | None, folder: Folder | None) -> list[int]:
    """Return the lengths to ask for: inside the old window, half of the new one, and nearly all of it.

    Raises:
        PoSEError: neither the server nor the folder states a window.
    """
    window = window or (folder.maximum if folder else None)
    if not window:
        raise PoSEError("the server does not state its window; give --lengths, for example --lengths 4k,16k")
    old = folder.before if folder else None
    wanted = {window // 2, round(window * 0.93)} | ({round(old * 0.7)} if old else set())
    return sorted(length for length in wanted if length <= window)


def _text(length: int) -> str:
    """Return ordinary English of at least `length` tokens that every Python has: pages of its documentation."""
    import pydoc_data.topics

    # The longest first; a token has rarely more than eight characters.
    text = ""
    for page in ["objects", *pydoc_data.topics.topics]:
        text += str(pydoc_data.topics.topics[page])
        if len(text) > 8 * length:
            break
    return text


def _as_text(folder: Folder, problems: list[Problem]) -> str:
    lines = [f"{folder.path}:"]
    for problem in problems:
        lines.append(f"  {problem.finding.severity:<8} {problem.cause}: {problem.finding}")
    if not problems:
        lines.append("  no problem found")
    rows = readings(folder)
    if rows:
        width = max(len(row.engine) for row in rows)
        lines.append("  what engines take:")
        lines += [f"    {row.engine:<{width}}  {row.window or '–':>9}  {row.rope}" for row in rows]
    elif CONFIG in folder.files and any(problem.finding.severity == "error" for problem in problems):
        lines.append("  what engines take: not known until the errors are repaired")
    return "\n".join(lines)


def _as_dict(folder: Folder, problems: list[Problem]) -> dict[str, object]:
    return {
        "folder": str(folder.path),
        "problems": [{"cause": each.cause, **vars(each.finding), "mendable": bool(each.changes)} for each in problems],
        "engines": [vars(row) for row in readings(folder)],
    }
