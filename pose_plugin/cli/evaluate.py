"""`pose-plugin evaluate`: several models side by side. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model

from pose_plugin.cli.evaluate_models import (
    SERVED,
    as_number,
    check_served,
    local_sources,
    names_of,
    parse_extension,
    served_sources,
    with_distinct_names,
)
from pose_plugin.config import Strict, explain
from pose_plugin.evaluation.measure import Windows, default_lengths
from pose_plugin.evaluation.measures import MEASURES, by_task, choose, make, options_of, require_effect, with_texts
from pose_plugin.evaluation.ranks import launched
from pose_plugin.evaluation.settings import read_text, require_once
from pose_plugin.utils.errors import Complaints, PoSEError, flag
from pose_plugin.utils.lengths import parse_length, parse_lengths
from pose_plugin.utils.plots import require_matplotlib

if TYPE_CHECKING:
    from pose_plugin.checkpoints.load import Source
    from pose_plugin.evaluation.measure import Measure
    from pose_plugin.evaluation.results import Report

EPILOG = """\
example, the three rows every claim needs (base, RoPE only, trained):
  pose-plugin evaluate base-model my-adapter --extend target_length=32768,rope=yarn \\
    --lengths 2048,4096,8192,16384,32768 --texts book.txt --output results
"""


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.epilog = EPILOG
    add = parser.add_argument
    default = ", ".join(name for name, measure in by_task().items() if measure.by_default)
    add("models", nargs="*", default=[], metavar="MODEL", help="folder of a model or of a PEFT adapter, or a hub name")
    add("--lengths", help="tokens, e.g. 2048,4096 or 2k,4k: prompt lengths and window sizes; default: an eighth of the "
        "target window, doubled up to twice the target, as far as they fit in memory")  # fmt: skip
    add("--tasks", help=f"any of {', '.join(by_task())}, or all; default: {default} (without --texts only those that "
        "need none), or none with --harness")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="folder for JSON, Markdown, CSV and PNG files")
    add("--texts", nargs="+", default=[], metavar="FILE", help=f"documents for {with_texts()}; UTF-8")
    add("--label", action="append", default=[], metavar="NAME=PATH", help="the name of a MODEL in tables")
    add("--extend", action="append", default=[], metavar="SETTINGS",
        help="also evaluate the first MODEL with its RoPE stretched and no training, e.g. "
        "target_length=2048,rope=linear")  # fmt: skip
    for name, option in options_of(MEASURES.values(), defaults=True).items():
        add(flag(name), help=option.description)
    add("--plan", action="store_true", help="only show how long it would take and how much memory it would need")
    add("--fresh", action="store_true", help="delete the results that --output holds, and measure again")
    add(
        "--train-length", help="the trained window in tokens, for figures and ranking; default: as the MODELs record it"
    )
    add("--target-length", help="the target window in tokens, for figures; default: as the MODELs record it")
    add("--dtype", default="auto", help="auto (as saved), float32, bfloat16 or float16")
    add("--device", help="cuda, cpu, …; default: the accelerator if there is one")
    add("--no-figures", action="store_true", help="no PNG files, which need matplotlib")
    add("--quiet", action="store_true", help="no progress bars")
    served = parser.add_argument_group("a served model, next to the MODELs or without any")
    for name, settings in SERVED.items():
        served.add_argument(name, **settings)
    return run


def run(args: argparse.Namespace) -> int:
    """Evaluate; of several processes that were launched together, only the first one prints."""
    if launched()[0] == 0:
        return _run(args)
    args.quiet = True
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Check the input, then evaluate model after model; each figure is on disk as soon as it is measured.

    Returns:
        0; 1 if something was left out, e.g. because it did not fit in memory.

    Raises:
        PoSEError: input that cannot work, before any weights are loaded where possible.
    """
    asked = _Asked(args)
    output = Path(args.output)
    if args.quiet:
        from transformers.utils import logging

        # The bar of loading weights.
        logging.disable_progress_bar()
    here = local_sources(args.models, asked.names, asked.extensions)
    sources = with_distinct_names([*here, *served_sources(args, asked.names)])
    trained, target = _windows(asked, sources)
    lengths = asked.lengths or default_lengths(target or max(source.maximum or 1 for source in sources))

    from pose_plugin.evaluation.results import Report
    from pose_plugin.evaluation.run import Session

    evaluator = _evaluator(asked.measures, here, len(asked.extensions))
    with_distinct_names([*sources, *filter(None, [evaluator])])
    session = Session(
        asked.measures, lengths, output, args.dtype, args.device, args.fresh, where_possible=not asked.lengths
    )
    session.check(sources, evaluator, Windows(base=sources[0].original, trained=trained))
    for sentence in session.found(sources):
        print(sentence)
    if args.plan:
        if session.ranks.rank == 0:
            print(session.forecast(sources))
        return 0
    session.kept.open(session.ranks)
    report = Report([], trained, target)
    try:
        if evaluator is not None:
            session.ask(evaluator)
        if session.ranks.world > 1:
            session.share(sources)
            if session.ranks.rank > 0:
                return 0
        _measure(session, sources, report)
    except KeyboardInterrupt:
        print(f"\nStopped. What is finished is kept in {output}; the same command resumes from there.")
        raise
    _finish(report, output, figures=not args.no_figures)
    return 1 if session.left_out.failed else 0


class _Asked:
    """What the options ask for, read before anything heavy is imported."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._complaints = Complaints()
        self.lengths = self._parsed("--lengths", args.lengths, parse_lengths)
        self.train_length = self._parsed("--train-length", args.train_length, parse_length)
        self.target_length = self._parsed("--target-length", args.target_length, parse_length)
        self.extensions = [self._parsed("--extend", text, parse_extension) for text in args.extend]
        with self._complaints:
            self.names = names_of(args.label, [*args.models, *(args.served_model or filter(None, [args.url]))])
        with self._complaints:
            check_served(args)
        for path in args.models:
            with self._complaints:
                # A hub name has no such beginning.
                if path.startswith((".", "/", "~")) and not Path(path).exists():
                    raise PoSEError(f"{path} does not exist; give the folder of a model or of an adapter")
        with self._complaints:
            if not args.no_figures:
                require_matplotlib("--no-figures")
        with self._complaints:
            self.measures = _measures(args)
        self._complaints.raise_all()

    def _parsed(self, option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
        with self._complaints:
            try:
                return None if text is None else parse(text)
            except PoSEError as error:
                raise PoSEError(f"{option} {text}: {error}") from None
        return None


def _measure(session: Any, sources: list[Source], report: Report) -> None:
    from pose_plugin.evaluation.kept import writing
    from pose_plugin.evaluation.report import write

    for number, source in enumerate(sources, 1):
        print(f"[{number}/{len(sources)}] {source.name}: {source.path}", flush=True)
        for result in session.results(source):
            # The same model with more results each time, so that an interruption keeps what there is.
            report.models[number - 1 :] = [result]
            result.notes[:] = [*source.notes, *_beyond(source, session.lengths), *session.notes(source)]
            with writing(session.kept.folder):
                write(report, session.kept.folder)


def _finish(report: Report, output: Path, figures: bool) -> None:
    from pose_plugin.evaluation.kept import writing
    from pose_plugin.evaluation.report import markdown, write

    pictures: list[Any] = []
    with writing(output):
        if figures:
            from pose_plugin.evaluation.figures import draw

            pictures = draw(report, output)
        written = [*write(report, output, pictures), *(file for each in pictures for file in (each.png, each.svg))]
    print(_examples(report) + markdown(report))
    print(f"\nWritten to {output}: {', '.join(path.name for path in written)}")


def _measures(args: argparse.Namespace) -> list[Measure]:
    """Return the measures with their options."""
    complaints = Complaints()
    given: dict[str, Any] = {}
    with complaints:
        given = _options(args)
    tasks = None if args.tasks is None else _parts(args.tasks)
    chosen = [measure for measure in MEASURES.values() if measure.chosen_by and given.get(measure.chosen_by)]
    with complaints:
        if tasks == [] and not chosen:
            raise PoSEError(f"--tasks {args.tasks} names nothing; known: {', '.join(by_task())}, all")
        if tasks is None and chosen and args.texts:
            raise PoSEError(
                f"--texts {' '.join(args.texts)} has no effect with --{chosen[0].chosen_by} alone; name what reads "
                "them, e.g. --tasks perplexity"
            )
        if tasks is not None or not chosen:
            chosen = [*choose(tasks, bool(args.texts), "--tasks"), *chosen]
        logits = [measure.name for measure in chosen if not measure.on_a_server]
        if args.url and logits and (tasks is None or "all" in tasks):
            # The models in this process are measured. Without any, nothing is.
            chosen = [measure for measure in chosen if measure.on_a_server or args.models]
        elif args.url and logits:
            possible = ", ".join(name for name, measure in by_task().items() if measure.on_a_server)
            raise PoSEError(
                f"--tasks={','.join(logits)} needs logits, which a server does not return; measure the folder as MODEL "
                f"in a command without --url, or choose from {possible}"
            )
        with complaints:
            require_effect(given, chosen, flag)
    with complaints:
        require_once(args.texts, "--texts")
    texts = []
    for path in args.texts if any(measure.needs_texts for measure in chosen) else ():
        with complaints:
            texts.append(read_text(path, "--texts"))
    made: list[Measure] = []
    with complaints:
        given["progress"] = not args.quiet
        made = make(chosen, given, texts, lambda name, path: read_text(path, flag(name)))
    complaints.raise_all()
    return made


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, with the types that the measures declare."""
    declared = options_of(MEASURES.values())
    given = {name: getattr(args, name) for name in declared if getattr(args, name) is not None}
    values = {name: _typed(text, str(declared[name].rebuild_annotation())) for name, text in given.items()}
    fields: dict[str, Any] = {name: (declared[name].rebuild_annotation(), ...) for name in given}
    model = create_model("Options", __base__=Strict, **fields)
    try:
        return dict(model(**values))
    except ValidationError as error:
        names = [str(each["loc"][0]) for each in error.errors()]
        sentences = explain(error, "options", model).splitlines()
        shown = [f"{flag(name)} {given[name]}: {text}" for name, text in zip(names, sentences, strict=True)]
        raise PoSEError("\n".join(shown)) from None


def _typed(text: str, annotation: str) -> Any:
    """Return the text of an option as the type it is declared with; what is not a number stays a text."""
    if "list" in annotation:
        inner = annotation[annotation.index("list[") + 5 :]
        return [_typed(part.strip(), inner) for part in text.split(",") if part.strip()]
    return as_number(text) if "int" in annotation or "float" in annotation else text


def _evaluator(measures: list[Measure], sources: list[Source], variants: int) -> Source | None:
    """Return the model that measures ask: one of the models or another. None if none asks.

    Args:
        variants: how many of them, behind the first, are variants of it; the default is the last of the others.
    """
    asking = [measure for measure in measures if measure.needs_evaluator]
    if not asking:
        return None
    named = getattr(asking[0], "evaluator", None)
    if named is None:
        return sources[-1] if len(sources) > 1 + variants else sources[0]
    from pose_plugin.checkpoints.load import describe

    place = Path(named).resolve()
    same = [source for source in sources if Path(source.path).resolve() == place]
    # A name in the tables, unless there is such a folder.
    same = same or [source for source in sources if source.name == named and not place.is_dir()]
    return same[0] if same else describe(named)


def _windows(asked: _Asked, sources: list[Source]) -> tuple[int | None, int | None]:
    """The trained and the target window: as asked, as recorded at training, or as the first model has it."""
    trained = [asked.train_length, *(s.record.get("train_length") for s in sources), sources[0].maximum]
    wanted = [asked.target_length, *(s.record.get("target_length") for s in sources)]
    return next(filter(None, trained), None), next(filter(None, wanted), None)


def _beyond(source: Source, lengths: list[int]) -> list[str]:
    if "served_model" in source.facts:
        # The server refuses what is beyond its window, and the config may be that of the base.
        return []
    beyond = [n for n in lengths if source.maximum and n > source.maximum and not source.condenses]
    if not beyond:
        return []
    listed = ", ".join(map(str, beyond))
    return [f"{listed} tokens are beyond this model's max_position_embeddings={source.maximum}"]


def _examples(report: Report) -> str:
    """Return one prompt of each kind, its middle left out."""
    shown: dict[str, str] = {}
    for model in report.models:
        for result in model.results.values():
            for kind, text in result.examples.items():
                shown.setdefault(f"{result.measure} prompt ({kind})" if kind else f"{result.measure} prompt", text)
    parts = []
    for title, text in shown.items():
        text = text if len(text) <= 700 else f"{text[:350]} […] {text[-350:]}"
        parts.append(f"\nOne {title}:\n{text}\n")
    return "".join(parts) + "\n"


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
