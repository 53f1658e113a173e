"""What is read of each file in a saved folder. Every other key is kept and never looked at.

Files come from other tools, other versions and hand edits, so each is parsed once, here, and a wrong type is reported
with the file, the key and the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.files import read_json


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Some tools write 4096.0.
Tokens = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


# As rope_theta of Step-3.5.
_ONE_PER_LAYER = "has one value per layer"


class Part(BaseModel):
    """A part of a file: keys that are not declared are allowed, and nothing is converted to another type."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class Rope(Part):
    """One flat rope dict, in the spelling of transformers 5 or of older readers."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Number | None = None
    factor: Number | None = None
    original_max_position_embeddings: Tokens | None = None
    attention_factor: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    partial_rotary_factor: Number | None = None
    truncate: bool | None = None
    short_factor: list[Number] | None = None
    long_factor: list[Number] | None = None


class Origin(Part):
    """The key `pose_plugin` of a config: the rope before it was extended."""

    rope: str | None = None
    target_length: Tokens | None = None
    original_length: Tokens | None = None
    original_theta: Number | None = None


class Config(Part):
    """config.json, or its text_config."""

    model_type: str | None = None
    max_position_embeddings: Tokens | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Number | None = None
    rotary_emb_base: Number | None = None
    rotary_pct: Number | None = None
    partial_rotary_factor: Number | None = None
    head_dim: Tokens | None = None
    hidden_size: Tokens | None = None
    num_attention_heads: Tokens | None = None
    vocab_size: Tokens | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool | None = None
    pose_plugin: Origin | None = None
    text_config: Config | None = None

    @field_validator("rope_parameters", "rope_scaling")
    @classmethod
    def _each_layer_type(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        values = given or {}
        ropes = [value for value in values.values() if isinstance(value, Mapping)]
        # A damaged flat dict may hold another dict.
        if not ropes or Rope.model_fields.keys() & values.keys():
            ropes.append(values)
        for rope in ropes:
            try:
                Rope.model_validate(rope)
            except ValidationError as error:
                raise ValueError("; ".join(map(_problem, error.errors()))) from None
        return given


class Tokenizer(Part):
    """tokenizer_config.json."""

    model_max_length: int | float | None = None  # some tools write Infinity
    tokenizer_class: str | None = None


class Generation(Part):
    """generation_config.json."""

    max_length: int | None = None


class Adapter(Part):
    """adapter_config.json."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int | None = None
    rank_pattern: dict[str, Any] | None = None  # a rank each; of AdaLoRA, a list
    init_lora_weights: Any = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, Any] | None = None
    bias: str | None = None
    lora_bias: bool | None = None
    trainable_token_indices: Any = None


class _RopeOfRecord(Part):
    type: str | None = None


class _Model(Part):
    original_length: Tokens | None = None
    original_theta: Number | None = None


class _Base(Part):
    name: str | None = None
    revision: str | None = None


class _Trained(Part):
    steps: int | None = None
    epochs: Number | None = None
    rows_a_step: int | None = None
    processes: int | None = None
    first_process: dict[str, Any] | None = None


class Record(Part):
    """pose.json: what a run of this package trained."""

    target_length: Tokens
    train_length: Tokens | None = None
    target_margin: int = 0
    sampler: str | None = None
    chunks: int | None = None
    rope: _RopeOfRecord | None = None
    model: _Model = _Model()
    base: _Base = _Base()
    method: str | None = None
    adapter: Adapter | None = None
    trained: _Trained | None = None
    versions: dict[str, str] = {}
    hardware: str | None = None
    data: list[str] | None = None
    merged: bool = False


class Frequencies(Part):
    """A live buffer of inverse frequencies, and the scale of cos and sin."""

    inv_freq: list[float]
    scale: float


class Probe(Part):
    """pose_probe.json: n tokens, their positions, and logits [n, v] of v tokens of the vocabulary."""

    ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    positions: list[Annotated[int, Field(ge=0)]]
    vocabulary: list[Annotated[int, Field(ge=0)]]
    logits: list[list[float]] = Field(min_length=1)
    frequencies: dict[str, Frequencies]
    dtype: str
    compute: str
    quantization: dict[str, Any] | None

    @model_validator(mode="after")
    def _sizes_agree(self) -> Probe:
        sizes = (len(self.ids), len(self.positions), len(self.logits))
        widths = {len(row) for row in self.logits}
        if len(set(sizes)) > 1 or widths != {len(self.vocabulary)}:
            raise ValueError(
                f"ids, positions and logits have {sizes} entries, and rows of logits {sorted(widths)[:3]} for "
                f"{len(self.vocabulary)} tokens of the vocabulary; they must agree"
            )
        return self


File = TypeVar("File", bound=Part)


def read(file: Path, schema: type[File]) -> File:
    """Read a JSON file by its schema.

    Raises:
        PoSEError: not JSON, a missing key or a value of another type; the message names each.
    """
    return parsed(read_json(file), schema, str(file))


def _per_layer(item: Any) -> bool:
    """Return whether the wrong value is a list in place of a number, as models with one rope per layer have it."""
    value = item["input"]
    numbers = isinstance(value, list) and len(value) > 1 and all(isinstance(each, int | float) for each in value)
    return numbers and item["type"] in ("float_type", "int_type")


def parsed(values: Mapping[str, Any], schema: type[File], where: str) -> File:
    """Return values by their schema; see `read`.

    Args:
        values: of a JSON file.
        schema: of the file.
        where: the file, for messages.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors()[:3])
        fix = "Save the folder again, or correct the file"
        if _ONE_PER_LAYER in problems:
            fix = "The file may be right, but this package does not support such models"
        raise PoSEError(f"{where}: {problems}. {fix}") from None


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"lacks {key}"
    if item["type"] == "value_error":
        return f"{key}: {shown(item['ctx']['error'], 300)}".removeprefix(": ")
    if _per_layer(item):
        return f"{key}={shown(item['input'])} {_ONE_PER_LAYER}"
    return f"{key}={shown(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"
