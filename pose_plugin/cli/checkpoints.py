"""The commands `pose-plugin check`, `pose-plugin export` and `pose-plugin card`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pose_plugin.cli.parser import require_option
from pose_plugin.utils.errors import PoSEError


def add_check(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of `pose-plugin check`: exit code 0 if all agrees, 1 if something differs."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="output folder of a run: a model, an adapter, a checkpoint or a merged model")
    add("--base", metavar="PATH", help="an adapter's base, if it is not where adapter_config.json says")
    add("--like", metavar="FOLDER", help="compare with the record and probe of this folder, e.g. the merged adapter's")
    add("--device", default="cpu", help="cpu (default), cuda, …")
    add("--dtype", help="load in this dtype instead of the trained one, e.g. bfloat16")
    add("--trust-remote-code", action="store_true", help="allow the folder's own modelling code to run")
    add("--python", metavar="PATH", help="reload with the interpreter of another environment, e.g. with transformers 4")
    add(
        "--repair",
        action="store_true",
        help="with --like: first copy the adapter's rope, limits and record into a merged model",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    return _check


def _check(args: argparse.Namespace) -> int:
    from pose_plugin.checkpoints.check import check_folder

    _require_window(args.folder)
    if args.repair:
        from pose_plugin.checkpoints.merge import complete_merged
        from pose_plugin.checkpoints.saved import RECORD, read_record
        from pose_plugin.export.card import require_readable_card, write_card

        if args.like is None:
            raise PoSEError("--repair copies rope, limits and record from another folder; name it with --like FOLDER")
        # Before anything is written.
        require_readable_card(args.folder)
        own = read_record(args.folder)
        if own and not own.get("merged"):
            raise PoSEError(
                f"{args.folder} has a {RECORD} that is not of a merge, and --repair would replace it. Name the merged "
                "model; if the merge copied the file from the base, remove it"
            )
        complete_merged(args.folder, args.like)
        write_card(args.folder)
    report = check_folder(
        args.folder,
        base=args.base,
        like=args.like,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        python=args.python,
    )
    if args.json:
        findings = [dict(zip(("what", "verdict", "sentence"), each, strict=True)) for each in report.findings]
        print(json.dumps({"folder": report.folder, "passed": report.passed, "findings": findings}, indent=2))
    else:
        print(report)
    return 0 if report.passed else 1


def add_export(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of `pose-plugin export`, which prints how to serve a folder."""
    from pose_plugin.export import ENGINES

    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a saved model or adapter")
    add("--engine", required=True, choices=list(ENGINES), help="the inference engine that will serve it")
    add("--output", metavar="PATH", help="where to write: the folder of --form 4, the file of --convert")
    add("--form", choices=["4"], help="4: write a copy that transformers 4 can read to --output (weights are linked)")
    add("--convert", action="store_true", help="llama.cpp, ollama: run llama.cpp's converter now")
    add("--llama-cpp", metavar="DIR", help="folder of llama.cpp, if convert_hf_to_gguf.py is not on the PATH")
    add("--outtype", help="with --convert: number type of the GGUF file: f32, f16, bf16, q8_0, …")
    return _export


def _export(args: argparse.Namespace) -> int:
    from pose_plugin.checkpoints.saved import read_saved
    from pose_plugin.export import OLDER_READERS, exporter
    from pose_plugin.export.common import missing_tokenizer, require_older_form
    from pose_plugin.utils.files import staged

    _require_used(args)
    _require_window(args.folder)
    saved = read_saved(args.folder)
    if args.convert and args.output and not args.form:
        saved = replace(saved, gguf=Path(args.output))
    # What the engine refuses, and files that cannot be read, are raised before anything is written or printed.
    exporter(args.engine)(saved)
    warnings = [*saved.warnings, *missing_tokenizer(saved), *_problems(args.folder)]
    if args.form:
        from pose_plugin.export.transformers4 import write_older_form

        folder = write_older_form(saved, args.output)
        print(f"# written for readers of transformers 4: {folder}")
        # The printed lines must name the new folder.
        saved = read_saved(folder)
    elif args.engine in OLDER_READERS:
        require_older_form(saved, args.engine)
    made = exporter(args.engine)(saved)
    if args.convert:
        from pose_plugin.export.llama_cpp import convert

        arguments = ["--outtype", args.outtype] if args.outtype else []
        print(f"# converted: {convert(saved, args.llama_cpp, arguments)}")
    for name, content in made.files.items():
        file = saved.path / name
        # An empty file is what a full disk once left.
        if (file.exists() and file.read_text(encoding="utf-8", errors="replace")) not in (False, "", content):
            print(f"# {file} exists and was not changed; this would be written:")
            print("\n".join(f"#   {line}" for line in content.splitlines()))
            continue
        with staged(saved.path) as stage:
            stage.write(name, content)
        print(f"# written: {file}")
    print(made)
    for warning in warnings:
        print(f"# WARNING: {warning}")
    return 0


def _require_used(args: argparse.Namespace) -> None:
    """Check, before anything is written, that every option has an effect.

    Raises:
        PoSEError: naming the one that has none.
    """
    if args.convert and args.engine not in ("llama.cpp", "ollama"):
        raise PoSEError(f"--convert makes a GGUF file, which --engine {args.engine} does not read; leave --convert out")
    if args.form and args.output is None:
        raise PoSEError("--form 4 writes a folder; name it with --output FOLDER")
    if args.output is not None and not args.form and not args.convert:
        raise PoSEError(
            f"--output {args.output} has no effect without --form 4 or --convert: it names their folder or file"
        )
    require_option(args, "--convert", ("--outtype", "--llama-cpp"), "add it, with --engine llama.cpp or ollama")


def _require_window(folder: str) -> None:
    """Raise PoSEError for an Activation Beacon adapter, which no engine runs."""
    from pose_plugin.checkpoints.saved import Saved

    if Saved(Path(folder)).condenses:
        raise PoSEError(
            f"{folder} is an Activation Beacon adapter: it leaves window and rope unchanged, so there is nothing to "
            "check or export, and no engine runs it. Load it with PEFT and BeaconCache (docs/beacon.md); pose-plugin "
            "evaluate measures it"
        )


def _problems(folder: str) -> list[str]:
    """Return one sentence that names what `pose-plugin doctor` finds wrong in a folder, if anything."""
    from pose_plugin.doctor import diagnose, read_folder

    found = [each for each in diagnose(read_folder(folder)) if each.finding.severity != "info"]
    names = list(dict.fromkeys(each.cause for each in found))
    return [f"{', '.join(names)}: `pose-plugin doctor {shlex.quote(folder)}` explains and repairs it"] if names else []


def add_card(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of `pose-plugin card`, which writes the model card."""
    parser.add_argument("folder", metavar="FOLDER", help="a saved model or adapter")
    parser.add_argument(
        "--evaluation", metavar="DIR", help="output of `pose-plugin evaluate`; default: the newest inside FOLDER"
    )
    return _card


def _card(args: argparse.Namespace) -> int:
    from pose_plugin.checkpoints.saved import read_saved
    from pose_plugin.export.card import write_card

    _require_window(args.folder)
    warnings = [*read_saved(args.folder).warnings, *_problems(args.folder)]
    written = write_card(args.folder, args.evaluation, foreign=True)
    if written is None:
        raise PoSEError(f"{args.folder} has no config.json, so its window is unknown; name a folder that has one")
    print(f"written: {written}")
    for warning in warnings:
        print(f"WARNING: {warning}")
    return 0
