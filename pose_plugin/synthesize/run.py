"""A run from documents to rows: plan, ask, write. Ends in order however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from pose_plugin._version import __version__
from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.client import Asker, Ledger
from pose_plugin.synthesize.documents import file_hash
from pose_plugin.synthesize.journal import Journal
from pose_plugin.synthesize.output import (
    Neutral,
    Turn,
    conversation,
    described_settings,
    plain,
    row_counter,
    tokenizer_hash,
    write_lines,
    write_manifest,
)
from pose_plugin.synthesize.select import Collection
from pose_plugin.synthesize.server import Endpoint, StopError
from pose_plugin.synthesize.settings import JOURNAL, ROWS, SOURCES, Settings, check_address
from pose_plugin.synthesize.tasks import MODULES
from pose_plugin.synthesize.tasks.common import Item, Made
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        rows: written.
        dropped: reason → rows or questions that were made and left out.
        given_up: a sentence for each request that was left out.
        unfinished: rows that a stop left undone.
        stopped: why, or None.
    """

    rows: int
    dropped: Counter[str]
    given_up: list[str]
    unfinished: int
    stopped: str | None


def key_from(settings: Settings) -> str:
    """The server's key, from the environment alone.

    Raises:
        PoSEError: there is none, and the server is not the user's own; or none that can be sent there.
    """
    key = os.environ.get(settings.key_variable, "").strip()
    if not key.isascii() or not key.isprintable():
        raise PoSEError(f"${settings.key_variable} holds signs that no key has, and none can be sent; export it again")
    address = os.environ.get("OPENAI_BASE_URL")
    if settings.base_url is None and address:
        check_address("$OPENAI_BASE_URL", address)
    if not key and settings.base_url is None and not address:
        raise PoSEError(
            f"no key in ${settings.key_variable}: export it, name another variable with --key-variable, or give the "
            "--base-url of a server that needs none"
        )
    return key or "none"


async def ask_for(items: list[Item], settings: Settings, ask: Asker) -> list[Made | None]:
    """Makes all items, some at a time. Returns what came of each, None where a stop came first."""
    results: list[Made | None] = [None] * len(items)
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for number, item in waiting:
            try:
                # After a stop too: what the journal holds whole is a row, and nothing is sent.
                results[number] = await MODULES[item.task].make(item, settings, ask)
            except StopError:
                continue
            except BaseException:
                # A fault of ours: the others must not go on paying for what will not be written.
                ask.stop("an unexpected error")
                raise
            for sentence in results[number].given_up:  # type: ignore[union-attr]
                log.warning(f"left out: {item.documents[0].source}, {item.task}, {sentence}")

    async with _Interrupts(ask):
        # Most items ask for one thing at a time; the asker holds the limit on requests.
        workers = [worker() for _ in range(min(len(items), settings.concurrency))]
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
    return results


class _Interrupts:
    """The first Ctrl-C or TERM lets requests on their way finish, as they will be paid; the second ends at once."""

    def __init__(self, ask: Asker) -> None:
        self._ask = ask

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._loop.add_signal_handler(number, self._once, number)
                self._set.append(number)
            except (NotImplementedError, ValueError, RuntimeError):
                pass  # Windows, or not the main thread: an interrupt ends at once, and the journal keeps what came

    async def __aexit__(self, *_: object) -> None:
        for number in self._set:
            self._loop.remove_signal_handler(number)

    def _once(self, number: int) -> None:
        log.warning("interrupted: requests on their way are waited for, as they will be paid; once more ends at once")
        self._ask.stop("interrupted")
        for each in self._set:
            self._loop.remove_signal_handler(each)
        self._set = []


def run(items: list[Item], found: Collection, settings: Settings, tokenizer: Any, progress: bool) -> Result:
    """Asks for everything that the journal does not hold, then writes rows, sources and manifest.

    Raises:
        PoSEError: another run writes to the same folder, or the key is missing.
    """
    key = key_from(settings)
    folder = settings.output
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL)
    ledger = Ledger(settings.price_input, settings.price_output, settings.budget)
    head = _head(found, settings, tokenizer)
    try:
        write_manifest(folder, {**head, "state": "running"})
        with _bar(items, settings, ledger, progress) as show:
            results, ask, server = asyncio.run(_ask_all(items, settings, key, journal, ledger, show))
        result, rows = _write(items, results, settings, tokenizer, ask.stopped)
        models = sorted({entry.model for entry in journal.all() if entry.model})
        write_manifest(
            folder, {**head, **_tail(result, rows, ask, ledger, journal, settings), "models": models, **server}
        )
    finally:
        journal.close()
    return result


async def _ask_all(
    items: list[Item], settings: Settings, key: str, journal: Journal, ledger: Ledger, show: Callable[[], None]
) -> tuple[list[Made | None], Asker, dict[str, Any]]:
    endpoint = Endpoint(settings.base_url, key, settings.timeout, settings.answer_format)
    ask = Asker(settings, endpoint, journal, ledger, show)
    try:
        return await ask_for(items, settings, ask), ask, {"server": endpoint.described()}
    finally:
        await endpoint.close()


def _write(
    items: list[Item], results: list[Made | None], settings: Settings, tokenizer: Any, stopped: str | None
) -> tuple[Result, dict[str, Any]]:
    """Rows in the order of the items, whatever order the answers came in."""
    neutral, count = Neutral(tokenizer), row_counter(tokenizer)
    dropped: Counter[str] = Counter()
    given_up: list[str] = []
    sources: list[dict[str, Any]] = []

    def rows() -> Iterator[dict[str, Any]]:
        for item, made in zip(items, results, strict=True):
            if made is None:
                continue
            dropped.update(made.dropped)
            given_up.extend(made.given_up)
            if not made.turns:
                dropped["rows without a question"] += 1
                continue
            messages = conversation(row_text(item), made.turns, neutral)
            tokens = count(messages)
            if tokens > settings.window:
                dropped[f"rows longer than {settings.window} tokens (--window)"] += 1
                continue
            documents = [document.described() for document in item.documents]
            sources.append(
                {
                    "row": len(sources),
                    "task": item.task,
                    "tokens": tokens,
                    "turns": len(made.turns),
                    "documents": documents,
                    "quotes": _quotes(item, made.turns),
                }
            )
            yield {"messages": messages}

    write_lines(settings.output / ROWS, rows())
    write_lines(settings.output / SOURCES, sources)
    tasks = Counter(source["task"] for source in sources)
    unfinished = sum(made is None for made in results)
    summary = {
        "rows": {"file": ROWS, "sha256": file_hash(settings.output / ROWS), "count": len(sources), **plain(tasks)},
        "tokens_of_rows": sum(source["tokens"] for source in sources),
        "questions": sum(source["turns"] for source in sources),
    }
    return Result(len(sources), dropped, given_up, unfinished, stopped), summary


def _quotes(item: Item, turns: list[Turn]) -> list[list[dict[str, Any]]]:
    """For each turn the documents' own words, whatever the model made of them."""
    texts = [document.text for document in item.documents]
    return [
        [{"document": s.text, "start": s.start, "text": texts[s.text][s.start : s.end]} for s in turn.quotes]
        for turn in turns
    ]


def row_text(item: Item) -> str:
    """What the first user turn carries before its question."""
    if len(item.documents) == 1:
        return item.documents[0].text
    several = enumerate(item.documents, 1)
    return "\n\n".join(prompts.SEVERAL.format(number=n, text=document.text) for n, document in several)


def _head(found: Collection, settings: Settings, tokenizer: Any) -> dict[str, Any]:
    return {
        "pose_plugin": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "prompts": {"version": prompts.VERSION, "sha256": prompts.fingerprint()},
        "settings": described_settings(settings),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "files": found.files,
        "documents": {
            "read": found.documents,
            "long": len(found.long),
            "short": len(found.short),
            "left_out": plain(found.dropped),
            "markers_split": found.markers,
        },
    }


def _tail(
    result: Result, rows: dict[str, Any], ask: Asker, ledger: Ledger, journal: Journal, settings: Settings
) -> dict[str, Any]:
    counts = ask.counts
    return {
        "state": "stopped" if result.stopped else "finished",
        "stopped": result.stopped,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **rows,
        "left_out": plain(result.dropped),
        "unfinished": result.unfinished,
        "given_up": result.given_up[:100],
        "given_up_count": len(result.given_up),
        "requests": {
            "asked": counts.asked,
            "from_journal": counts.reused,
            "repeated": counts.repeated,
            "unusable": plain(counts.unusable),
            "faults": plain(counts.faults),
            "answers_in_journal": len(journal.all()),
        },
        "tokens": {"input": ledger.input_tokens, "output": ledger.output_tokens},
        "cost": ledger.spent,
    }


@contextmanager
def _bar(items: list[Item], settings: Settings, ledger: Ledger, progress: bool) -> Iterator[Callable[[], None]]:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from pose_plugin.synthesize.estimate import Plan

    # Messages stand above the bar, not in it.
    with (
        logging_redirect_tqdm([log]) if progress else nullcontext(),
        tqdm(total=Plan(items, settings).requests, unit="request", disable=not progress) as bar,
    ):

        def show() -> None:
            money = "" if ledger.spent is None else f", cost {ledger.spent:.4g}"
            bar.set_postfix_str(f"{ledger.input_tokens} tokens in, {ledger.output_tokens} out{money}", refresh=False)
            bar.update()

        yield show
