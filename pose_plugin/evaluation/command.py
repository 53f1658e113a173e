"""`pose-plugin evaluate`: several models side by side. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin.errors import PoSEError

if TYPE_CHECKING:
    from pose_plugin.evaluation.loading import Source
    from pose_plugin.evaluation.report import ModelResult, Report

TASKS = ("passkey", "perplexity")
EPILOG = """\
example, the three rows every claim needs (base, RoPE only, trained):
  pose-plugin evaluate base-model my-adapter --extend target_length=32768,rope=yarn \\
    --lengths 2048,4096,8192,16384,32768 --texts book.txt --output results
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder of a model or of a PEFT adapter, or a hub name")
    add("--lengths", required=True, help="tokens, e.g. 2048,4096 or 2k,4k: prompt lengths and window sizes")
    add("--tasks", help="passkey,perplexity; default: passkey, and perplexity if there are --texts")
    add("--output", required=True, metavar="DIR", help="folder for JSON, Markdown, CSV and PNG files")
    add("--texts", nargs="+", default=[], metavar="FILE", help="documents for perplexity, UTF-8")
    add("--label", action="append", default=[], metavar="NAME=PATH", help="how a MODEL is called in tables")
    add("--extend", action="append", default=[], metavar="SETTINGS",
        help="also evaluate the first MODEL with its RoPE stretched and no training, e.g. "
        "target_length=2048,rope=linear")  # fmt: skip
    add("--trials", type=int, default=50, help="passkey prompts a length (default 50)")
    add("--depths", help="depths of the key, e.g. 0,0.25,0.5,0.75,1; default: drawn at random")
    add("--filler", metavar="FILE", help="a real text to hide passkeys in, instead of grass and sky")
    add("--seed", type=int, default=0, help="of keys and depths (default 0)")
    add("--stride", type=int, help="perplexity: tokens from window to window; default: half of each length")
    add("--max-windows", type=int, help="perplexity: windows a length; default: all")
    add("--max-tokens", type=int, help="perplexity: tokens of each text, from its start; default: all")
    add("--batch-size", type=int, help="sequences in one forward; default: about 16k tokens")
    add("--train-length", type=int, help="the trained window, to mark it; default: as recorded")
    add("--target-length", type=int, help="the wanted window, to mark it; default: as recorded")
    add("--dtype", default="auto", help="auto (as saved), float32, bfloat16 or float16")
    add("--device", help="cuda, cpu, …; default: the accelerator if there is one")
    add("--no-figures", action="store_true", help="no PNG files, which need matplotlib")
    add("--quiet", action="store_true", help="no progress bars")


def run(args: argparse.Namespace) -> int:
    """Checks the input, then evaluates model after model; numbers are written after each of them.

    Raises:
        PoSEError: input that cannot work, named before any weights are loaded where that can be.
    """
    lengths = _lengths(args.lengths)
    tasks = _tasks(args)
    texts = [_read(path) for path in args.texts] if "perplexity" in tasks else []
    filler = _read(args.filler) if args.filler else None
    depths = _numbers("depths", args.depths) if args.depths else None
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise PoSEError(f"--output {output} is a file; name a folder")
    if not args.no_figures:
        from pose_plugin.evaluation.figures import require_matplotlib

        require_matplotlib()
    sources = _sources(args)
    if "passkey" in tasks:
        from pose_plugin.evaluation.passkey import PasskeyBuilder, documents

        for source in sources:
            builder = PasskeyBuilder(source.tokenizer, filler_text=filler)
            documents(builder, lengths[:1], args.trials, depths, args.seed)
    if "perplexity" in tasks:
        from pose_plugin.evaluation.perplexity import tokenised

        for source in sources:
            tokenised(source.tokenizer, texts, lengths, args.max_tokens)

    from pose_plugin.evaluation.report import Report

    report = Report([], *_windows(args, sources))
    for number, source in enumerate(sources, 1):
        print(f"[{number}/{len(sources)}] {source.name}: {source.path}", flush=True)
        report.models.append(_evaluate(source, args, lengths, tasks, texts, depths, filler))
        report.write(output, figures=False)
    written = report.write(output, figures=not args.no_figures)
    print(_prompt_shown(report) + report.text())
    print(f"\nWritten to {output}: {', '.join(path.name for path in written)}")
    return 0


def _evaluate(
    source: Source,
    args: argparse.Namespace,
    lengths: list[int],
    tasks: list[str],
    texts: list[str],
    depths: list[float] | None,
    filler: str | None,
) -> ModelResult:
    import torch

    from pose_plugin.evaluation.loading import load
    from pose_plugin.evaluation.passkey import passkey
    from pose_plugin.evaluation.perplexity import perplexity
    from pose_plugin.evaluation.report import ModelResult

    result = ModelResult(source.name, notes=[*source.notes, *_beyond(source, lengths)], facts=source.facts)
    model = load(source, args.dtype, args.device)
    shared: dict[str, Any] = {"batch_size": args.batch_size, "progress": not args.quiet}
    if "passkey" in tasks:
        result.passkey = passkey(
            model, source.tokenizer, lengths, args.trials, depths, args.seed, filler_text=filler, **shared
        )
    if "perplexity" in tasks:
        result.perplexity = perplexity(
            model, source.tokenizer, texts, lengths, args.stride, args.max_windows, args.max_tokens, **shared
        )
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def _sources(args: argparse.Namespace) -> list[Source]:
    from pose_plugin.evaluation.loading import describe, extended

    names = _labels(args.label, args.models)
    sources = [describe(path, names.get(path)) for path in args.models]
    # Behind the model they are variants of: base, RoPE only, trained.
    sources[1:1] = [extended(sources[0], *_extension(text)) for text in args.extend]
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.name] = seen.get(source.name, 0) + 1
        if seen[source.name] > 1:
            source.name = f"{source.name} ({seen[source.name]})"
    return sources


def _windows(args: argparse.Namespace, sources: list[Source]) -> tuple[int | None, int | None]:
    """The trained and the wanted window: as told, as recorded at training, or as the first model has it."""
    trained = [args.train_length, *(s.record.get("train_length") for s in sources), sources[0].maximum]
    wanted = [args.target_length, *(s.record.get("target_length") for s in sources)]
    return next(filter(None, trained), None), next(filter(None, wanted), None)


def _beyond(source: Source, lengths: list[int]) -> list[str]:
    beyond = [n for n in lengths if source.maximum and n > source.maximum]
    if not beyond:
        return []
    listed = ", ".join(map(str, beyond))
    return [f"{listed} tokens are beyond this model's max_position_embeddings={source.maximum}"]


def _prompt_shown(report: Report) -> str:
    """One prompt, its middle left out."""
    for model in report.models:
        if model.passkey:
            text = model.passkey.example
            shown = text if len(text) <= 700 else f"{text[:350]} […] {text[-350:]}"
            return f"\nOne passkey prompt with its answer, {model.passkey.lengths[0]} tokens:\n{shown}\n\n"
    return "\n"


def _tasks(args: argparse.Namespace) -> list[str]:
    if args.tasks is None:
        return list(TASKS) if args.texts else ["passkey"]
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        named = ", ".join(unknown) or "(none)"
        raise PoSEError(f"--tasks {args.tasks}: unknown task {named}; known: {', '.join(TASKS)}")
    if "perplexity" in tasks and not args.texts:
        raise PoSEError("--tasks perplexity needs texts to measure; add --texts FILE, each file one document")
    return tasks


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({_tokens(part.strip().lower()) for part in text.split(",")})
    except ValueError:
        raise PoSEError(f"--lengths {text} must be token counts with commas, e.g. 2048,4096 or 2k") from None
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
    names = {}
    for label in labels:
        name, equals, path = label.partition("=")
        if not equals or not name:
            raise PoSEError(f"--label {label} must be NAME=PATH, e.g. trained={models[-1]}")
        if path not in models:
            raise PoSEError(f"--label {label}: {path} is none of the models {', '.join(models)}")
        names[path] = name
    return names


def _extension(text: str) -> tuple[int, dict[str, Any]]:
    """(2048, {"type": "linear"}) for `target_length=2048,rope=linear`; further keys are those of `rope:`."""
    values = dict(part.strip().partition("=")[::2] for part in text.split(","))
    target = values.pop("target_length", "")
    if not target.isdigit():
        raise PoSEError(f"--extend {text} needs target_length, e.g. target_length=32768,rope=yarn")
    rope: dict[str, Any] = {"type": values.pop("rope", "yarn")}
    for key, value in values.items():
        try:
            rope[key] = int(value) if value.isdigit() else float(value)
        except ValueError:
            rope[key] = value
    return int(target), rope


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PoSEError(f"{path} could not be read as a UTF-8 text file: {error}") from error
