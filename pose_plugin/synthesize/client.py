"""Asks until there is a usable answer: from the journal first, then the server, within rate, budget and patience."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import UnusableError
from pose_plugin.synthesize.journal import Entry, Journal, request_key
from pose_plugin.synthesize.server import (
    Endpoint,
    FaultError,
    NoConnectionError,
    RefusedError,
    Reply,
    StopError,
    backoff,
)
from pose_plugin.synthesize.settings import Settings
from pose_plugin.utils.log import log

Value = TypeVar("Value")

# So many requests in a row without any answer: the server is gone, and the rest would only wait for nothing.
GONE_AFTER = 8
LONGEST_WAIT = 900.0
WAY_OUT = "start the server there, or correct --base-url"


@dataclass(frozen=True)
class Request(Generic[Value]):
    """What is asked.

    Attributes:
        item, part: what of the data it is for.
        text: the prompt.
        form: the JSON that is wanted.
        tokens: of the prompt, as we count.
        accept: makes a value of what the model wrote; raises UnusableError.
    """

    item: str
    part: str
    text: str
    form: type[BaseModel]
    tokens: int
    accept: Callable[[str], Value]


class GivenUpError(Exception):
    """One request is left out; the text says why."""


@dataclass
class Counts:
    """What happened in this run."""

    asked: int = 0
    reused: int = 0
    repeated: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class Asker:
    """The one way to the server.

    Args:
        show: called after each request that is done with.
    """

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        journal: Journal,
        ledger: Ledger,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._journal = journal
        self._ledger = ledger
        self._show = show
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute)
        self._turns = asyncio.Semaphore(settings.concurrency)
        self._lost_in_a_row = self._refused = 0
        self._warned = False
        self.stopped: str | None = None
        self.counts = Counts()
        for entry in journal.all():
            ledger.add(entry.input_tokens, entry.output_tokens)

    def stop(self, reason: str) -> None:
        """No new request starts; those on their way are waited for, as they will be paid."""
        self.stopped = self.stopped or reason

    async def __call__(self, request: Request[Value]) -> Value:
        """Raises:
        GivenUpError: this request is left out.
        StopError: the whole run ends.
        """
        try:
            return await self._answer(request)
        except StopError as error:
            self.stop(str(error))
            raise
        finally:
            self._show()

    async def _answer(self, request: Request[Value]) -> Value:
        key = request_key(self._identity(request))
        attempt, reason = 0, ""
        for entry in self._journal.answers(key):
            attempt = max(attempt, entry.attempt)
            try:
                value = request.accept(entry.content)
            except UnusableError as error:
                reason = str(error)
            else:
                self.counts.reused += 1
                return value
        while attempt < self._settings.tries:
            attempt += 1
            text = request.text + (prompts.AGAIN.format(reason=reason) if reason else "")
            async with self._turns:
                entry = await self._fetch(request, text, key, attempt)
            try:
                return request.accept(entry.content)
            except UnusableError as error:
                reason = str(error)
                if entry.finish == "length":
                    reason += f", cut off at {self._settings.answer_tokens} tokens (--answer-tokens)"
                self.counts.unusable[_kind(reason)] += 1
        raise GivenUpError(f"no usable answer in {attempt} tries (--tries), last: {reason}")

    def _identity(self, request: Request[Any]) -> dict[str, Any]:
        settings = self._settings
        return {
            "model": settings.model,
            "text": request.text,
            "form": request.form.__name__,
            "answer_tokens": settings.answer_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
        }

    async def _fetch(self, request: Request[Any], text: str, key: str, attempt: int) -> Entry:
        failures = 0
        while True:
            reply_or_fault = await self._once(request, text, key, attempt)
            if isinstance(reply_or_fault, Entry):
                self._lost_in_a_row = 0
                return reply_or_fault
            fault = reply_or_fault
            failures += 1
            self.counts.faults[_kind(str(fault))] += 1
            wait = fault.wait if fault.wait is not None else backoff(failures, self._settings.retry_wait)
            if wait > LONGEST_WAIT:
                raise StopError(f"the server asks to wait {wait:.0f} s ({fault}); run the same command again then")
            never_there = isinstance(fault, NoConnectionError) and not self._endpoint.reached
            if failures > self._settings.retries:
                if never_there:
                    raise StopError(f"{fault} in {failures} tries (--retries); {WAY_OUT}")
                self._lost_in_a_row += 1
                if self._lost_in_a_row >= GONE_AFTER:
                    raise StopError(f"{GONE_AFTER} requests in a row got no answer, last: {fault}; see --base-url")
                raise GivenUpError(f"no answer in {failures} tries (--retries), last: {fault}")
            if never_there and not self._warned:
                self._warned = True
                log.warning(f"{fault}; trying again, up to {self._settings.retries} times (--retries); {WAY_OUT}")
            self.counts.repeated += 1
            if fault.wait is not None:
                self._pace.pause(asyncio.get_running_loop().time() + wait)
            else:
                await self._sleep(wait)

    async def _once(self, request: Request[Any], text: str, key: str, attempt: int) -> Entry | FaultError:
        settings, clock = self._settings, asyncio.get_running_loop().time
        await self._sleep(self._pace.delay(clock(), request.tokens + settings.answer_tokens))
        if self.stopped:
            raise StopError(self.stopped)
        reservation = self._ledger.reserve(request.tokens, settings.answer_tokens)
        if reservation is None:
            raise StopError(f"the next request might exceed --budget {settings.budget:g}")
        self.counts.asked += 1
        used = (0, 0)
        try:
            reply = await self._endpoint.ask(
                settings.model, text, request.form, settings.answer_tokens, settings.temperature,
                # Or a server with a seed and no temperature would repeat its unusable answer.
                settings.seed + attempt - 1,
            )  # fmt: skip
            used = _used(reply, request.tokens)
            entry = Entry(key, attempt, request.item, request.part, reply.content, reply.finish, *used, reply.model)
            self._journal.add(entry)
            return entry
        except FaultError as fault:
            return fault
        except RefusedError as error:
            self._refused += 1
            # It never took one, now or in an earlier run: the rest would be refused as well, thousands of them.
            if self._refused >= GONE_AFTER and not self._journal.all():
                raise StopError(f"the server refuses every request ({self._refused} so far), last: {error}") from None
            raise GivenUpError(f"refused by the server: {error}") from None
        finally:
            self._ledger.settle(reservation, *used, estimate=request.tokens if used[0] else 0)

    async def _sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, so that a stop is not waited for."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not self.stopped and clock() < end:
            await asyncio.sleep(min(0.2, end - clock()))


def _used(reply: Reply, estimate: int) -> tuple[int, int]:
    """Tokens as billed, or as we estimate: four characters of an answer a token."""
    inputs = estimate if reply.input_tokens is None else reply.input_tokens
    outputs = -(-len(reply.content) // 4) if reply.output_tokens is None else reply.output_tokens
    return inputs, outputs


def _kind(reason: str) -> str:
    """What the manifest counts by: the reason up to its details."""
    return reason.split("(")[0].split(",")[0].strip()[:100]


@dataclass
class Ledger:
    """Counts of one output folder, over all its runs.

    Prices are per million tokens. What a request will cost is not known before it is answered, as the server counts
    with its own tokenizer: it is reserved at `margin` times our count of the input, with the longest answer allowed.
    """

    price_input: float | None = None
    price_output: float | None = None
    budget: float | None = None
    margin: float = 1.25
    input_tokens: int = 0
    output_tokens: int = 0
    _reserved: dict[int, float] = field(default_factory=dict)
    _next: int = 0

    def cost(self, input_tokens: float, output_tokens: float) -> float | None:
        if self.price_input is None or self.price_output is None:
            return None
        return (input_tokens * self.price_input + output_tokens * self.price_output) / 1e6

    @property
    def spent(self) -> float | None:
        return self.cost(self.input_tokens, self.output_tokens)

    def reserve(self, input_tokens: int, output_tokens: int) -> int | None:
        """Returns a number for `settle`, or None if the budget might not hold."""
        price = self.cost(input_tokens * self.margin, output_tokens) or 0.0
        if self.budget is not None and (self.spent or 0.0) + sum(self._reserved.values()) + price > self.budget:
            return None
        self._next += 1
        self._reserved[self._next] = price
        return self._next

    def settle(self, number: int, input_tokens: int = 0, output_tokens: int = 0, estimate: int = 0) -> None:
        """Ends a reservation with what was really used.

        Args:
            estimate: our count of the input, from which the margin learns where the server counts more.
        """
        self._reserved.pop(number, None)
        self.add(input_tokens, output_tokens)
        if estimate > 0:
            self.margin = max(self.margin, input_tokens / estimate)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


class Pace:
    """Spaces requests evenly under a limit of requests and of tokens a minute; 0 is no limit.

    A burst at the start of a minute would be refused by servers that count by the second.
    """

    def __init__(self, requests_per_minute: float = 0, tokens_per_minute: float = 0) -> None:
        self._seconds_a_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._seconds_a_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._free = 0.0

    def delay(self, now: float, tokens: int) -> float:
        """Books the next place. Returns the seconds until then.

        Args:
            now: of any clock that only goes forward.
            tokens: of the request and its longest answer.
        """
        start = max(now, self._free)
        self._free = start + max(self._seconds_a_request, tokens * self._seconds_a_token)
        return start - now

    def pause(self, until: float) -> None:
        """Nothing starts before `until`: a server that is asked too often means all requests."""
        self._free = max(self._free, until)
