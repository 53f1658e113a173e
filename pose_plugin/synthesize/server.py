"""One request to an OpenAI-compatible server: what it can take is learnt from its refusals, faults are told apart."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic import BaseModel

from pose_plugin.synthesize.settings import FORMATS
from pose_plugin.utils.errors import PoSEError


class FaultError(Exception):
    """No answer this time; the same request may succeed later.

    Attributes:
        wait: seconds that the server asks to wait, None if it does not say.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class NoConnectionError(FaultError):
    """There is no server at this address, or not now."""


class RefusedError(Exception):
    """The server will never take this request; others may pass."""


class StopError(Exception):
    """No request can succeed now: the key, the model or the money is missing."""


@dataclass(frozen=True)
class Reply:
    """What the server said; tokens are None where it does not count."""

    content: str
    finish: str
    input_tokens: int | None
    output_tokens: int | None
    model: str


TOO_LONG = (
    "the server takes less: lower --answer-tokens, --chunk-tokens or --request-tokens, or give it a longer context"
)
# What servers say of prompts and answers that are together longer than they take.
_LONG = re.compile(r"context|too (?:long|large|many)|max_(?:completion_)?tokens|maximum|exceed", re.I)
# Seconds until a connection stands: a machine that does not exist often says nothing at all.
CONNECT = 30.0


class Endpoint:
    """A server.

    Attributes:
        reached: whether anything came back, be it a refusal.
        answered: whether an answer did.

    Args:
        key: of the server; it stands in no file and no message.
        answer_format: "auto" begins with JSON schemas and takes what the server can; the others insist.
    """

    def __init__(self, base_url: str | None, key: str, timeout: float, answer_format: str = "auto") -> None:
        openai = _openai()
        self._key = key
        self._timeout = timeout
        # Repeats are ours: they are counted, share one pause, and know what has been paid.
        limit = openai.Timeout(timeout, connect=min(timeout, CONNECT))
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, timeout=limit, max_retries=0)
        self.answer_format = "schema" if answer_format == "auto" else answer_format
        self._may_change_format = answer_format == "auto"
        self._length_name = "max_tokens"
        self._sends_temperature = True
        self._sends_limits = True
        self._sends_seed = True
        self.answered = False
        self.reached = False

    def described(self) -> dict[str, Any]:
        """What the server was found to take, for the manifest."""
        return {
            "base_url": _without_password(str(self._client.base_url)),
            "answer_format": self.answer_format,
            "length_parameter": self._length_name,
            "temperature_sent": self._sends_temperature,
            "limits_sent": self._sends_limits,
            "seed_sent": self._sends_seed,
        }

    async def close(self) -> None:
        await self._client.close()

    async def ask(
        self, model: str, text: str, form: type[BaseModel], answer_tokens: int, temperature: float, seed: int
    ) -> Reply:
        """Sends one request, once; again only where the server refuses a parameter that can be left out.

        Raises:
            FaultError, RefusedError, StopError: see there.
        """
        while True:
            used = self._found()
            values: dict[str, Any] = {self._length_name: answer_tokens}
            if self._sends_temperature:
                values["temperature"] = temperature
            if self._sends_seed:
                values["seed"] = seed
            if self.answer_format != "text":
                values["response_format"] = _response_format(self.answer_format, form, self._sends_limits)
            try:
                messages: Any = [{"role": "user", "content": text}]
                sent = self._client.chat.completions.create(model=model, messages=messages, **values)
                # The client's own limit is on silence: a server that drips would hold us for ever.
                reply = await asyncio.wait_for(sent, self._timeout)
            except Exception as error:
                if not self._learn(error, used):
                    raise self._translated(error) from None
            else:
                self.answered = self.reached = True
                return _reply(reply)

    def _found(self) -> tuple[object, ...]:
        return self.answer_format, self._length_name, self._sends_temperature, self._sends_limits, self._sends_seed

    def _learn(self, error: Exception, used: tuple[object, ...]) -> bool:
        """Whether the request may be sent again without what the server refused."""
        if getattr(error, "status_code", None) not in (400, 422, 500, 501):
            return False
        if used != self._found():
            return True  # another request has learnt it in the meantime
        said = str(getattr(error, "message", error)).lower()
        if "max_completion_tokens" in said and self._length_name == "max_tokens":
            self._length_name = "max_completion_tokens"
        elif "temperature" in said and self._sends_temperature:
            self._sends_temperature = False
        elif re.search(r"\bseed\b", said) and self._sends_seed:
            self._sends_seed = False
        elif "maxitems" in said and self._sends_limits:
            self._sends_limits = False
        elif any(word in said for word in ("response_format", "json_schema", "json_object", "grammar", "schema")):
            if not self._may_change_format or self.answer_format == "text":
                return False
            self.answer_format = FORMATS[FORMATS.index(self.answer_format) + 1]
        else:
            return False
        return True

    def _translated(self, error: Exception) -> Exception:
        openai = _openai()
        cause = error.__cause__ or error
        # By name: which library connects differs between versions of the client.
        if isinstance(error, openai.APIConnectionError) and type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            why = self._clean(f"{type(cause).__name__}: {cause}")
            return NoConnectionError(f"no connection to {_without_password(str(self._client.base_url))} ({why})")
        if isinstance(error, (openai.APITimeoutError, asyncio.TimeoutError)):
            return FaultError(f"no answer within {self._timeout:g} s (--timeout)")
        self.reached = True
        if isinstance(error, openai.APIStatusError):
            return self._of_status(error)
        # Cut connections, and bodies that are no JSON, arrive as various types.
        if isinstance(error, (openai.APIError, ValueError, OSError)):
            return FaultError(self._clean(f"{type(cause).__name__}: {cause}"))
        return error

    def _of_status(self, error: Any) -> Exception:
        # Clients of some versions put the status into the message, too.
        body = error.body if isinstance(error.body, dict) else {}
        status, said = error.status_code, self._clean(f"{error.status_code}: {body.get('message') or error.message}")
        code = str(getattr(error, "code", None) or "")
        if status == 402 or "insufficient_quota" in (code, str(getattr(error, "type", ""))):
            return StopError(f"the server wants money first ({said})")
        if status in (408, 409, 425, 429) or status >= 500:
            return FaultError(said, retry_after(error.response.headers))
        # A 403 may be meant for one text; a key that is refused stays so, also where it was good before.
        if status == 401:
            return StopError(f"the server refuses every request ({said}); check the key")
        if status == 404 and not self.answered:
            return StopError(
                f"the server refuses every request ({said}); check --model and --base-url, which mostly ends in /v1"
            )
        if status == 403:
            return RefusedError(f"{said}; check the key, unless it is the text that is not wanted there")
        return RefusedError(f"{said}; {TOO_LONG}" if status == 413 or _LONG.search(said) else said)

    def _clean(self, text: str) -> str:
        """Some servers repeat the key that they refuse."""
        text = " ".join(text.split()).replace(self._key, "[key]") if len(self._key) > 3 else " ".join(text.split())
        return text if len(text) <= 300 else text[:300] + "…"


def _response_format(kind: str, form: type[BaseModel], limits: bool) -> dict[str, Any]:
    if kind == "object":
        return {"type": "json_object"}
    schema = form.model_json_schema()
    if not limits:
        for part in (schema, *schema.get("$defs", {}).values()):
            for value in part["properties"].values():
                value.pop("maxItems", None)
    if kind == "object-schema":
        return {"type": "json_object", "schema": schema}
    return {"type": "json_schema", "json_schema": {"name": form.__name__.lower(), "strict": True, "schema": schema}}


def _reply(reply: Any) -> Reply:
    if not hasattr(reply, "choices"):
        raise FaultError(f"the answer is no chat completion but {str(reply)[:80]!r}; does --base-url end in /v1?")
    usage = reply.usage
    choice = reply.choices[0] if reply.choices else None
    message = choice.message if choice is not None else None
    return Reply(
        content=(message.content if message is not None else None) or "",
        finish="no choices" if choice is None else str(choice.finish_reason),
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        model=str(reply.model or ""),
    )


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path.partition("?")[0]


def _openai() -> Any:
    try:
        import openai
    except ImportError:
        raise PoSEError('synthesize needs the openai client: pip install "pose-plugin[synthesize]"') from None
    return openai


def backoff(failures: int, first: float, longest: float = 60.0) -> float:
    """Seconds before the next try after so many failures: doubled each time, less up to half at random.

    Without the random part, requests that failed together would come again together.
    """
    return min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a server asks to wait, in any of the three forms in use; None if it does not say."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
            except (TypeError, ValueError):
                continue
        if seconds == seconds and seconds < float("inf"):
            return max(0.0, seconds)
    return None
