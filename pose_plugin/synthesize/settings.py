"""The options of `pose-plugin synthesize`. They are validated before anything is read or paid for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pose_plugin.utils.errors import PoSEError, flag
from pose_plugin.utils.lengths import LONGEST, length_or_same
from pose_plugin.utils.server import check_address

# The files that a run writes into its output folder.
ROWS, SOURCES, JOURNAL, MANIFEST = "train.jsonl", "sources.jsonl", "journal.jsonl", "manifest.json"

# What the sentence about a request says if the server answered, but never usably.
TRIES = "(--tries)"

Task = Literal["single", "multi", "compare", "biography"]
# From the strictest to the most widely supported. llama-cpp-python and some services accept the second.
Format = Literal["auto", "schema", "object-schema", "object", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

Count = Annotated[int, Field(ge=1)]
# As on every command line: 4096, 4k.
Tokens = Annotated[int, BeforeValidator(length_or_same), Field(ge=1, le=LONGEST)]
Amount = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"\S")]


# Options for the rows of a published recipe. Options that are given as well take precedence.
RECIPES: dict[str, dict[str, Any]] = {
    # arXiv 2404.19553: every row of 64K to 80K tokens, in a window of 80K.
    "80k": {
        "window": 81920,
        "min_tokens": 65536,
        "group_tokens": 65536,
        "request_tokens": 81920,
        "group_size": 80,
        "min_short": 1024,
        "tasks": "single,multi,compare",
    }
}


class Settings(BaseModel):
    """One run. Lengths are in tokens of the training tokenizer, prices per million tokens of the server.

    Descriptions are the help texts of the command, and its options have the names of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    inputs: tuple[Path, ...] = Field(description="files or folders: .txt, .md, .jsonl, .parquet")
    output: Path = Field(description="folder for rows, journal and manifest; an existing run is resumed")
    tokenizer: Name = Field(description="tokenizer of the model to train; all lengths are in its tokens")
    window: Tokens = Field(ge=64, description="most tokens of a row; longer rows are dropped")
    model: Name = Field(description="name of the model that writes the questions, as the server knows it")
    base_url: str | None = Field(
        None, description="the server's address, up to /v1; default: $OPENAI_BASE_URL, else OpenAI's"
    )
    key_variable: str = Field("OPENAI_API_KEY", description="environment variable that holds the server's key")
    tasks: dict[Task, Count | None] = Field(
        {"single": None},
        min_length=1,
        description=f"any of {', '.join(get_args(Task))}, each with the most rows wanted: single=200,multi "
        "(default: single)",
    )

    text_field: str = Field("text", description="field of .jsonl and .parquet rows that holds the text")
    languages: tuple[str, ...] = Field(
        (), description="keep only documents in these languages, e.g. en,de (ISO 639-1); default: all"
    )
    min_tokens: Tokens | None = Field(
        None, description="shortest long document; default: one chunk, or half of --max-tokens"
    )
    max_tokens: Tokens | None = Field(
        None, description="longest document; default: the window minus room for questions"
    )
    min_short: Tokens = Field(
        64, description="shortest document for compare, which takes those shorter than --min-tokens"
    )
    longer: Literal["drop", "split"] = Field("drop", description="what to do with documents longer than --max-tokens")

    questions: int = Field(10, ge=1, le=100, description="questions per document, all in one conversation")
    characters: int = Field(3, ge=1, le=50, description="most biographies per document (task biography)")
    group_size: int = Field(4, ge=2, le=1000, description="most short documents that one row compares")
    group_tokens: Tokens | None = Field(
        None,
        description="fewest document tokens of a compare row: groups are filled up to it, and smaller ones left out; "
        "default: any",
    )
    chunk_tokens: Tokens = Field(
        4096, ge=16, description="tokens of the passage that a single-detail question is about"
    )
    request_tokens: Tokens = Field(
        32768, ge=32, description="most document tokens in one request; excerpts are sent of longer documents"
    )
    answer_tokens: Tokens = Field(4096, ge=16, description="most tokens of one answer")
    check_quotes: bool = Field(True, description="also keep questions whose quotes are not in the text")
    temperature: float = Field(0.7, ge=0, le=2, description="sampling temperature of the model that writes")
    seed: int = Field(0, description="random seed: chooses documents and passages, and is sent with each request")

    concurrency: int = Field(8, ge=1, le=1000, description="requests that run at the same time")
    requests_per_minute: Amount = Field(0, description="most requests per minute; default: no limit")
    tokens_per_minute: Amount = Field(
        0, description="most tokens per minute, of prompts and longest answers; default: no limit"
    )
    tries: int = Field(3, ge=1, le=20, description="most attempts to get a usable answer")
    retries: int = Field(6, ge=0, le=100, description="repeats of a request that got no answer")
    retry_wait: float = Field(
        1, ge=0, le=3600, description="seconds before each repeat, in addition to what the server asks for"
    )
    timeout: float = Field(300, ge=0.01, le=86400, description="seconds to wait for one answer")
    answer_format: Format = Field("auto", description="how JSON is requested; auto finds what the server supports")

    price_input: Amount | None = Field(None, description="price of a million prompt tokens, in any currency")
    price_output: Amount | None = Field(None, description="price of a million answer tokens")
    budget: Amount | None = Field(None, description="stop before the whole folder costs more than this")

    @property
    def longest(self) -> int:
        """The most tokens of a document. The rest of the window is for questions and answers."""
        return self.max_tokens or self.window - min(self.window // 4, 256 * self.questions)

    @property
    def shortest(self) -> int:
        """The fewest tokens of a long document."""
        return self.min_tokens or min(self.chunk_tokens, self.longest // 2)

    @field_validator("tasks", mode="before")
    @classmethod
    def _parse_tasks(cls, value: Any) -> Any:
        """`single=200,multi` → {"single": "200", "multi": None}."""
        if not isinstance(value, str):
            return value
        parts = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        tasks = {name: count or None for name, _, count in parts}
        if len(tasks) < len(parts):
            raise ValueError(f"--tasks {value} names a task twice; name it once, with one count")
        return tasks

    @field_validator("tasks")
    @classmethod
    def _order_tasks(cls, value: dict[Task, Any]) -> dict[Task, Any]:
        """Put the tasks into one order: they take documents in turn, so another one would give other requests."""
        return {name: value[name] for name in get_args(Task) if name in value}

    @field_validator("languages", mode="before")
    @classmethod
    def _parse_languages(cls, value: Any) -> Any:
        return re.findall(r"[^,\s]+", value.lower()) if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str | None) -> str | None:
        if value is not None:
            check_address("--base-url", value)
        return value

    @field_validator("key_variable")
    @classmethod
    def _check_key_variable(cls, value: str) -> str:
        # The message must not repeat the value: it is the key itself if somebody passed that by mistake.
        if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
            raise ValueError(
                "--key-variable is not the name of an environment variable; export the key, e.g. as "
                "OPENAI_API_KEY, and give the variable's name"
            )
        return value

    @model_validator(mode="after")
    def _check_lengths(self) -> Settings:
        room = min(self.window // 4, 256 * self.questions)
        if self.longest >= self.window:
            raise ValueError(
                f"--max-tokens {self.max_tokens} leaves no room for questions in --window {self.window}; "
                f"give at most {self.window - room}"
            )
        if self.shortest > self.longest:
            raise ValueError(f"--min-tokens {self.shortest} is above --max-tokens {self.longest}; lower it")
        most = min(self.request_tokens, self.longest)
        if "compare" in self.tasks and (self.group_tokens or 0) > most:
            raise ValueError(
                f"--group-tokens {self.group_tokens} is above {most}, the most document tokens of a compare row "
                "(--request-tokens, --max-tokens); lower it, or raise them"
            )
        if "compare" in self.tasks and self.min_short >= self.shortest:
            raise ValueError(
                f"--min-short {self.min_short} must be below --min-tokens {self.shortest}: compare takes the documents "
                "between the two"
            )
        return self

    @model_validator(mode="after")
    def _check_money(self) -> Settings:
        if (self.price_input is None) != (self.price_output is None):
            raise ValueError("one price is missing: give both --price-input and --price-output, per million tokens")
        if self.budget is not None and self.price_input is None:
            raise ValueError(f"--budget {self.budget:g} needs prices; add --price-input and --price-output")
        return self


def parse_settings(values: dict[str, Any], recipe: str | None = None) -> Settings:
    """Validate the options of a run.

    Args:
        recipe: name of RECIPES, for the options that `values` does not hold.

    Raises:
        PoSEError: with a sentence for each option that cannot work.
    """
    try:
        return Settings(**{**RECIPES.get(recipe or "", {}), **values})
    except ValidationError as error:
        raise PoSEError("\n".join(map(_sentence, error.errors()))) from None


def _sentence(item: Any) -> str:
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    first, *rest = map(str, item["loc"])
    if item["type"] == "missing":
        return f"{flag(first)} is missing: {Settings.model_fields[first].description}"
    place = " ".join([flag(first), *(part for part in rest if part != "[key]")])
    return f"{place} {item['input']!r}: {item['msg']}; {Settings.model_fields[first].description}"
