"""`manifest.json`: from what, with what and how the rows were made. It holds no key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.settings import Settings, option
from pose_plugin.utils.errors import PoSEError

ROWS, SOURCES, JOURNAL, MANIFEST = "train.jsonl", "sources.jsonl", "journal.jsonl", "manifest.json"

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
