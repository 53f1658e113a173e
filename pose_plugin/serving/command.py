"""The command lines of `pose-plugin check` and `pose-plugin export`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable


def add_check(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """`pose-plugin check FOLDER`: exit code 0 where all agrees, 1 where something differs."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="output folder of a run: a model, an adapter, a checkpoint or a merged model")
    add("--base", metavar="PATH", help="where an adapter's base is, if not where adapter_config.json says")
    add("--like", metavar="FOLDER", help="take record and probe from this folder, e.g. the adapter of a merged model")
    add("--device", default="cpu", help="cpu (default), cuda, …")
    add("--dtype", help="load in this type instead of the trained one, e.g. bfloat16")
    add("--trust-remote-code", action="store_true", help="let the folder's own modelling code run")
    add("--json", action="store_true", help="print the findings as JSON")
    return _check


def _check(args: argparse.Namespace) -> int:
    from pose_plugin.serving.check import check_folder

    report = check_folder(
        args.folder,
        base=args.base,
        like=args.like,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    if args.json:
        findings = [dict(zip(("what", "verdict", "sentence"), each, strict=True)) for each in report.findings]
        print(json.dumps({"folder": report.folder, "passed": report.passed, "findings": findings}, indent=2))
    else:
        print(report)
    return 0 if report.passed else 1
