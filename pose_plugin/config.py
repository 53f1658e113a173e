"""The settings of the Axolotl `pose:` block, of `PoSECollator` and of the command line.

Symbols of the whole package, in tokens: `L_c` is the trained window (`train_length`), `L_t` the target window
(`target_length`), `L_0` the window that the base model was pretrained with (`original_length`).
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pose_plugin.positions.samplers import SAMPLERS, names_with, unread_options
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.errors import PoSEError, did_you_mean
from pose_plugin.utils.lengths import LONGEST, length_or_same

ContentMode = Literal["contiguous", "window", "skip", "aligned"]


def _no_switch(value: Any) -> Any:
    """Refuse `true`, `yes` and `off` of a YAML, which pydantic would read as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


# The types of numbers. Each has both limits, and a test refuses a numeric setting without them, or one that takes a
# switch. StrictInt takes none; strict floats would refuse 2e8, which YAML reads as text. The validator stands behind
# the limits, because the JSON schema would lose limits that follow it.
PositiveInt = Annotated[StrictInt, Field(ge=1, le=LONGEST)]
# Tokens: 32768, or "32k" as on the command line.
Length = Annotated[StrictInt, Field(ge=1, le=LONGEST), BeforeValidator(length_or_same)]
LengthOrZero = Annotated[StrictInt, Field(ge=0, le=LONGEST), BeforeValidator(length_or_same)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(_no_switch)]
Stretch = Annotated[float, Field(ge=1, le=LONGEST), BeforeValidator(_no_switch)]
Rotations = Annotated[float, Field(gt=0, le=LONGEST), BeforeValidator(_no_switch)]
Scale = Annotated[float, Field(gt=0, le=1000), BeforeValidator(_no_switch)]
# Float32, in which frequencies are computed, ends at 3e38.
Theta = Annotated[float, Field(gt=1, le=1e30), BeforeValidator(_no_switch)]
# A quoted "no" in a YAML is a string, and pydantic would silently read it as false.
Switch = Annotated[bool, Field(strict=True)]


def _known_sampler(name: str) -> str:
    if name not in SAMPLERS:
        known = {"names": ", ".join(SAMPLERS), "close": did_you_mean(name, SAMPLERS)}
        raise PydanticCustomError("unknown_sampler", "input should be one of {names}{close}", known)
    return name


# Not a Literal, so that the registry alone decides which samplers exist.
SamplerName = Annotated[str, AfterValidator(_known_sampler)]


class Strict(BaseModel):
    """Settings that nobody changes, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RopeSettings(Strict):
    """How the rotary frequencies are stretched. `rope: yarn` is short for `rope: {type: yarn}`.

    Every field but `type` has a default that follows from the base model's config and `target_length`.
    """

    type: str = Field("yarn", description="auto selects a type for the base model, none keeps the frequencies")
    factor: Stretch | None = Field(None, description="s, the scaling factor; default: target_length / original_length")
    theta: Theta | None = Field(None, description="the new RoPE base; required with `type: base`")
    original_length: Length | None = Field(None, description="L_0 in tokens; default: from the base model's config")
    beta_fast: Rotations = Field(
        32.0, description="yarn: dimensions that rotate more often than this within L_0 are kept"
    )
    beta_slow: Rotations = Field(
        1.0, description="yarn: dimensions that rotate less often than this within L_0 are divided by s"
    )
    attention_factor: Scale | None = Field(
        None, description="yarn, longrope: the scale of cos and sin; default: the paper's formula"
    )
    low_freq_factor: Rotations = Field(
        1.0, description="llama3: wavelengths above L_0 / low_freq_factor are divided by s"
    )
    high_freq_factor: Rotations = Field(4.0, description="llama3: wavelengths below L_0 / high_freq_factor are kept")
    factors_file: str | None = Field(
        None, description="longrope: a JSON file with the lists long_factor and short_factor"
    )

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in KINDS:
            raise ValueError(f"rope.type={name} is unknown{did_you_mean(name, KINDS)}; use {', '.join(KINDS)}")
        return name

    @model_validator(mode="after")
    def _belongs_together(self) -> RopeSettings:
        kind = KINDS[self.type]
        for name, meaning in kind.required.items():
            if getattr(self, name) is None:
                raise ValueError(f"rope.type={self.type} needs rope.{name}, {meaning}")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            # Defaults pass, as a dump of the settings holds them all.
            if value == field.default or name in ("type", "original_length", *kind.settings, *kind.required):
                continue
            users = [each.name for each in KINDS.values() if name in (*each.settings, *each.required)]
            raise ValueError(
                f"rope.{name}={value} has no effect with rope.type={self.type}; remove it, or set rope.type to "
                f"{' or '.join(users)}"
            )
        return self


class PoSESettings(Strict):
    """The `pose:` block. The same fields are the keyword arguments of `PoSECollator`."""

    target_length: Length = Field(description="L_t, the target window in tokens")
    train_length: Length | None = Field(
        None,
        description="L_c, the trained window in tokens; default: Axolotl's sequence_len, or each row's own length",
    )
    rope: RopeSettings = Field(RopeSettings(), description="how the RoPE frequencies are stretched")
    sampler: SamplerName = Field(
        "pose", description="how a window is cut into chunks, and how the chunks' positions are chosen"
    )
    chunks: PositiveInt = Field(
        2, description=f"N, the number of chunks per window (samplers {', '.join(names_with('chunks'))})"
    )
    variant: Literal["paper", "reference"] = Field(
        "paper", description="reference: the first chunk is at most half of the window, as in the authors' code"
    )
    content: ContentMode = Field(
        "contiguous",
        description="the part of a document longer than train_length that is used: its beginning (contiguous), one "
        "random span (window), one span per chunk (skip), or spans at their true offsets (aligned)",
    )
    mask_seam: Switch = Field(
        True, description="exclude tokens from the loss if the token before them is left out (content skip or aligned)"
    )
    unskipped_ratio: Share = Field(0.0, description="share of rows that keep their ordinary positions 0, 1, 2, …")
    target_margin: LengthOrZero = Field(
        0,
        description="how far beyond target_length to draw positions, because the longest distances are the rarest",
    )
    seed: Seed = Field(0, description="random seed; positions depend only on it, the epoch and the document's tokens")
    self_test: Switch = Field(
        True, description="check before the first step that the chunks of a row can attend to each other"
    )
    # Saved folders do not record it: it does not change the training, and it names files on this machine.
    evaluate: dict[str, Any] | None = Field(
        None, exclude=True, description="measure retrieval and perplexity by length during training"
    )

    @field_validator("rope", mode="before")
    @classmethod
    def _rope_by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value}
        if not isinstance(value, (dict, RopeSettings)):
            raise ValueError(
                f"rope={reprlib.repr(value)} is neither a name ({', '.join(KINDS)}) nor a block such as "
                "{type: base, theta: 2.0e8}"
            )
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> PoSESettings:
        if self.train_length is not None and self.target_length < self.train_length:
            raise ValueError(
                f"target_length={self.target_length} is smaller than the trained window "
                f"train_length={self.train_length}; set target_length to the window you want, "
                "or shorten train_length (Axolotl: sequence_len)"
            )
        if self.target_length + self.target_margin > LONGEST:
            raise ValueError(
                f"target_length={self.target_length} and target_margin={self.target_margin} reach beyond position "
                f"{LONGEST}, the largest that every kernel can read; lower target_margin"
            )
        if self.content != "contiguous" and self.train_length is None:
            raise ValueError(
                f"content={self.content} reads spans of documents longer than train_length, which is missing; set "
                "train_length, the trained window in tokens"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_sampler(self) -> PoSESettings:
        sampler = SAMPLERS[self.sampler]
        for option in sorted(unread_options(self.sampler)):
            # Defaults pass, as a dump of the settings holds them all.
            if getattr(self, option) == type(self).model_fields[option].default:
                continue
            raise ValueError(
                f"{option}={getattr(self, option)} has no effect with sampler={self.sampler}; remove it, or use a "
                f"sampler that reads it: {', '.join(names_with(option))}"
            )
        if reason := sampler.refused_contents.get(self.content):
            instead = "contiguous" if "window" in sampler.refused_contents else "window"
            raise ValueError(
                f"content={self.content} does not work with sampler={self.sampler}: {reason}. Write content: {instead}"
            )
        if self.content in ("skip", "aligned") and self.chunks == 1:
            raise ValueError(
                f"content={self.content} reads one span per chunk, so it has no effect with chunks=1; set chunks: 2 "
                "or content: window"
            )
        return self


def parse_settings(values: dict[str, Any] | PoSESettings, where: str = "pose") -> PoSESettings:
    """Validate settings.

    Args:
        values: the `pose:` block or keyword arguments.
        where: what to write before each key in messages, e.g. "pose" for the YAML block.

    Raises:
        PoSEError: one line per wrong key, with its value, the limit and the fix.
    """
    if isinstance(values, PoSESettings):
        return values
    if not isinstance(values, dict):
        raise PoSEError(f"`{where}:` is {reprlib.repr(values)}, but must be a block with at least target_length")
    try:
        return PoSESettings(**values)
    except ValidationError as error:
        raise PoSEError(explain(error, where, PoSESettings, rope=RopeSettings)) from None


def explain(error: ValidationError, where: str, model: type[BaseModel], **blocks: type[BaseModel]) -> str:
    """Return the problems that pydantic found, one sentence per line.

    Args:
        error: what pydantic raised.
        where: what is put before each key, e.g. "pose".
        model: what was validated.
        blocks: the models of its nested blocks, by key.
    """
    return "\n".join(_sentence(item, where, model, blocks) for item in error.errors())


def _sentence(item: Any, where: str, model: type[BaseModel], blocks: dict[str, type[BaseModel]]) -> str:
    """Return one of pydantic's errors in the words of a user: the full key, the value, the limit, the meaning."""
    path = [str(part) for part in item["loc"]]
    model = blocks.get(path[0], model) if len(path) > 1 else model
    field = model.model_fields.get(path[-1]) if path else None
    key = ".".join([where, *path])
    kind = item["type"]
    if kind == "missing":
        return f"{key} is missing: {field.description if field else 'required'}. Add it, e.g. `{path[-1]}: 32768`"
    if kind == "extra_forbidden":
        nested = [f"{name}.{inner}" for name, block in blocks.items() for inner in block.model_fields]
        close = did_you_mean(path[-1], [*model.model_fields, *(nested if len(path) == 1 else [])])
        known = ", ".join(model.model_fields)
        return f"{key}={reprlib.repr(item['input'])} is not a known key{close}. Known keys: {known}"
    if kind == "value_error":
        return f"{where}: {item['ctx']['error']}"
    meaning = f" ({field.description})" if field is not None and field.description else ""
    value = item["input"]
    hint = ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        hint = f"; write {int(value)}"
    if kind == "bool_type":
        hint = "; write true or false, without quotes"
    return f"{key}={reprlib.repr(value)}: {item['msg'][0].lower()}{item['msg'][1:]}{hint}{meaning}"
