"""`pose-plugin evaluate`: several models side by side. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin._version import __version__
from pose_plugin.evaluation.text_file import read_text
from pose_plugin.utils.errors import PoSEError

if TYPE_CHECKING:
    from pose_plugin.checkpoints.load import Source
    from pose_plugin.evaluation.results import Report
    from pose_plugin.evaluation.tasks import Plan

TASKS = ("passkey", "perplexity", "needle", "topics", "longppl", "gap", "short")
WITH_TEXTS = ("perplexity", "longppl", "gap", "short")
NEED = {"evaluator": "longppl", "short_context": "longppl", "short_length": "short",
        "harness_limit": "harness", "harness_path": "harness"}  # fmt: skip
EPILOG = """\
example, the three rows every claim needs (base, RoPE only, trained):
  pose-plugin evaluate base-model my-adapter --extend target_length=32768,rope=yarn \\
    --lengths 2048,4096,8192,16384,32768 --texts book.txt --output results
"""


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder of a model or of a PEFT adapter, or a hub name")
    add("--lengths", required=True, help="tokens, e.g. 2048,4096 or 2k,4k: prompt lengths and window sizes")
    add("--tasks", help=f"of {', '.join(TASKS)}, or all; default: passkey, and perplexity if there are --texts")
    add("--output", required=True, metavar="DIR", help="folder for JSON, Markdown, CSV and PNG files")
    add("--texts", nargs="+", default=[], metavar="FILE", help="documents for perplexity, longppl, gap, short; UTF-8")
    add("--label", action="append", default=[], metavar="NAME=PATH", help="how a MODEL is called in tables")
    add("--extend", action="append", default=[], metavar="SETTINGS",
        help="also evaluate the first MODEL with its RoPE stretched and no training, e.g. "
        "target_length=2048,rope=linear")  # fmt: skip
    add("--trials", type=int, default=50, help="prompts a length of passkey, topics and each needle kind (default 50)")
    add(
        "--depths",
        help="depths of key and needle, e.g. 0,0.25,0.5,0.75,1; default: the needle's these, the key's drawn at random",
    )
    add("--filler", metavar="FILE", help="a real text to hide keys and needles in, instead of grass and sky")
    add("--seed", type=int, default=0, help="of keys and depths (default 0)")
    add("--stride", type=int, help="perplexity: tokens from window to window; default: half of each length")
    add("--max-windows", type=int, help="perplexity: windows a length; default: all")
    add("--max-tokens", type=int, help="perplexity: tokens of each text, from its start; default: all")
    add("--kinds", default="single,multi,kv", help="of needles; default single,multi,kv")
    add("--evaluator", metavar="MODEL", help="longppl: which MODEL says what is a key token; default: the last")
    add("--short-context", type=int, help="longppl: the short context, in tokens; default: the trained window")
    add("--short-length", type=int, help="short: window of the guard; default: the first MODEL's own window")
    add("--harness", metavar="TASKS", help="tasks of lm-eval beside, e.g. niah_single_1,ruler_vt,longbench")
    add("--harness-limit", type=int, help="samples a task of lm-eval; default: all")
    add("--harness-path", metavar="DIR", help="a folder with more lm-eval task YAMLs")
    add("--plan", action="store_true", help="only say how long it would take and how much memory")
    add("--fresh", action="store_true", help="measure anew what --output holds already")
    add("--batch-size", type=int, help="sequences in one forward; default: about 16k tokens")
    add("--train-length", type=int, help="the trained window, to mark it; default: as recorded")
    add("--target-length", type=int, help="the wanted window, to mark it; default: as recorded")
    add("--dtype", default="auto", help="auto (as saved), float32, bfloat16 or float16")
    add("--device", help="cuda, cpu, …; default: the accelerator if there is one")
    add("--no-figures", action="store_true", help="no PNG files, which need matplotlib")
    add("--quiet", action="store_true", help="no progress bars")
    return run


def run(args: argparse.Namespace) -> int:
    """Checks the input, then evaluates model after model; each figure is on disk as soon as it is there.

    Returns:
        0; 1 where something was left out, as it did not fit in memory, say.

    Raises:
        PoSEError: input that cannot work, named before any weights are loaded where that can be.
    """
    tasks = _tasks(args)
    plan = _plan(args, tasks)
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise PoSEError(f"--output {output} is a file; name a folder")
    if not args.no_figures:
        from pose_plugin.utils.plots import require_matplotlib

        require_matplotlib()
    if args.quiet:
        from transformers.utils import logging

        # That of loading weights.
        logging.disable_progress_bar()
    sources = _sources(args)
    _settle(plan, args, sources)

    from pose_plugin.evaluation.finished import writing
    from pose_plugin.evaluation.report import text, write
    from pose_plugin.evaluation.results import Report
    from pose_plugin.evaluation.run import Session

    evaluator = _evaluator(args, sources) if "longppl" in tasks else None
    session = Session(plan, tasks, output, args.dtype, args.device, fresh=args.fresh)
    session.check(sources, evaluator)
    if args.plan:
        print(session.forecast(sources))
        return 0
    session.finished.open()
    others = sorted(session.finished.versions - {__version__})
    if others:
        print(f"{output} holds results of pose_plugin {', '.join(others)} too; they are kept there and not used")
    report = Report([], *_windows(args, sources))
    try:
        if evaluator is not None:
            session.find_keys(evaluator)
        for number, source in enumerate(sources, 1):
            print(f"[{number}/{len(sources)}] {source.name}: {source.path}", flush=True)
            for result in session.results(source):
                # The same row, fuller each time, so that a stop in between keeps what there is.
                report.models[number - 1 :] = [result]
                result.notes[:] = [*source.notes, *_beyond(source, plan.lengths), *session.notes(source)]
                with writing(output):
                    write(report, output)
    except KeyboardInterrupt:
        print(f"\nStopped. What is finished is kept in {output}; the same command goes on from there.")
        raise
    with writing(output):
        pictures = []
        if not args.no_figures:
            from pose_plugin.evaluation.figures import draw

            pictures = draw(report, output)
        written = [*write(report, output, pictures), *pictures]
    print(_prompt_shown(report) + text(report))
    print(f"\nWritten to {output}: {', '.join(path.name for path in written)}")
    return 1 if session.left_out else 0


def _plan(args: argparse.Namespace, tasks: list[str]) -> Plan:
    from pose_plugin.evaluation.tasks import Plan

    for name in ("trials", "stride", "max_windows", "max_tokens", "batch_size", "short_context", "short_length",
                 "harness_limit", "train_length", "target_length"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PoSEError(f"--{name.replace('_', '-')} {value}: {name}={value} must be at least 1")
    for name, task in NEED.items():
        if getattr(args, name) is not None and task not in tasks:
            way_out = "--harness TASKS" if task == "harness" else f"{task} in --tasks"
            raise PoSEError(f"--{name.replace('_', '-')} {getattr(args, name)} has no effect without {way_out}")
    files = [Path(path).resolve() for path in args.texts]
    twice = [path for path, file in zip(args.texts, files, strict=True) if files.count(file) > 1]
    if twice:
        raise PoSEError(f"--texts {twice[0]} is named twice and would count twice; name it once")
    return Plan(
        lengths=_lengths(args.lengths),
        texts=[read_text(path) for path in args.texts] if any(task in WITH_TEXTS for task in tasks) else [],
        trials=args.trials,
        depths=_numbers("depths", args.depths) if args.depths else None,
        kinds=tuple(_names(args.kinds)),
        filler=read_text(args.filler) if args.filler else None,
        seed=args.seed,
        stride=args.stride,
        max_windows=args.max_windows,
        max_tokens=args.max_tokens,
        batch_size=args.batch_size,
        harness_tasks=tuple(_names(args.harness)),
        harness_limit=args.harness_limit,
        harness_path=args.harness_path,
        progress=not args.quiet,
    )


def _settle(plan: Plan, args: argparse.Namespace, sources: list[Source]) -> None:
    """What follows from the models."""
    trained = _windows(args, sources)[0]
    plan.short_length = args.short_length or sources[0].maximum or plan.lengths[0]
    plan.short_context = args.short_context or trained or plan.lengths[0]


def _evaluator(args: argparse.Namespace, sources: list[Source]) -> Source:
    """The model that says which tokens are key, one of the models or another."""
    if args.evaluator is None:
        return sources[-1]
    from pose_plugin.checkpoints.load import describe

    same = [source for source in sources if args.evaluator in (source.path, source.name)]
    return same[0] if same else describe(args.evaluator)


def _sources(args: argparse.Namespace) -> list[Source]:
    from pose_plugin.checkpoints.load import describe, extended

    names = _labels(args.label, args.models)
    sources = [describe(path, names.get(path)) for path in args.models]
    _name_by_folders([source for source in sources if source.path not in names])
    # Behind the model they are variants of: base, RoPE only, trained.
    sources[1:1] = [extended(sources[0], *_extension(text)) for text in args.extend]
    taken: set[str] = set()
    for source in sources:
        more = (f"{source.name} ({n})" for n in itertools.count(2))
        source.name = next(name for name in itertools.chain([source.name], more) if name not in taken)
        taken.add(source.name)
    return sources


def _name_by_folders(sources: list[Source]) -> None:
    """checkpoint-100 of two runs is called run-a/checkpoint-100 and run-b/checkpoint-100."""
    parts = {source.path: Path(source.path).resolve().parts for source in sources}
    for source in sources:
        own, others = parts[source.path], [each for each in parts.values() if each != parts[source.path]]
        for n in range(1, len(own)):
            source.name = "/".join(own[-n:])
            if all(each[-n:] != own[-n:] for each in others):
                break


def _windows(args: argparse.Namespace, sources: list[Source]) -> tuple[int | None, int | None]:
    """The trained and the wanted window: as told, as recorded at training, or as the first model has it."""
    trained = [args.train_length, *(s.record.get("train_length") for s in sources), sources[0].maximum]
    wanted = [args.target_length, *(s.record.get("target_length") for s in sources)]
    return next(filter(None, trained), None), next(filter(None, wanted), None)


def _beyond(source: Source, lengths: list[int]) -> list[str]:
    beyond = [n for n in lengths if source.maximum and n > source.maximum and not source.condenses]
    if not beyond:
        return []
    listed = ", ".join(map(str, beyond))
    return [f"{listed} tokens are beyond this model's max_position_embeddings={source.maximum}"]


def _prompt_shown(report: Report) -> str:
    """One prompt of each kind, its middle left out."""
    shown: dict[str, str] = {}
    for model in report.models:
        if model.passkey:
            shown.setdefault(
                f"passkey prompt with its answer, {model.passkey.lengths[0]} tokens", model.passkey.example
            )
        for result in (model.needle, model.topics):
            for kind, text in result.examples.items() if result else ():
                assert result is not None
                shown.setdefault(f"{result.measure} prompt ({kind}), {result.lengths[0]} tokens", text)
    parts = []
    for title, text in shown.items():
        text = text if len(text) <= 700 else f"{text[:350]} […] {text[-350:]}"
        parts.append(f"\nOne {title}:\n{text}\n")
    return "".join(parts) + "\n"


def _tasks(args: argparse.Namespace) -> list[str]:
    if args.tasks is None:
        tasks = ["passkey", "perplexity"] if args.texts else ["passkey"]
    elif args.tasks.strip() == "all":
        tasks = [task for task in TASKS if args.texts or task not in WITH_TEXTS]
    else:
        tasks = _names(args.tasks)
        unknown = [task for task in tasks if task not in TASKS]
        if unknown or (not tasks and not args.harness):
            named = ", ".join(unknown) or "(none)"
            raise PoSEError(f"--tasks {args.tasks}: unknown task {named}; known: {', '.join(TASKS)}, all")
        unread = [task for task in tasks if task in WITH_TEXTS and not args.texts]
        if unread:
            raise PoSEError(f"--tasks {unread[0]} needs texts to measure; add --texts FILE, each file one document")
    return [*tasks, "harness"] if args.harness else tasks


def _names(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({_tokens(part.strip().lower()) for part in text.split(",")})
    except ValueError:
        raise PoSEError(f"--lengths {text} must be token counts with commas, e.g. 2048,4096 or 2k") from None
    if lengths[-1] > 2**31 - 1:
        raise PoSEError(f"--lengths {text}: {lengths[-1]} is beyond what a position can be, {2**31 - 1}")
    if lengths[0] < 1:
        raise PoSEError(f"--lengths {text}: {lengths[0]} must be at least 1 token")
    return lengths


def _tokens(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise PoSEError(f"--{name} {text} must be numbers with commas, e.g. 0,0.5,1") from None


def _labels(labels: list[str], models: list[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for label in labels:
        name, equals, path = label.partition("=")
        if not equals or not name:
            raise PoSEError(f"--label {label} must be NAME=PATH, e.g. trained={models[-1]}")
        if path not in models:
            raise PoSEError(f"--label {label}: {path} is none of the models {', '.join(models)}")
        if name in names.values():
            raise PoSEError(f"--label {label}: {name} is another model's name already; give each a name of its own")
        if path in names:
            raise PoSEError(f"--label {label}: {path} is called {names[path]} already; give one name to a model")
        names[path] = name
    return names


def _extension(text: str) -> tuple[int, dict[str, Any]]:
    """(2048, {"type": "linear"}) for `target_length=2048,rope=linear`; further keys are those of `rope:`."""
    values = dict(part.strip().partition("=")[::2] for part in text.split(","))
    try:
        target = _tokens(values.pop("target_length", "").lower())
    except ValueError:
        raise PoSEError(f"--extend {text} needs target_length in tokens, e.g. target_length=32k,rope=yarn") from None
    rope: dict[str, Any] = {"type": values.pop("rope", "yarn")}
    for key, value in values.items():
        try:
            rope[key] = int(value) if value.isdigit() else float(value)
        except ValueError:
            rope[key] = value
    return target, rope
