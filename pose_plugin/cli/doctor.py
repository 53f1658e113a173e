"""`pose-plugin doctor`: why a folder or a running server does not use its long window."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from pose_plugin.doctor import Folder, Problem, diagnose, read_folder
from pose_plugin.utils.errors import PoSEError

EPILOG = """\
The folders may come from any trainer. No weights are read and nothing is changed or downloaded.
exit code: 0 no problem, 1 warnings, 2 errors

examples:
  pose-plugin doctor outputs/model
  pose-plugin doctor outputs/model --mend outputs/mended
"""
_CODES = {"info": 0, "warning": 1, "error": 2}


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("folders", nargs="*", metavar="FOLDER", help="a model or adapter folder, or a hub name in the local cache")
    add("--base", help="the adapter's base, if adapter_config.json names another place")
    add("--json", action="store_true", help="print one JSON object per folder instead of text")
    add("--mend", metavar="OUTPUT", help="write a copy of the folder with every certain repair")
    return run


def run(args: argparse.Namespace) -> int:
    """Diagnose each folder.

    Raises:
        PoSEError: no folder is given, one does not exist, or --mend cannot write.
    """
    if not args.folders:
        raise PoSEError("name a folder")
    if args.mend and len(args.folders) > 1:
        raise PoSEError(
            f"--mend {args.mend} takes one folder, and {len(args.folders)} are given; call it once for each"
        )
    code = 0
    for name in args.folders:
        folder = read_folder(name, args.base)
        problems = diagnose(folder)
        print(json.dumps(_as_dict(folder, problems)) if args.json else _as_text(folder, problems))
        code = max([code, *(_CODES[problem.finding.severity] for problem in problems)])
        if args.mend:
            from pose_plugin.doctor.mend import write_mended

            for file in write_mended(folder, problems, Path(args.mend)):
                print(f"wrote {args.mend}/{file}")
    return code


def _as_text(folder: Folder, problems: list[Problem]) -> str:
    lines = [f"{folder.path}:"]
    for problem in problems:
        lines.append(f"  {problem.finding.severity:<8} {problem.cause}: {problem.finding}")
    if not problems:
        lines.append("  no problem found")
    return "\n".join(lines)


def _as_dict(folder: Folder, problems: list[Problem]) -> dict[str, object]:
    return {
        "folder": str(folder.path),
        "problems": [
            {
                "cause": problem.cause,
                "severity": problem.finding.severity,
                "key": problem.finding.key,
                "value": problem.finding.value,
                "happens": problem.finding.happens,
                "fix": problem.finding.fix,
                "mendable": bool(problem.changes),
            }
            for problem in problems
        ],
    }
