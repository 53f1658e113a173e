"""Requests to an OpenAI-compatible server: the parameters that it accepts, its errors and its answers."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel

from pose_plugin.synthesize.settings import FORMATS, Settings
from pose_plugin.utils.clean import Cleaner, without_password
from pose_plugin.utils.errors import module_of_extra
from pose_plugin.utils.server import CONNECT, TOO_LONG, at, count, words_of

# What to do about a prompt and an answer that are longer than the server's context.
SHORTER = "lower --answer-tokens, --chunk-tokens or --request-tokens, or give the server a longer context"
# Letters of the longest tokens of usual vocabularies: 128 spaces, or as many dashes.
_LONGEST_TOKEN = 128


class FaultError(Exception):
    """A request got no answer, although it was repeated."""


class RefusedError(Exception):
    """The server will never accept this request, but it may accept others."""


class StopError(Exception):
    """No request can succeed: the key, the model, the server or the money is missing."""


@dataclass(frozen=True)
class Reply:
    """An answer as the server wrote it. Tokens are None if the server does not count them."""

    content: str
    finish: str
    input_tokens: int | None
    output_tokens: int | None
    model: str


@dataclass(frozen=True)
class Dialect:
    """The parameters that a server accepts, as learned from what it refuses. The manifest records them."""

    answer_format: str
    length_parameter: str = "max_tokens"
    temperature_sent: bool = True
    limits_sent: bool = True
    seed_sent: bool = True

    def without(self, refusal: str, may_change_format: bool) -> Dialect | None:
        """Return the dialect without the parameter that a refusal names, None if it names none that is sent."""
        refusal = refusal.lower()
        if "max_completion_tokens" in refusal and self.length_parameter == "max_tokens":
            return replace(self, length_parameter="max_completion_tokens")
        if "temperature" in refusal and self.temperature_sent:
            return replace(self, temperature_sent=False)
        if re.search(r"\bseed\b", refusal) and self.seed_sent:
            return replace(self, seed_sent=False)
        if "maxitems" in refusal and self.limits_sent:
            return replace(self, limits_sent=False)
        if (
            may_change_format
            and self.answer_format != "text"
            and re.search(r"response_format|json_|grammar|schema", refusal)
        ):
            return replace(self, answer_format=FORMATS[FORMATS.index(self.answer_format) + 1])
        return None

    def parameters(self, form: type[BaseModel], answer_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """Return the parameters of a request, besides model and messages."""
        values: dict[str, Any] = {self.length_parameter: answer_tokens}
        if self.temperature_sent:
            values["temperature"] = temperature
        if self.seed_sent:
            values["seed"] = seed
        if self.answer_format != "text":
            values["response_format"] = self._response_format(form)
        return values

    def _response_format(self, form: type[BaseModel]) -> dict[str, Any]:
        if self.answer_format == "object":
            return {"type": "json_object"}
        schema = form.model_json_schema()
        if not self.limits_sent:
            for part in (schema, *schema.get("$defs", {}).values()):
                for value in part["properties"].values():
                    value.pop("maxItems", None)
        if self.answer_format == "object-schema":
            return {"type": "json_object", "schema": schema}
        return {"type": "json_schema", "json_schema": {"name": form.__name__.lower(), "strict": True, "schema": schema}}


class Server:
    """A server and what is known of it. The openai client repeats what gets no answer.

    Attributes:
        dialect: the parameters that it accepts.
        sent, repeated: requests, and those of them that the openai client repeated.
        stopped: set it to let no request be repeated.

    Args:
        key: the server's key, "none" if it needs none.
        clean: the door for what the server sends.
    """

    def __init__(self, settings: Settings, key: str, clean: Cleaner) -> None:
        self._openai = openai = module_of_extra("openai", "synthesize needs the openai client", "synthesize")
        self._settings, self._clean = settings, clean
        # Silence ends a request after --timeout seconds, and the client repeats it.
        limit = openai.Timeout(settings.timeout, connect=min(settings.timeout, CONNECT))
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url, api_key=key, timeout=limit, max_retries=settings.retries,
            http_client=self._http_client(),
        )  # fmt: skip
        self.address = without_password(str(self._client.base_url))
        self.dialect = Dialect("schema" if settings.answer_format == "auto" else settings.answer_format)
        self.sent = self.repeated = 0
        self.stopped = self._reached = self._answered = False

    def _http_client(self) -> Any:
        server, settings = self, self._settings

        class Attempts(self._openai.DefaultAsyncHttpxClient):  # type: ignore[name-defined]
            """Sees each attempt, with those that the openai client makes by itself."""

            async def send(self, request: Any, **options: Any) -> Any:
                if request.headers.get("x-stainless-retry-count", "0") != "0":
                    await asyncio.sleep(settings.retry_wait)
                    if server.stopped:
                        raise FaultError("the run was stopped before it was repeated")
                    server.repeated += 1
                server.sent += 1
                # The client retries after errors of its HTTP library only, and its versions use different ones.
                library = sys.modules[type(request).__module__.partition(".")[0]]
                try:
                    # Their timeouts limit silence. A server that sends single bytes would hold a request forever.
                    response = await asyncio.wait_for(super().send(request, **options), 2 * settings.timeout)
                except asyncio.TimeoutError:
                    raise library.ReadTimeout("too slow", request=request) from None
                server._reached = True
                if response.is_success and _completion(response.content) is None:
                    raise library.RemoteProtocolError(server._spoilt(response.content), request=request)
                return response

        # A redirect would carry the documents, and with some statuses the key, to an address that nobody has given.
        return Attempts(follow_redirects=False)

    def described(self) -> dict[str, Any]:
        """Return what the manifest records of the server."""
        return {"base_url": self.address, **asdict(self.dialect)}

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, text: str, form: type[BaseModel], seed: int) -> Reply:
        """Send one request. Send it again without a parameter that the server refuses.

        Raises:
            FaultError, RefusedError, StopError
        """
        settings = self._settings
        while True:
            dialect = self.dialect
            parameters = dialect.parameters(form, settings.answer_tokens, settings.temperature, seed)
            messages = [{"role": "user", "content": text}]
            try:
                raw = await self._client.chat.completions.with_raw_response.create(
                    model=settings.model, messages=messages, **parameters
                )
            except Exception as error:
                if not self._adapt(error, dialect):
                    raise self._translated(error) from None
            else:
                self._answered = True
                return _reply(_completion(raw.content) or {}, settings.answer_tokens)

    def _adapt(self, error: Exception, used: Dialect) -> bool:
        """Learn from a refusal. Return whether the request may be sent again."""
        if getattr(error, "status_code", None) not in (400, 422, 500, 501):
            return False
        if used == self.dialect:
            learned = used.without(str(getattr(error, "message", "")), self._settings.answer_format == "auto")
            if learned is None:
                return False
            self.dialect = learned
        return True  # this request learned it, or another one meanwhile

    def _spoilt(self, body: bytes) -> str:
        start = self._clean.line(body[:400].decode("utf-8", "replace"), 80)
        return f"the answer is not a chat completion but {start!r}; --base-url mostly ends in /v1"

    def _translated(self, error: Exception) -> Exception:
        openai, settings = self._openai, self._settings
        if isinstance(error, openai.APIStatusError):
            return self._of_status(error)
        cause = error.__cause__ or error
        why = self._clean.line(f"{type(cause).__name__}: {cause}")
        if type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            missing = f"no connection to {self.address} ({why})"
            if self._reached:
                return FaultError(missing)
            tries = settings.retries + 1
            return StopError(f"{missing} in {tries} tries (--retries); start the server there, or correct --base-url")
        if isinstance(error, openai.APITimeoutError):
            return FaultError(f"no answer within {settings.timeout:g} s (--timeout)")
        return FaultError(why) if isinstance(error, openai.APIError) else error

    def _of_status(self, error: Any) -> Exception:
        status, body = error.status_code, error.body if isinstance(error.body, dict) else {}
        said = self._clean.line(f"{status}: {body.get('message') or error.message}")
        if 300 <= status < 400:
            to = self._clean.line(without_password(error.response.headers.get("location", "nowhere")))
            return StopError(
                f"the server redirects ({status}) to {to}; documents are sent to --base-url only, so give it that "
                "address if you trust it"
            )
        if status == 402 or "insufficient_quota" in (error.code, error.type):
            return StopError(f"the server requires payment ({said})")
        if status == 401:
            return StopError(f"the server refuses every request ({said}); check the key")
        if status == 404 and not self._answered:
            return StopError(
                f"the server refuses every request ({said}); check --model and --base-url, which mostly ends in /v1"
            )
        if status in (408, 409, 429) or status >= 500:
            wait = error.response.headers.get("retry-after")
            return FaultError(said if wait is None else f"{said}; it asks to wait {self._clean.line(wait, 40)} s")
        if status == 403:
            # It may refuse this text only, so the run goes on.
            return RefusedError(f"{said}; check the key, or whether the server rejects this text")
        return RefusedError(f"{said}; {SHORTER}" if status == 413 or TOO_LONG.search(said) else said)


def _completion(body: bytes) -> dict[str, Any] | None:
    """Return the chat completion that a body holds, None if it holds something else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("choices") else None


def _reply(found: dict[str, Any], answer_tokens: int) -> Reply:
    """Read a chat completion. Fields of another type count as missing: the answer was paid for all the same.

    Args:
        answer_tokens: the most that were requested. More letters than they can hold are left out: looking up endless
            quotes would take minutes.
    """
    return Reply(
        content=words_of(at(found, "choices", 0, "message", "content"))[: _LONGEST_TOKEN * answer_tokens],
        finish=str(at(found, "choices", 0, "finish_reason")),
        # A negative count would lift the budget.
        input_tokens=count(at(found, "usage", "prompt_tokens")),
        output_tokens=count(at(found, "usage", "completion_tokens")),
        model=str(found.get("model") or ""),
    )
