"""The `evaluate:` block: when and at which lengths, and the options of the measures. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from pose_plugin.config import Length, PoSESettings, PositiveInt, Strict, Switch, explain
from pose_plugin.evaluation.measure import Measure, default_lengths
from pose_plugin.evaluation.measures import by_task, choose, hints, make, options_of, require_effect, with_texts
from pose_plugin.utils.errors import PoSEError


class Schedule(Strict):
    """What is measured while training, on plain positions, and logged as `passkey/2048`, `perplexity/2048`, …"""

    every: PositiveInt | None = Field(
        None, description="number of steps between measurements; default: measure only at the start or end"
    )
    at_start: Switch = Field(False, description="measure before the first step")
    at_end: Switch = Field(True, description="measure after the last step")
    tasks: list[str] | None = Field(
        None,
        description=f"any of {', '.join(by_task(while_training=True))}; default: passkey, with texts also perplexity",
    )
    lengths: list[Length] | None = Field(
        None,
        description="lengths of prompts and windows in tokens; default: target_length / 8, doubled up to "
        "2 * target_length, as far as they fit in memory",
    )
    texts: list[str] = Field([], description=f"files of UTF-8 text, one document each, for {with_texts()}")

    @field_validator("*", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any, info: Any) -> Any:
        listed = "list" in str(cls.model_fields[info.field_name].annotation)
        return [value] if listed and isinstance(value, (str, int)) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _belongs_together(self) -> Schedule:
        for name in ("tasks", "lengths"):
            if getattr(self, name) == []:
                raise ValueError(f"evaluate.{name} is empty; name some, or remove the key for the default")
        if self.every is None and not self.at_start and not self.at_end:
            raise ValueError("evaluate never measures: set every, at_start or at_end, or remove the block")
        return self


def settings_class() -> type[Schedule]:
    """Return the model of the block: its schedule, and the options of all measures that can run while training."""
    fields: dict[str, Any] = {}
    for name, option in options_of(by_task(while_training=True).values()).items():
        # A measurement while training is smaller than that of the command.
        value = Field(hints(option).get("training"), description=option.description)
        fields[name] = (Optional[option.rebuild_annotation()], value)  # noqa: UP045 - the type is a value here
    return create_model("EvaluateSettings", __base__=Schedule, __doc__=Schedule.__doc__, **fields)


EvaluateSettings = settings_class()


@dataclass(frozen=True)
class Block:
    """A valid `evaluate:` block.

    Attributes:
        schedule: when it is measured.
        lengths: in tokens.
        where_possible: whether lengths that cannot be measured are left out: those of the default.
        chosen: what is measured.
        options: of the measures, by name; `filler` is a file.
    """

    schedule: Schedule
    lengths: list[int]
    where_possible: bool
    chosen: list[type[Measure]]
    options: dict[str, Any]

    def measures(self) -> list[Measure]:
        """Read the texts and return the measures.

        Raises:
            PoSEError: a text that cannot be read, or that is named twice.
        """
        require_once(self.schedule.texts, "evaluate.texts")
        texts = [read_text(path, "evaluate.texts") for path in self.schedule.texts]
        return make(
            self.chosen,
            {**self.options, "progress": False},
            texts,
            lambda key, path: read_text(path, f"evaluate.{key}"),
        )


def parse_block(settings: PoSESettings, where: str = "pose") -> Block:
    """Validate the `evaluate:` block of the settings, without reading any file.

    Args:
        settings: all settings, with `evaluate`.
        where: what is put before the keys in messages.

    Raises:
        PoSEError: naming the key, its value, the limit and the fix.
    """
    model = settings_class()
    try:
        asked = model(**(settings.evaluate or {}))
    except ValidationError as error:
        raise PoSEError(explain(error, f"{where}.evaluate", model)) from None
    chosen = choose(asked.tasks, bool(asked.texts), "evaluate.tasks", while_training=True)
    options = {name: value for name, value in asked if name not in Schedule.model_fields and value is not None}
    given = {name: value for name, value in options.items() if name in asked.model_fields_set}
    require_effect(given, chosen, "evaluate.{}".format)
    for measure in chosen:
        if measure.needs_evaluator and not options.get("evaluator"):
            raise PoSEError(
                f"evaluate.tasks={measure.name} needs evaluate.evaluator, a long-context model with the same "
                "tokenizer, which decides before the first step which tokens need far text"
            )
    return Block(
        asked, asked.lengths or default_lengths(settings.target_length), asked.lengths is None, chosen, options
    )


def checked(settings: PoSESettings, where: str = "pose") -> PoSESettings:
    """Return the settings if their `evaluate:` block is valid; see `parse_block`."""
    if settings.evaluate is not None:
        parse_block(settings, where)
    return settings


def require_once(texts: Sequence[str], key: str) -> None:
    """Raise PoSEError if a file is named twice: it would silently count twice."""
    if len({Path(path).resolve() for path in texts}) < len(texts):
        raise PoSEError(f"{key} {' '.join(texts)} names a file twice; name each once")


def read_text(path: str, key: str) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        PoSEError: it cannot be read, or is empty.
    """
    try:
        # Without the byte order mark that some editors put before a text: it would be a token.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PoSEError(f"{key}: {path} could not be read as a UTF-8 text file: {error}") from error
    if not text.strip():
        raise PoSEError(f"{key}: {path} is empty; give a file with text")
    return text
