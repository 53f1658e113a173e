"""Every length in a saved folder that would keep readers below the trained window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.saved import NO_LIMIT, Saved
from pose_plugin.checkpoints.schema import Generation, Tokenizer, read
from pose_plugin.rope.read import LENGTH_KEYS
from pose_plugin.utils.files import Stage, read_json

TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"
# The files that `raised_limits` may change.
LIMITING = (TOKENIZER, GENERATION)
# transformers' own max_length, which stands for "not set": `generate` then adds 20 tokens to any prompt.
UNSET_GENERATION = 20


@dataclass(frozen=True)
class Limit:
    """A length in a file.

    Attributes:
        file, key: where it is.
        value: in tokens.
        effect: what it does to a longer text.
    """

    file: str
    key: str
    value: int
    effect: str


def limits_below(saved: Saved, target: int) -> Iterator[Limit]:
    """Yield the lengths that are below the target, in tokens."""
    for key in LENGTH_KEYS if saved.config is not None else ():
        value = saved.text.get(key)
        if isinstance(value, int) and value < target:
            yield Limit("config.json", key, value, "engines take it as the window")
    limit = saved.tokenizer_maximum
    if limit is not None and limit < target:
        yield Limit(TOKENIZER, "model_max_length", limit, "longer texts raise a warning or are truncated")
    longest = saved.generation.max_length if saved.generation else None
    if longest is not None and UNSET_GENERATION < longest < target:
        yield Limit(GENERATION, "max_length", longest, "generate() ends there and refuses longer prompts")


def raise_config(text: dict[str, Any], target: int) -> int:
    """Raise the lengths of a config's text part to the target, in place.

    Returns:
        the window in tokens, which `raise_limits` needs: `rope: none` may keep one that is longer than the target.
    """
    for key in LENGTH_KEYS:
        if isinstance(value := text.get(key), int) and value < target:
            text[key] = target
    return text.get("max_position_embeddings") or target


def raised_limits(
    path: Callable[[str], Path], window: int, tokenizer: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the new content of each file that limits the tokenizer or `generate` to less than the window.

    A tokenizer without a limit gets the window as its limit.

    Args:
        path: returns where a file of the folder is.
        window: in tokens; engines take the smallest of all limits.
        tokenizer: False leaves out the tokenizer's file.
    """
    if tokenizer and (file := path(TOKENIZER)).is_file():
        limit = read(file, Tokenizer).model_max_length
        if limit is None or limit < window or limit >= NO_LIMIT:
            yield TOKENIZER, read_json(file) | {"model_max_length": window}
    if (file := path(GENERATION)).is_file():
        longest = read(file, Generation).max_length
        if longest is not None and UNSET_GENERATION < longest < window:
            yield GENERATION, read_json(file) | {"max_length": window}


def raise_limits(stage: Stage, window: int, tokenizer: bool = True) -> None:
    """Raise the limits of a folder that is being written; see `raised_limits`.

    Args:
        stage: the folder.
        window: in tokens.
        tokenizer: False leaves the tokenizer's file alone, as another process may be writing it.
    """
    for name, values in raised_limits(stage.path, window, tokenizer):
        stage.write_json(name, values)
