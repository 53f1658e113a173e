"""All measures by name. To add one, write its class into a file of this folder and add a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.measures.association import Association
from pose_plugin.evaluation.measures.gap import Gap
from pose_plugin.evaluation.measures.harness import Harness
from pose_plugin.evaluation.measures.haystack import Haystack
from pose_plugin.evaluation.measures.longppl import LongPPL
from pose_plugin.evaluation.measures.needle import Needle
from pose_plugin.evaluation.measures.passkey import Passkey
from pose_plugin.evaluation.measures.perplexity import Perplexity
from pose_plugin.evaluation.measures.ruler import Ruler
from pose_plugin.evaluation.measures.short import Short
from pose_plugin.evaluation.measures.topics import Topics
from pose_plugin.utils.errors import Complaints, PoSEError, did_you_mean

MEASURES: dict[str, type[Measure]] = {
    measure.name: measure
    for measure in (Passkey, Haystack, Perplexity, Needle, Topics, Association, Ruler, LongPPL, Gap, Short, Harness)
}


def by_task(while_training: bool = False) -> dict[str, type[Measure]]:
    """Return the measures that a list of tasks can name."""
    return {
        name: measure
        for name, measure in MEASURES.items()
        if not measure.chosen_by and (measure.while_training or not while_training)
    }


def with_texts() -> str:
    """Return the names of the measures that need texts, to read."""
    return ", ".join(name for name, measure in MEASURES.items() if measure.needs_texts)


def options_of(measures: Iterable[type[Measure]], defaults: bool = False) -> dict[str, FieldInfo]:
    """Return the options of measures by name; the descriptions name the measures that have it.

    Args:
        defaults: whether the descriptions also name the defaults.
    """
    declared: dict[str, list[tuple[str, FieldInfo]]] = {}
    for measure in measures:
        for name, option in measure.model_fields.items():
            if option.description:
                declared.setdefault(name, []).append((measure.name, option))
    options = {}
    for name, found in declared.items():
        option = FieldInfo.merge_field_infos(found[0][1])
        if name not in Measure.model_fields:
            users: dict[str, list[str]] = {}
            for who, each in found:
                value = ",".join(each.default) if isinstance(each.default, list) else each.default
                shown = f" (default {value})" if defaults and value not in (None, "") else ""
                users.setdefault(f"{each.description}{shown}", []).append(who)
            option.description = "; ".join(f"{', '.join(names)}: {text}" for text, names in users.items())
        options[name] = option
    return options


def hints(option: FieldInfo) -> dict[str, Any]:
    """Return what an option declares for front ends: `training`, its default there, and whether it is a `file`."""
    return option.json_schema_extra if isinstance(option.json_schema_extra, dict) else {}


def choose(tasks: Sequence[str] | None, has_texts: bool, key: str, while_training: bool = False) -> list[type[Measure]]:
    """Return the measures that a list of tasks names.

    Args:
        tasks: names, "all" among them for all that can run and are not costly; None for the default.
        has_texts: whether the user gave texts.
        key: of the setting, for messages.
        while_training: whether it is the `evaluate:` block that names them.

    Raises:
        PoSEError: an unknown name, or a measure that needs texts.
    """
    known = by_task(while_training)
    possible = [measure for measure in known.values() if has_texts or not measure.needs_texts]
    if tasks is None:
        return [measure for measure in possible if measure.by_default]
    every = [measure.name for measure in possible if not measure.costly]
    tasks = [name for task in tasks for name in (every if task == "all" else [task])]
    complaints = Complaints()
    for name in tasks:
        with complaints:
            if name not in known:
                raise PoSEError(f"{key}={name} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}")
            if known[name] not in possible:
                raise PoSEError(f"{key}={name} needs texts to measure on; name files with text, one document each")
    complaints.raise_all()
    return [known[name] for name in dict.fromkeys(tasks)]


def require_effect(given: dict[str, Any], chosen: Sequence[type[Measure]], spelled: Callable[[str], str]) -> None:
    """Raise PoSEError for an option that none of the measures has: it would silently do nothing.

    Args:
        spelled: how the user writes an option.
    """
    complaints = Complaints()
    for name in given:
        users = [measure for measure in MEASURES.values() if name in measure.model_fields]
        with complaints:
            if not set(users) & set(chosen):
                where = " or ".join(measure.chosen_by or measure.name for measure in users)
                raise PoSEError(f"{spelled(name)}={given[name]} has no effect without {where}")
    complaints.raise_all()


def make(
    chosen: Sequence[type[Measure]], options: dict[str, Any], texts: Sequence[str], read: Callable[[str, str], str]
) -> list[Measure]:
    """Return measures, each with the options that it has.

    Args:
        read: of the name of an option and its file, the text of the file.
    """
    files = [name for name, option in options_of(chosen).items() if hints(option).get("file")]
    options = {name: read(name, value) if name in files else value for name, value in options.items()}
    measures = []
    for measure in chosen:
        own = {name: value for name, value in options.items() if name in measure.model_fields}
        measures.append(measure(**own, **({"texts": list(texts)} if measure.needs_texts else {})))
    return measures
