"""A run: request the answers that are missing, then write rows, sources and manifest, also after a stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from pose_plugin._version import __version__
from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.client import Client
from pose_plugin.synthesize.documents import file_hash
from pose_plugin.synthesize.estimate import Plan
from pose_plugin.synthesize.output import (
    MarkerSplitter,
    Turn,
    conversation,
    described_settings,
    plain,
    row_counter,
    tokenizer_hash,
    write_lines,
)
from pose_plugin.synthesize.paid import Answers, Ledger
from pose_plugin.synthesize.select import Collection
from pose_plugin.synthesize.server import Server, StopError
from pose_plugin.synthesize.settings import JOURNAL, MANIFEST, ROWS, SOURCES, Settings
from pose_plugin.synthesize.tasks import MODULES
from pose_plugin.synthesize.tasks.common import Item, Made
from pose_plugin.utils.clean import Cleaner, secrets_of
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import write_json
from pose_plugin.utils.log import log
from pose_plugin.utils.server import check_address


@dataclass
class Result:
    """How a run ended.

    Attributes:
        stopped: why it stopped early, or None.
        unfinished: rows that a stop left unfinished.
        sources: for each row that was written, where it comes from.
        dropped: reason → rows or questions that were left out.
        given_up: a sentence for each request that was left out.
    """

    stopped: str | None
    unfinished: int
    sources: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    given_up: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.sources)


def key_from(settings: Settings) -> str:
    """Return the server's key, which is read from the environment only, or "none".

    Raises:
        PoSEError: the key cannot be sent, or is missing and the server is not the user's own.
    """
    key = os.environ.get(settings.key_variable, "").strip()
    # A name of no variable may be the key itself, so it is not shown.
    named = settings.key_variable in (*os.environ, "OPENAI_API_KEY")
    variable = f"${settings.key_variable}" if named else "the variable that --key-variable names"
    if not key.isascii() or not key.isprintable():
        raise PoSEError(f"{variable} holds characters that no key has and that cannot be sent; export the key again")
    address = os.environ.get("OPENAI_BASE_URL")
    if settings.base_url is None and address:
        check_address("$OPENAI_BASE_URL", address)
    if not key and settings.base_url is None and not address:
        raise PoSEError(
            f"{variable} holds no key: export one, name another variable with --key-variable, or give the --base-url "
            "of a server that needs no key"
        )
    return key or "none"


def run(items: list[Item], found: Collection, settings: Settings, tokenizer: Any, progress: bool) -> Result:
    """Request every answer that the journal does not hold, then write rows, sources and manifest.

    Raises:
        PoSEError: another run writes to the same folder, or the key is missing.
    """
    key = key_from(settings)
    settings.output.mkdir(parents=True, exist_ok=True)
    clean = Cleaner(secrets_of(key, settings.base_url or os.environ.get("OPENAI_BASE_URL")))
    _require_no_word(items, clean)
    answers = Answers(settings.output / JOURNAL, clean, write=True)
    ledger = Ledger(settings.price_input, settings.price_output, settings.budget)
    head = _head(found, settings, tokenizer)
    try:
        write_json(settings.output / MANIFEST, {**head, "state": "running"})
        server = Server(settings, key, clean)
        with _bar(items, settings, ledger, progress) as show:
            client = Client(settings, server, answers, ledger, show)
            results = asyncio.run(_make_all(items, settings, client, server))
        result = _write(items, results, settings, tokenizer, client.stopped)
        tail = {**_tail(result, settings), **_paid(client, server, answers, ledger)}
        write_json(settings.output / MANIFEST, {**head, **tail})
    finally:
        answers.close()
    return result


def _require_no_word(items: list[Item], clean: Cleaner) -> None:
    """Raise PoSEError if a document holds the key: `[key]` would silently replace it in questions and answers."""
    for item in items:
        for document in item.documents:
            if clean.hides_words_of(document.text):
                raise PoSEError(
                    f"{document.source} holds the key (or the user or password of the server's address), which is "
                    "hidden in all answers. If the server needs no key, unset the variable; otherwise take it out of "
                    "the document"
                )


async def _make_all(items: list[Item], settings: Settings, client: Client, server: Server) -> list[Made | None]:
    """Make all items, some at a time. Returns what each gave, None if a stop came first."""
    results: list[Made | None] = [None] * len(items)
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for number, item in waiting:
            try:
                # After a stop too: nothing is sent then, but an item whose answers are all in the journal is a row.
                made = results[number] = await MODULES[item.task].make(item, settings, client)
            except StopError:
                continue
            except BaseException:
                # Other workers must not go on paying for answers that will not be written.
                client.stop("an unexpected error")
                raise
            for sentence in made.given_up:
                log.warning(f"left out: {item.documents[0].source}, {item.task}, {sentence}")

    try:
        with _interrupts(client):
            # Most items send one request at a time. The client limits how many are open.
            workers = [worker() for _ in range(min(len(items), settings.concurrency))]
            for outcome in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
    finally:
        await server.close()
    return results


@contextmanager
def _interrupts(client: Client) -> Iterator[None]:
    """Wait for requests in flight on the first Ctrl-C or TERM, as they will be billed. The second ends at once."""
    loop = asyncio.get_running_loop()
    handled: list[int] = []

    def restore() -> None:
        while handled:
            loop.remove_signal_handler(handled.pop())

    def once() -> None:
        client.stop("interrupted")
        # Before the message, or an interrupt that follows it at once would be lost.
        restore()
        log.warning("interrupted: waiting for requests in flight, which will be billed; interrupt again to end at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        # On Windows and outside the main thread, an interrupt ends at once, and the journal keeps what came.
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, once)
            handled.append(number)
    try:
        yield
    finally:
        restore()


def _write(
    items: list[Item], results: list[Made | None], settings: Settings, tokenizer: Any, stopped: str | None
) -> Result:
    """Write rows and sources in the order of the items, which does not depend on when answers arrived."""
    split_markers, count = MarkerSplitter(tokenizer), row_counter(tokenizer)
    result = Result(stopped, unfinished=sum(made is None for made in results))

    def rows() -> Iterator[dict[str, Any]]:
        for item, made in zip(items, results, strict=True):
            if made is None:
                continue
            result.dropped.update(made.dropped)
            result.given_up.extend(made.given_up)
            if not made.turns:
                result.dropped["rows without a question"] += 1
                continue
            messages = conversation(_row_text(item), made.turns, split_markers)
            tokens = count(messages)
            if tokens > settings.window:
                result.dropped[f"rows longer than {settings.window} tokens (--window)"] += 1
                continue
            result.sources.append(
                {
                    "row": result.rows,
                    "task": item.task,
                    "tokens": tokens,
                    "turns": len(made.turns),
                    "documents": [document.described() for document in item.documents],
                    "quotes": _quotes(item, made.turns),
                }
            )
            yield {"messages": messages}

    write_lines(settings.output / ROWS, rows())
    write_lines(settings.output / SOURCES, result.sources)
    return result


def _quotes(item: Item, turns: list[Turn]) -> list[list[dict[str, Any]]]:
    """Return, for each turn, the documents' own words, which the model may have copied inexactly."""
    texts = [document.text for document in item.documents]
    return [
        [{"document": s.text, "start": s.start, "text": texts[s.text][s.start : s.end]} for s in turn.quotes]
        for turn in turns
    ]


def _row_text(item: Item) -> str:
    """Return what the first user turn carries before its question."""
    if len(item.documents) == 1:
        return item.documents[0].text
    several = enumerate(item.documents, 1)
    return "\n\n".join(prompts.SEVERAL.format(number=n, text=document.text) for n, document in several)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _head(found: Collection, settings: Settings, tokenizer: Any) -> dict[str, Any]:
    """Return the part of the manifest that is known before the first request."""
    return {
        "pose_plugin": __version__,
        "started": _now(),
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


def _tail(result: Result, settings: Settings) -> dict[str, Any]:
    """Return the part of the manifest about the rows."""
    tasks = Counter(source["task"] for source in result.sources)
    return {
        "state": "stopped" if result.stopped else "finished",
        "stopped": result.stopped,
        "finished": _now(),
        "rows": {"file": ROWS, "sha256": file_hash(settings.output / ROWS), "count": result.rows, **plain(tasks)},
        "tokens_of_rows": sum(source["tokens"] for source in result.sources),
        "questions": sum(source["turns"] for source in result.sources),
        "left_out": plain(result.dropped),
        "unfinished": result.unfinished,
        "given_up": result.given_up[:100],
        "given_up_count": len(result.given_up),
    }


def _paid(client: Client, server: Server, answers: Answers, ledger: Ledger) -> dict[str, Any]:
    """Return the part of the manifest about requests and money."""
    return {
        "requests": {
            "asked": server.sent,
            "from_journal": client.reused,
            "repeated": server.repeated,
            "unusable": plain(client.unusable),
            "faults": plain(client.faults),
            "answers_in_journal": len(answers.all()),
        },
        "tokens": {"input": ledger.input_tokens, "output": ledger.output_tokens},
        "cost": ledger.spent,
        "models": sorted({answer.model for answer in answers.all() if answer.model}),
        "server": server.described(),
    }


@contextmanager
def _bar(items: list[Item], settings: Settings, ledger: Ledger, progress: bool) -> Iterator[Callable[[], None]]:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    # Log lines are printed above the bar, not into it.
    with (
        logging_redirect_tqdm([log]) if progress else nullcontext(),
        tqdm(total=Plan(items, settings).requests, unit="request", disable=not progress) as bar,
    ):

        def show() -> None:
            money = "" if ledger.spent is None else f", cost {ledger.spent:.4g}"
            bar.set_postfix_str(f"{ledger.input_tokens} tokens in, {ledger.output_tokens} out{money}", refresh=False)
            bar.update()

        yield show
