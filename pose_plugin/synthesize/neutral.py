"""Takes the power from strings that a chat template or tokenizer would read as the end of a turn.

A document that quotes `<|im_end|>` would, once tokenized, close its own turn: what follows is trained as something
else, or not at all, and the model that writes the questions is misled the same way. One space inside is enough: the
text stays readable and is tokenized as ordinary characters.
"""

from __future__ import annotations

import re
from typing import Any

# The usual markers, whatever tokenizer is trained: the server's is another one, and data outlives a tokenizer.
_KNOWN = (
    r"<\|[^|<>\n]{1,60}\|>",
    r"<｜[^｜<>\n]{1,60}｜>",
    r"</?s>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|gMASK)\]",
    r"<</?SYS>>",
    r"</?(?:start_of_turn|end_of_turn|start_of_image|tool_call|tool_response|tools|think)>",
    r"<(?:bos|eos|pad|unk|mask|sop|eop)>",
)


class Neutral:
    """Finds and splits markers.

    Args:
        tokenizer: the training tokenizer, whose special tokens are markers too; None for the usual markers alone.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        own = sorted(_markers(tokenizer), key=len, reverse=True) if tokenizer is not None else []
        self._pattern = re.compile("|".join([*map(re.escape, own), *_KNOWN]))

    def __call__(self, text: str) -> tuple[str, int]:
        """Returns (text without markers, how many were split)."""
        found = 0
        # Splitting one can leave another whole: `<|a<|b|>`.
        while True:
            text, count = self._pattern.subn(_split, text)
            if not count:
                return text, found
            found += count


def _split(match: re.Match[str]) -> str:
    marker = match.group()
    # What has no middle can only be left out.
    return f"{marker[0]} {marker[1:]}" if len(marker) > 1 else ""


def _markers(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    # Others that are added are runs of spaces, or words; of those only what looks like a tag opens or closes something.
    tags = {str(token) for token in added if token.special or re.fullmatch(r"[<\[]\S+[>\]]", str(token))}
    return {marker for marker in tags | set(tokenizer.all_special_tokens) if marker.strip()}
