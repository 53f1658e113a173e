"""Which rows of local data Axolotl drops, because they have more tokens than `sequence_len`."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.utils.server import words_of

# Bytes of a file whose tokens are counted, about. Of a larger file, rows are drawn.
_READ = 2**24


def share_dropped(file: Path, data: Mapping[str, Any], longest: int, place: str) -> float | None:
    """Return the share of a file's rows that have more than `longest` tokens; None if they cannot be counted here.

    Args:
        file: JSON lines.
        data: its block below `datasets:`.
        place: the tokenizer's folder, or its name on the Hub.
    """
    if data.get("type") == "completion":
        return 0.0  # such texts are cut into several rows
    part, draw = _READ / max(file.stat().st_size, 1), random.Random(0)
    with file.open("rb") as lines:
        rows = (line for line in lines if line.strip() and draw.random() < part)
        # No token is shorter than a byte.
        counts = [_tokens(line, data, place) if len(line) > longest else 0 for line in rows]
    if None in counts:
        return None
    return sum(count > longest for count in counts if count) / max(len(counts), 1)


def _tokens(line: bytes, data: Mapping[str, Any], place: str) -> int | None:
    """Return the tokens of a row. Those of a chat's template are not counted."""
    try:
        row = json.loads(line)
        if "input_ids" in row:
            return len(row["input_ids"])
        tokenizer = _tokenizer(place) if "chat_template" in str(data.get("type")) else None
        if tokenizer is None:
            return None
        content = (data.get("message_property_mappings") or {}).get("content", "content")
        texts = [words_of(turn.get(content)) for turn in row[data.get("field_messages") or "messages"]]
        return sum(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # not what the block says: the run will say it


@functools.cache
def _tokenizer(place: str) -> Any:
    """Return a tokenizer that is on this machine, else None."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception:  # of many libraries; without it, the rows are not counted
        return None
