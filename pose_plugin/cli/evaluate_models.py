"""The models of `pose-plugin evaluate`: folders, adapters, hub names, variants of the base, and served models."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin.cli.parser import ADDRESS, amount, count, require_option
from pose_plugin.utils.clean import without_password
from pose_plugin.utils.errors import Complaints, PoSEError
from pose_plugin.utils.lengths import parse_length

if TYPE_CHECKING:
    from pose_plugin.checkpoints.load import Source

# Options of a served model. Without --url they have no effect.
SERVED: dict[str, dict[str, Any]] = {
    "--url": {"help": "an OpenAI-compatible server (vLLM, SGLang, llama.cpp, transformers serve), up to and with /v1"},
    "--served-model": {"action": "append", "default": [], "metavar": "NAME",
                       "help": "its name on the server, may be repeated; default: the only one"},
    "--like": {"metavar": "FOLDER", "help": "the folder of the served model or of its base, for tokenizer and config"},
    "--key-variable": {"metavar": "NAME", "help": "the environment variable that holds the API key"},
    "--prompts": {"choices": ("auto", "ids", "text", "chat"),
                  "help": "how prompts are sent; default: auto, the first of the other three that works"},
    "--concurrency": {"type": count, "help": "requests at a time (default 4)"},
    "--requests-per-minute": {"type": amount, "help": "most requests per minute; default: no limit"},
    "--max-requests": {"type": count, "help": "do not begin if more requests than this are needed; default: no limit"},
    "--retries": {"type": count, "help": "how often a request that gets no answer is repeated (default 4)"},
}  # fmt: skip


def names_of(labels: list[str], models: list[str]) -> dict[str, str]:
    """Return the names that --label gives, by the model.

    Raises:
        PoSEError: a label that names no model, or a name or a model twice.
    """
    names: dict[str, str] = {}
    for label in labels:
        name, equals, path = label.partition("=")
        if not equals or not name:
            raise PoSEError(f"--label {label} must be NAME=PATH, e.g. trained={(models or ['outputs/model'])[-1]}")
        if path not in models:
            raise PoSEError(f"--label {label}: {path} is none of the models {', '.join(models) or '(none is named)'}")
        if name in names.values():
            raise PoSEError(f"--label {label}: {name} is another model's name already; give each a different name")
        if path in names:
            raise PoSEError(f"--label {label}: {path} has the name {names[path]} already; give each model one name")
        names[path] = name
    return names


def parse_extension(text: str) -> tuple[int, dict[str, Any]]:
    """(2048, {"type": "linear"}) for `target_length=2048,rope=linear`; further keys are those of `rope:`."""
    pairs = [part.strip().partition("=")[::2] for part in text.split(",")]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise PoSEError("a key is given twice; give each once, and add another --extend for another variant")
    if "target_length" not in values:
        raise PoSEError("target_length is missing; write e.g. target_length=32k,rope=yarn")
    target = parse_length(values.pop("target_length"))
    rope: dict[str, Any] = {"type": values.pop("rope", "yarn")}
    return target, rope | {key: as_number(value) for key, value in values.items()}


def as_number(text: str) -> int | float | str:
    """Return a text as a number, if it is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def check_served(args: argparse.Namespace) -> None:
    """Raise PoSEError for options of a served model that miss something or have no effect."""
    if args.url is None:
        require_option(args, "--url", SERVED, ADDRESS)
        if not args.models:
            raise PoSEError("MODEL is missing: name a folder, an adapter or a hub name, or a server with --url")
        return
    if args.extend and not args.models:
        raise PoSEError(f"--extend {args.extend[0]} stretches the first MODEL, and there is none; name a folder")
    if args.like is None:
        raise PoSEError(f"--url {without_password(args.url)} needs --like, the folder of the served model or its base")


def local_sources(
    models: Sequence[str], names: Mapping[str, str], extensions: Sequence[tuple[int, dict[str, Any]]]
) -> list[Source]:
    """Return the models on this machine, and the variants of the first one.

    Args:
        models: as on the command line.
        names: of models, by what was given.
        extensions: target and RoPE of each variant.
    """
    from pose_plugin.checkpoints.load import describe, extended

    sources, complaints = [], Complaints()
    for path in models:
        with complaints:
            sources.append(describe(path, names.get(path)))
    complaints.raise_all()
    _name_by_folders([source for source in sources if source.path not in names])
    # Behind the model they are variants of: base, RoPE only, trained.
    for place, extension in enumerate(extensions, 1):
        with complaints:
            sources.insert(place, extended(sources[0], *extension))
    complaints.raise_all()
    return with_distinct_names(sources)


def served_sources(args: argparse.Namespace, names: Mapping[str, str]) -> list[Source]:
    """Return the served models; the server is asked for their names."""
    if args.url is None:
        return []
    from pose_plugin.checkpoints.load import describe
    from pose_plugin.evaluation.served import ServedModel, describe_served, penalty_of
    from pose_plugin.utils.server import Server, key_of

    like, form, key = describe(args.like), args.prompts or "auto", key_of(args.key_variable)
    found: list[Source] = []
    for name in args.served_model or [None]:
        server = Server(args.url, name, key, retries=args.retries or 4, option="--served-model")
        model = ServedModel(
            server, like.tokenizer, form, args.concurrency or 4, args.requests_per_minute or 0, args.max_requests,
            penalty_of(like),
        )  # fmt: skip
        source = describe_served(like, model, form)
        source.name = names.get(name or args.url, source.name)
        found.append(source)
    return found


def _name_by_folders(sources: list[Source]) -> None:
    """checkpoint-100 of two runs is called run-a/checkpoint-100 and run-b/checkpoint-100."""
    parts = {source.path: Path(source.path).resolve().parts for source in sources}
    for source in sources:
        own, others = parts[source.path], [each for each in parts.values() if each != parts[source.path]]
        for n in range(1, len(own)):
            source.name = "/".join(own[-n:])
            if all(each[-n:] != own[-n:] for each in others):
                break


def with_distinct_names(sources: list[Source]) -> list[Source]:
    """Number models of the same name; one that is listed twice counts once."""
    taken: set[str] = set()
    for source in {id(source): source for source in sources}.values():
        more = (f"{source.name} ({n})" for n in itertools.count(2))
        source.name = next(name for name in itertools.chain([source.name], more) if name not in taken)
        taken.add(source.name)
    return sources
