"""What a run of `pose-plugin synthesize` was asked for, checked before anything is read or paid."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pose_plugin.utils.errors import PoSEError

# What a run writes into its folder.
ROWS, SOURCES, JOURNAL, MANIFEST = "train.jsonl", "sources.jsonl", "journal.jsonl", "manifest.json"
TASKS = ("single", "multi", "compare", "biography")
# From the strictest to the most widespread; the second is what llama-cpp-python and some services understand.
FORMATS = ("auto", "schema", "object-schema", "object", "text")
LONGER = ("drop", "split")

# name, lowest, highest, what it is for
_NUMBERS = (
    ("window", 64, math.inf, "tokens of a row"),
    ("chunk_tokens", 16, math.inf, "tokens of a piece that a single-detail question is about"),
    ("request_tokens", 32, math.inf, "the most document tokens in one request"),
    ("answer_tokens", 16, math.inf, "the most tokens of one answer"),
    ("questions", 1, 100, "questions on one document"),
    ("characters", 1, 50, "biographies of one book"),
    ("group_size", 2, 50, "short documents compared in one row"),
    ("concurrency", 1, 1000, "requests at a time"),
    ("requests_per_minute", 0, math.inf, "0 for no limit"),
    ("tokens_per_minute", 0, math.inf, "0 for no limit"),
    ("tries", 1, 20, "answers asked for until one is usable"),
    ("retries", 0, 100, "repeats of a request that got no answer"),
    ("retry_wait", 0, 3600, "seconds before the first repeat"),
    ("timeout", 0.01, 86400, "seconds for one answer"),
    ("temperature", 0, 2, "of the model that writes"),
)


@dataclass(frozen=True)
class Settings:
    """One run. Lengths are in tokens of the training tokenizer, prices per million of the server's tokens.

    Attributes:
        tasks: task → most rows of it, None for as many as there are documents for.
        min_tokens, max_tokens: band of a long document; default: one chunk, and what fits into `window`.
        min_short: shortest document to compare; longer ones than `min_tokens` are not short.
        languages: ISO 639-1 codes that are kept; empty keeps all.
        longer: whether documents beyond the band are dropped or split into pieces within it.
        price_input, price_output, budget: in one currency of the caller's; None where unknown, or without a limit.
    """

    inputs: tuple[Path, ...]
    output: Path
    tokenizer: str
    model: str
    window: int
    base_url: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    tasks: dict[str, int | None] = field(default_factory=lambda: {"single": None})
    text_field: str = "text"
    languages: tuple[str, ...] = ()
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_short: int = 64
    longer: str = "drop"
    chunk_tokens: int = 4096
    request_tokens: int = 32768
    answer_tokens: int = 4096
    questions: int = 10
    characters: int = 3
    group_size: int = 4
    check_quotes: bool = True
    concurrency: int = 8
    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    tries: int = 3
    retries: int = 6
    retry_wait: float = 1.0
    timeout: float = 300.0
    temperature: float = 0.7
    answer_format: str = "auto"
    price_input: float | None = None
    price_output: float | None = None
    budget: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high, purpose in _NUMBERS:
            value = getattr(self, name)
            # A comparison with NaN is False, so NaN is refused too.
            if not low <= value <= high or (math.isinf(value) and high == math.inf):
                bound = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise PoSEError(f"{option(name)} {value} cannot work: {purpose}, {bound}")
        _choice("longer", self.longer, LONGER)
        _choice("answer_format", self.answer_format, FORMATS)
        for task, count in self.tasks.items():
            _choice("tasks", task, TASKS)
            if count is not None and count < 1:
                raise PoSEError(f"--tasks {task}={count} asks for no row; name at least 1, or leave the task out")
        if not self.tasks:
            raise PoSEError(f"--tasks names none; choose of {', '.join(TASKS)}")
        for name in ("model", "tokenizer"):
            if not getattr(self, name).strip():
                raise PoSEError(f"{option(name)} is empty; give a name")
        if self.base_url is not None:
            check_address("--base-url", self.base_url)
        self._check_band()
        self._check_money()

    @property
    def longest(self) -> int:
        """The most tokens of a document: room for questions and answers is left in the window."""
        return self.max_tokens or self.window - min(self.window // 4, 256 * self.questions)

    @property
    def shortest(self) -> int:
        return self.min_tokens or min(self.chunk_tokens, self.longest // 2)

    def _check_band(self) -> None:
        if self.longest >= self.window:
            raise PoSEError(
                f"--max-tokens {self.max_tokens} leaves no room for questions in --window {self.window}; "
                f"give at most {self.window - min(self.window // 4, 256 * self.questions)}"
            )
        if not 1 <= self.shortest <= self.longest:
            raise PoSEError(f"--min-tokens {self.shortest} is not between 1 and the longest document, {self.longest}")
        if "compare" in self.tasks and not 1 <= self.min_short < self.shortest:
            raise PoSEError(
                f"--min-short {self.min_short} must be at least 1 and below --min-tokens {self.shortest}: "
                "compare takes the documents between them"
            )

    def _check_money(self) -> None:
        for name in ("price_input", "price_output", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise PoSEError(f"{option(name)} {value} is no amount; give 0 or more")
        if (self.price_input is None) != (self.price_output is None):
            raise PoSEError("one price is missing: give both --price-input and --price-output, per million tokens")
        if self.budget is not None and self.price_input is None:
            raise PoSEError(f"--budget {self.budget:g} needs prices to count by; add --price-input and --price-output")


def check_address(name: str, url: str) -> None:
    """Raises PoSEError for what is no address of a server."""
    try:
        parts = urlsplit(url)
        # Reading the port looks at it.
        good = (
            parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not any(map(str.isspace, url))
        )
    except ValueError:
        good = False
    if not good:
        raise PoSEError(f"{name} {url!r} is no address; write e.g. http://localhost:8000/v1")


def option(name: str) -> str:
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PoSEError(f"{option(name)} {value!r} is unknown; choose of {', '.join(allowed)}")


def parse_tasks(text: str) -> dict[str, int | None]:
    """`single=200,multi` → {"single": 200, "multi": None}.

    Raises:
        PoSEError: a count is no whole number, or a task is named twice.
    """
    tasks: dict[str, int | None] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, count = part.partition("=")
        if name in tasks:
            raise PoSEError(f"--tasks names {name} twice; name it once, with one count")
        try:
            tasks[name] = int(count) if count else None
        except ValueError:
            raise PoSEError(f"--tasks {part}: {count!r} is no number of rows; write e.g. {name}=100") from None
    return tasks
