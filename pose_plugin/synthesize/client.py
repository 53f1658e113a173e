"""Get usable answers: from earlier runs, else from the server, within rate limit, budget and number of tries."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import UnusableError
from pose_plugin.synthesize.paid import Answer, Answers, Ledger
from pose_plugin.synthesize.server import FaultError, RefusedError, Server, StopError
from pose_plugin.synthesize.settings import TRIES, Settings
from pose_plugin.utils.journal import digest
from pose_plugin.utils.server import Pace

Value = TypeVar("Value")

# After so many requests in a row without an answer, or refused requests without any success, the run stops: the
# others, perhaps thousands, would fail too.
GONE_AFTER = 8


@dataclass(frozen=True)
class Request(Generic[Value]):
    """A request for one part of a row.

    Attributes:
        item, part: the row, and the part of it.
        text: the prompt.
        form: the JSON that is wanted.
        tokens: of the prompt, as we count.
        accept: makes a value from what the model wrote; raises UnusableError.
    """

    item: str
    part: str
    text: str
    form: type[BaseModel]
    tokens: int
    accept: Callable[[str], Value]


class GivenUpError(Exception):
    """One request is left out. The text says why."""


class Client:
    """Asks for answers, many at a time. Use as `value = await client(request)`.

    Args:
        show: called after each request.

    Attributes:
        stopped: why no further request is sent, or None.
        reused: answers that the journal held.
        unusable, faults: reason → answers that could not be used, and requests without an answer.
    """

    def __init__(
        self,
        settings: Settings,
        server: Server,
        answers: Answers,
        ledger: Ledger,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._server = server
        self._answers = answers
        self._ledger = ledger
        self._show = show
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._lost_in_a_row = self._refused = 0
        self.stopped: str | None = None
        self.reused = 0
        self.unusable, self.faults = Counter[str](), Counter[str]()
        for answer in answers.all():
            ledger.add(answer.input_tokens, answer.output_tokens)

    def stop(self, reason: str) -> None:
        """Start no new request. Those in flight are waited for, because they will be billed."""
        self.stopped = self.stopped or reason
        self._server.stopped = True

    async def __call__(self, request: Request[Value]) -> Value:
        """Return the accepted value.

        Raises:
            GivenUpError: this request is left out.
            StopError: the whole run ends.
        """
        try:
            return await self._usable(request)
        except GivenUpError:
            raise
        except StopError as error:
            self.stop(str(error))
            raise
        except BaseException:
            # E.g. a full disk: no further answer could be stored, so none may be paid for.
            self.stop("an unexpected error")
            raise
        finally:
            self._show()

    async def _usable(self, request: Request[Value]) -> Value:
        settings = self._settings
        # Everything that decides an answer. The server's address does not.
        key = digest(
            {
                "model": settings.model,
                "text": request.text,
                "form": request.form.__name__,
                "answer_tokens": settings.answer_tokens,
                "temperature": settings.temperature,
                "seed": settings.seed,
            }
        )
        attempt, reason = 0, ""
        for answer in self._answers.of(key):
            attempt = max(attempt, answer.attempt)
            try:
                value = request.accept(answer.content)
            except UnusableError as error:
                reason = str(error)
            else:
                self.reused += 1
                return value
        while attempt < settings.tries:
            attempt += 1
            text = request.text + (prompts.AGAIN.format(reason=reason) if reason else "")
            async with self._slots:
                answer = await self._fetch(request, text, key, attempt)
            try:
                return request.accept(answer.content)
            except UnusableError as error:
                reason = str(error)
                if answer.finish == "length":
                    reason += f", cut off at {settings.answer_tokens} tokens (--answer-tokens)"
                self.unusable[_kind(reason)] += 1
        raise GivenUpError(f"no usable answer in {attempt} tries {TRIES}, last: {reason}")

    async def _fetch(self, request: Request[Any], text: str, key: str, attempt: int) -> Answer:
        """Get an answer from the server, and store it."""
        retries = self._settings.retries
        try:
            answer = await self._send(request, text, key, attempt)
        except FaultError as fault:
            self.faults[_kind(str(fault))] += 1
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= GONE_AFTER:
                why = f"{GONE_AFTER} requests in a row got no answer, last: {fault}; see --base-url"
                raise StopError(why) from None
            raise GivenUpError(f"no answer after up to {retries} repeats (--retries), last: {fault}") from None
        except RefusedError as error:
            self._refused += 1
            # A server that has answered before, in this run or an earlier one, may only refuse some texts.
            if self._refused >= GONE_AFTER and not self._answers.all():
                why = f"the server refuses every request ({self._refused} so far), last: {error}"
                raise StopError(why) from None
            raise GivenUpError(f"refused by the server: {error}") from None
        self._lost_in_a_row = 0
        return answer

    async def _send(self, request: Request[Any], text: str, key: str, attempt: int) -> Answer:
        settings, clock = self._settings, asyncio.get_running_loop().time
        start = clock() + self._pace.delay(clock(), request.tokens + settings.answer_tokens)
        while not self.stopped and clock() < start:
            # In short steps, so that a stop does not wait.
            await asyncio.sleep(min(0.2, start - clock()))
        if self.stopped:
            raise StopError(self.stopped)
        reserved = self._ledger.reserve(request.tokens, settings.answer_tokens)
        if reserved is None:
            raise StopError(f"the next request might exceed --budget {settings.budget:g}")
        used = (0, 0)
        try:
            # Another seed for each attempt: a server that ignores temperature would repeat its unusable answer.
            reply = await self._server.ask(text, request.form, settings.seed + attempt - 1)
            # Estimates if the server does not count: four characters per token.
            outputs = -(-len(reply.content) // 4) if reply.output_tokens is None else reply.output_tokens
            used = (request.tokens if reply.input_tokens is None else reply.input_tokens, outputs)
            answer = Answer(
                key=key, attempt=attempt, item=request.item, part=request.part, content=reply.content,
                finish=reply.finish, input_tokens=used[0], output_tokens=used[1], model=reply.model,
            )  # fmt: skip
            return self._answers.add(answer)
        finally:
            self._ledger.settle(reserved, *used, estimate=request.tokens if used[0] else 0)


def _kind(reason: str) -> str:
    """Return what the manifest counts by: the reason without details."""
    return reason.split("(")[0].split(",")[0].strip()[:100]
