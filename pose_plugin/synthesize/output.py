"""What a run writes: training rows, and a manifest of how they were made. Neither holds a control string or a key."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.documents import file_hash
from pose_plugin.synthesize.quotes import Span
from pose_plugin.synthesize.settings import JOURNAL, MANIFEST, ROWS, SOURCES, Settings
from pose_plugin.utils.errors import PoSEError, flag
from pose_plugin.utils.files import atomic_file

# Markers of common chat templates. They are split for any training tokenizer, because the server has another one.
_KNOWN = (
    r"<\|[^|<>\n]{1,60}\|>",
    r"<｜[^｜<>\n]{1,60}｜>",
    r"</?s>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|gMASK)\]",
    r"<</?SYS>>",
    r"</?(?:start_of_turn|end_of_turn|start_of_image|tool_call|tool_response|tools|think)>",
    r"<(?:bos|eos|pad|unk|mask|sop|eop)>",
)
# Estimated tokens of a turn's markers if the tokenizer has no chat template.
TURN = 8
# Settings that change no request. They may differ from run to run of one folder.
FREE = {
    "output", "concurrency", "requests_per_minute", "tokens_per_minute", "tries", "retries", "retry_wait", "timeout",
    "answer_format", "price_input", "price_output", "budget", "check_quotes",
}  # fmt: skip


class MarkerSplitter:
    """Break up the control strings of chat templates and tokenizers.

    A document that quotes `<|im_end|>` would end its own turn once it is tokenized: what follows would be trained as
    something else, or not at all. One space inside keeps it readable and makes it ordinary characters.

    Args:
        tokenizer: the training tokenizer, whose special tokens are markers too; None for the common markers only.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        own = sorted(_markers(tokenizer), key=len, reverse=True) if tokenizer is not None else []
        self._pattern = re.compile("|".join([*map(re.escape, own), *_KNOWN]))

    def __call__(self, text: str) -> tuple[str, int]:
        """Return (text without markers, number of markers that were split)."""
        found = 0
        # Repeat, because splitting one marker can complete another: `<|a<|b|>`.
        while True:
            text, count = self._pattern.subn(_split, text)
            if not count:
                return text, found
            found += count


def _split(match: re.Match[str]) -> str:
    marker = match.group()
    # A marker of one character cannot be split, so drop it.
    return f"{marker[0]} {marker[1:]}" if len(marker) > 1 else ""


def _markers(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    # Other added tokens are runs of spaces, or words. Only those that look like a tag open or close something.
    tags = {str(token) for token in added if token.special or re.fullmatch(r"[<\[]\S+[>\]]", str(token))}
    return {marker for marker in tags | set(tokenizer.all_special_tokens) if marker.strip()}


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the places in the documents that the answer is based on."""

    question: str
    answer: str
    quotes: tuple[Span, ...] = ()


def conversation(text: str, turns: list[Turn], split_markers: MarkerSplitter) -> list[dict[str, str]]:
    """Build `messages`. The first user turn carries the document, and all questions follow in one conversation."""
    messages = []
    for number, turn in enumerate(turns):
        question = split_markers(turn.question)[0]
        asked = prompts.ROW.format(text=text, question=question) if number == 0 else question
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": split_markers(turn.answer)[0]})
    return messages


def row_counter(tokenizer: Any) -> Callable[[list[dict[str, str]]], int]:
    """Return a function that counts the tokens of a conversation as it will be trained.

    The function raises PoSEError if the chat template cannot render user and assistant turns.
    """

    def count(messages: list[dict[str, str]]) -> int:
        if tokenizer.chat_template is None:
            texts = [message["content"] for message in messages]
            return sum(len(ids) + TURN for ids in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids)
        try:
            return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        except Exception as error:  # templates raise errors of any type
            raise PoSEError(f"the chat template of --tokenizer cannot render the rows: {error}") from error

    return count


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Write JSON lines atomically."""
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            # Readers that follow Unicode would split a line at U+2028.
            file.write(json.dumps(line, ensure_ascii=False).replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
            file.write("\n")


class _Prompts(BaseModel):
    version: str


class _Rows(BaseModel):
    sha256: str


class Manifest(BaseModel):
    """The parts of `manifest.json` that a later run compares."""

    settings: dict[str, Any]
    prompts: _Prompts
    tokenizer_sha256: str | None = None
    files: dict[str, str] | None = None
    rows: _Rows | None = None  # only once a run has written them


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if there is none. Raise PoSEError if it is damaged."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise PoSEError(f"{path} is damaged ({reason}); move it away, the answers are in {JOURNAL}") from None


def require_own(folder: Path) -> None:
    """Raise PoSEError if the folder holds rows that this command did not write so, which it would overwrite."""
    before, rows = read_manifest(folder), folder / ROWS
    if before is not None and before.rows is not None and rows.exists() and file_hash(rows) != before.rows.sha256:
        raise PoSEError(
            f"{rows} was changed since this command wrote it, and would be overwritten. Move it away, or name another "
            "folder"
        )
    if before is None and not (folder / JOURNAL).exists():
        for name in (ROWS, SOURCES):
            if (folder / name).exists():
                raise PoSEError(
                    f"--output {folder} has a {name} but no {MANIFEST}: another program wrote it, and it would be "
                    "overwritten. Name another folder, or move the file away"
                )


def require_same(folder: Path, settings: Settings, tokenizer: Any) -> None:
    """Raise PoSEError if the folder was begun with settings that would silently pay for all answers again."""
    before = read_manifest(folder)
    if before is None:
        return
    differs = [
        f"{flag(name)} was {before.settings.get(name)}, now {value}"
        for name, value in described_settings(settings).items()
        if name not in FREE and before.settings.get(name) != value
    ]
    if before.prompts.version != prompts.VERSION:
        differs.append(f"the prompts had version {before.prompts.version}, now {prompts.VERSION}")
    if before.tokenizer_sha256 != tokenizer_hash(tokenizer):
        differs.append("--tokenizer has another vocabulary or chat template")
    if differs:
        raise PoSEError(
            f"--output {folder} was started with other settings: {'; '.join(differs)}. Name another folder, or add "
            "--accept-changes, which reuses the answers to unchanged requests"
        )


def require_same_files(folder: Path, files: dict[str, str]) -> None:
    """Raise PoSEError if the folder was begun with other documents: with them, tasks change for those that stayed.

    Args:
        files: path → sha256 of its bytes.
    """
    before = read_manifest(folder)
    if before is None or before.files is None or before.files == files:
        return
    old = before.files
    sorts = {
        "new": [path for path in files if path not in old],
        "gone": [path for path in old if path not in files],
        "changed": [path for path in files if path in old and old[path] != files[path]],
    }
    differs = [
        f"{sort}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
        for sort, paths in sorts.items()
        if paths
    ]
    raise PoSEError(
        f"--output {folder} was started with other documents ({'; '.join(differs)}), with which answers may be paid "
        "for again. Name another folder, or add --accept-changes, which reuses the answers to unchanged requests"
    )


def described_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings for the manifest, without those that may hold a secret: the key's name and the address."""
    return settings.model_dump(mode="json", exclude={"base_url", "key_variable"})


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the sha256 of vocabulary and chat template."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()


def plain(counter: Counter[str]) -> dict[str, int]:
    """Return the nonzero counts, sorted by name."""
    return {name: count for name, count in sorted(counter.items()) if count}
