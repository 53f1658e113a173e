"""From turns to rows of the training file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.documents import tidy
from pose_plugin.synthesize.neutral import Neutral
from pose_plugin.synthesize.quotes import Span
from pose_plugin.utils.errors import PoSEError

# Without a chat template a turn's markers are estimated at so many tokens.
TURN = 8


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and where in the documents the quotes stand that the answer rests on."""

    question: str
    answer: str
    quotes: tuple[Span, ...] = ()


def conversation(text: str, turns: list[Turn], neutral: Neutral) -> list[dict[str, str]]:
    """`messages`: the document stands in the first user turn, once, however many questions follow."""
    messages = []
    for number, turn in enumerate(turns):
        question = neutral(tidy(turn.question))[0]
        asked = prompts.ROW.format(text=text, question=question) if number == 0 else question
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": neutral(tidy(turn.answer))[0]})
    return messages


def row_counter(tokenizer: Any) -> Callable[[list[dict[str, str]]], int]:
    """Returns a function that counts the tokens of a conversation as it will be trained.

    Raises:
        PoSEError: from that function: the tokenizer's chat template cannot lay out user and assistant turns.
    """

    def count(messages: list[dict[str, str]]) -> int:
        if tokenizer.chat_template is None:
            texts = [message["content"] for message in messages]
            return sum(len(ids) + TURN for ids in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids)
        try:
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        except Exception as error:
            raise PoSEError(f"the chat template of --tokenizer cannot lay out the rows: {error}") from error
        return len(ids)

    return count


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Writes JSON lines; the file appears whole or not at all."""
    hidden = path.with_name(f".{path.name}.part")
    with hidden.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            # U+2028 in a text splits lines for readers that follow Unicode.
            file.write(json.dumps(line, ensure_ascii=False).replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
            file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(hidden, path)
