"""What a run writes: rows, where they come from, and `manifest.json`: from what, with what and how they were made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.documents import tidy
from pose_plugin.synthesize.quotes import Span
from pose_plugin.synthesize.settings import JOURNAL, MANIFEST, ROWS, SOURCES, Settings, option
from pose_plugin.utils.errors import PoSEError

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


# What may differ from run to run of one folder: none of these changes a request.
FREE = {
    "output", "base_url", "key_variable", "concurrency", "requests_per_minute", "tokens_per_minute", "tries", "retries",
    "retry_wait", "timeout", "answer_format", "price_input", "price_output", "budget", "check_quotes",
}  # fmt: skip


def described_settings(settings: Settings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    values["inputs"] = [str(path) for path in settings.inputs]
    values["output"] = str(settings.output)
    # An address can hold a password; the endpoint writes its own form.
    del values["base_url"]
    return json.loads(json.dumps(values))


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 over vocabulary and chat template."""
    what = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(what).encode("utf-8")).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Raises PoSEError where the file is damaged."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["settings"], found["prompts"]["version"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PoSEError(f"{path} is damaged ({error}); move it away, answers are in {JOURNAL}") from None
    return found


def require_own(folder: Path) -> None:
    """Rows that are not of this command are not written over.

    Raises:
        PoSEError: there are some, or the manifest is damaged.
    """
    if read_manifest(folder) is None and not (folder / JOURNAL).exists():
        for name in (ROWS, SOURCES):
            if (folder / name).exists():
                raise PoSEError(
                    f"--output {folder} has a {name} from elsewhere, as there is no {MANIFEST} beside it: it would be "
                    "written over. Name another folder, or move it away"
                )


def require_same(folder: Path, settings: Settings, tokenizer: Any) -> None:
    """A folder that was begun with other settings would be paid for again, silently.

    Raises:
        PoSEError: naming what differs.
    """
    before = read_manifest(folder)
    if before is None:
        return
    now = described_settings(settings)
    differs = [
        f"{option(name)} was {before['settings'].get(name)}, now {value}"
        for name, value in now.items()
        if name not in FREE and before["settings"].get(name) != value
    ]
    if before["prompts"]["version"] != prompts.VERSION:
        differs.append(f"the prompts were of version {before['prompts']['version']}, now {prompts.VERSION}")
    if before.get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        differs.append("--tokenizer has another vocabulary or chat template")
    if differs:
        raise PoSEError(
            f"--output {folder} was begun otherwise: {'; '.join(differs)}. Name another folder, or add "
            "--accept-changes: answers to requests that stay the same are used"
        )


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """The file appears whole or not at all."""
    hidden = folder / ".manifest.json.part"
    hidden.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(hidden, folder / MANIFEST)


def plain(counter: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counter.items()) if count}
