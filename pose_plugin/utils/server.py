"""A client of OpenAI-compatible servers: which models they serve, completions of prompts, and their errors in words."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import HttpUrl, TypeAdapter, ValidationError

from pose_plugin.utils.clean import Cleaner, secrets_of, without_controls, without_password
from pose_plugin.utils.errors import PoSEError

# Seconds to connect. A machine that does not exist often does not refuse the connection either.
CONNECT = 30.0
# Where vLLM, SGLang and gateways state a model's window.
WINDOWS = ("max_model_len", "context_length", "max_context_length", "context_window")
# More tokens than any request has.
MOST_TOKENS = 10**9
# What servers say of a prompt and an answer that are longer than their context.
TOO_LONG = re.compile(r"context|too (?:long|large|many)|max_(?:completion_)?tokens|maximum|exceed", re.I)


class ServerError(PoSEError):
    """A request failed.

    Attributes:
        status: of the HTTP answer; None if there was none.
        said: what the server wrote, in one line without the key.
    """

    def __init__(self, message: str, status: int | None = None, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said


class ServerGoneError(ServerError):
    """No further request can succeed: the server, the key or the money is missing."""


class FailedError(ServerGoneError):
    """The server fails at a request, however often it is repeated."""


class RefusedError(ServerError):
    """The server will never accept this request, but it may accept others."""


class TooLongError(RefusedError):
    """A prompt with its answer is longer than the server's context."""


@dataclass(frozen=True)
class Reply:
    """An answer of a server.

    Attributes:
        text: what the model wrote.
        read: tokens of the prompt as the server counts them; None if it does not count.
        thoughts: what a reasoning model wrote before, if the server tells them apart.
    """

    text: str
    read: int | None
    thoughts: str = ""


class Server:
    """An OpenAI-compatible server and one of its models. It may be used by several threads.

    Args:
        url: up to and with /v1.
        model: its name on the server; default: the only one.
        key: the API key, if the server needs one.
        timeout: seconds of silence after which a request is repeated.
        retries: how often the openai client repeats a request that gets no answer.
        option: how the user names the model, for messages.

    Attributes:
        slow: what an error says of an answer that took too long; {} are the seconds.
        address: the URL without a password.
        model: the model's name on the server.
        window: the longest prompt with its answer, in tokens; None if the server does not state it.
        facts: what else the list of models states of this one.
        client: of the openai package, for requests that this class has no method for.

    Raises:
        PoSEError: the package openai is missing, the server does not answer, or it does not have the model.
    """

    slow = "no answer within {:g} seconds; use shorter --lengths"

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 600,
        retries: int = 2,
        option: str = "--model",
    ) -> None:
        try:
            import openai
        except ImportError:
            raise PoSEError(f"--url {without_password(url)} needs the package openai; pip install openai") from None
        check_address("--url", url)
        self._openai: Any = openai
        self._clean = Cleaner(secrets_of(key or "", url))
        self.address, self._timeout, self._option = without_password(url), timeout, option
        self.client = openai.OpenAI(
            base_url=url,
            # The client would otherwise send what OPENAI_API_KEY holds to any server.
            api_key=key or "none",
            timeout=openai.Timeout(timeout, connect=min(timeout, CONNECT)),
            max_retries=retries,
            # A redirect would carry prompts and key to an address that the user has not given.
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )
        self.model = model or ""
        self.model, self.facts = self._model(model)
        # llama.cpp states it one level deeper.
        stated = [*map(self.facts.get, WINDOWS), at(self.facts, "meta", "n_ctx")]
        self.window = next((found for each in stated if (found := count(each))), None)

    def _model(self, wanted: str | None) -> tuple[str, dict[str, Any]]:
        """Return the model's name, and what the server states of it."""
        facts = self._models()
        if wanted is None and len(facts) != 1:
            listed = ", ".join(facts) or "no model"
            raise PoSEError(f"--url {self.address} lists {listed}; choose one with {self._option}")
        if wanted is not None and wanted not in facts:
            # `transformers serve` loads any folder, and lists only what is in the cache of the hub.
            if not facts or Path(wanted).is_dir():
                return wanted, {}
            raise PoSEError(f"{self._option} {wanted}: the server at {self.address} has {', '.join(facts)}")
        name = wanted or next(iter(facts))
        return name, facts[name]

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return what the server states of each model; {} if it cannot list them, which some servers cannot."""
        try:
            listed = at(self._sent(self.client.get, path="/models", cast_to=object), "data")
        except (RefusedError, FailedError):
            return {}
        models = listed if isinstance(listed, list) else []
        named = {name: facts for facts in models if isinstance(name := at(facts, "id"), str)}
        # Names are shown and written to files, so one that repeats the key is left out.
        return {name: facts for name, facts in named.items() if self._clean.text(name) == without_controls(name)}

    def complete(
        self, prompt: str | list[int], tokens: int, stop: list[str] | None = None, more: dict[str, Any] | None = None
    ) -> Reply:
        """Continue a prompt greedily, by POST /completions.

        Args:
            prompt: a text or its token ids.
            tokens: the most that are written.
            stop: texts that end the answer.
            more: fields of the request that OpenAI's API does not have.

        Raises:
            TooLongError, RefusedError, ServerGoneError
        """
        return self._written(self.client.completions.create, tokens, stop, more, prompt=prompt)

    def chat(self, text: str, tokens: int, stop: list[str] | None = None, more: dict[str, Any] | None = None) -> Reply:
        """Answer a message greedily, by POST /chat/completions; arguments and errors as for `complete`."""
        messages = [{"role": "user", "content": text}]
        return self._written(self.client.chat.completions.create, tokens, stop, more, messages=messages)

    def _written(self, call: Any, tokens: int, stop: Any, more: Any, **given: Any) -> Reply:
        ends = {"stop": stop} if stop else {}
        answer = self._sent(call, model=self.model, max_tokens=tokens, temperature=0, extra_body=more, **ends, **given)
        found = as_json(answer)
        choice = at(found, "choices", 0)
        if choice is None:
            raise self._no_completion(answer)
        text = words_of(at(choice, "text") or at(choice, "message", "content"))
        # vLLM's name for them now, and that of others.
        thoughts = at(choice, "message", "reasoning") or at(choice, "message", "reasoning_content")
        return Reply(text, count(at(found, "usage", "prompt_tokens")), words_of(thoughts))

    def _no_completion(self, answer: Any) -> ServerGoneError:
        start = self._clean.line(str(answer), 80)
        return ServerGoneError(
            f"--url {self.address}: the answer is not a completion but {start!r}; a URL mostly ends in /v1"
        )

    def _sent(self, call: Any, **parameters: Any) -> Any:
        try:
            return call(**parameters)
        except self._openai.APIStatusError as error:
            raise self._of_status(error) from None
        except self._openai.APIError as error:
            # A lost connection, a timeout, or a body that is not JSON.
            cause = error.__cause__ or error
            name = type(cause).__name__
            why = self._clean.line(f"{name}: {cause}")
            if isinstance(error, self._openai.APITimeoutError) and name != "ConnectTimeout":
                raise ServerGoneError(f"--url {self.address}: {self.slow.format(self._timeout)}", said=why) from None
            raise ServerGoneError(f"--url {self.address}: the server does not answer ({why})", said=why) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            # The client does not expect bodies that are not JSON, or JSON of another form.
            raise self._no_completion(f"{type(error).__name__}: {error}") from None

    def _of_status(self, error: Any) -> ServerError:
        body = error.body if isinstance(error.body, dict) else {}
        words = body.get("message") or body.get("detail") or error.message
        said = self._clean.line(f"{error.status_code}: {words}")
        kind, message = self._judged(error, said)
        return kind(message, error.status_code, said)

    def _judged(self, error: Any, said: str) -> tuple[type[ServerError], str]:
        """Return what a status means for further requests, and the message."""
        status, refuses = error.status_code, f"--url {self.address}: the server refuses"
        if status in (401, 403):
            return ServerGoneError, f"{refuses} every request ({said}); name the key's variable with --key-variable"
        if status == 402 or "insufficient_quota" in (error.code, error.type):
            return ServerGoneError, f"{refuses} every request without payment ({said})"
        if status in (408, 409, 429):
            return ServerGoneError, f"{refuses} more requests ({said}); send fewer at a time"
        if 300 <= status < 400:
            to = self._clean.line(without_password(error.response.headers.get("location", "nowhere")))
            return ServerGoneError, f"--url {self.address} redirects to {to}; give that address if you trust it"
        if "unordered_map::at" in said:
            return FailedError, (
                f"--url {self.address}: llama.cpp cannot split text into tokens ({said}), because its GGUF file names "
                "another kind of tokenizer than the model has. Try to convert the model with the tokenizer files that "
                "its authors published"
            )
        if status == 413 or (status in (400, 422, 500) and TOO_LONG.search(said)):
            return TooLongError, f"{refuses} this length ({said})"
        if status in (400, 404, 422) and ("model" in said.lower() or repr(self.model) in said):
            return RefusedError, f"{self._option} {self.model}: the server does not serve it ({said})"
        if status >= 500 and status != 501:
            later = "; it may still load its model, so try later" if status == 503 else ""
            return FailedError, f"--url {self.address}: the server fails ({said}){later}"
        ending = "; a URL mostly ends in /v1" if status in (404, 405) else ""
        return RefusedError, f"{refuses} the request ({said}){ending}"


def as_json(answer: Any) -> Any:
    """Return an answer of the openai client as dicts and lists. It does not check them, so any type may be there."""
    return answer.to_dict(warnings=False) if hasattr(answer, "to_dict") else answer


def at(value: Any, *path: str | int) -> Any:
    """Return what is at a path in JSON, None if there is nothing."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def count(value: Any) -> int | None:
    """Return a count of tokens, None for what cannot be one."""
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else None


def words_of(content: Any) -> str:
    """Return the content of a message as text: it is a text or a list of parts, and anything else counts as empty."""
    parts = [at(part, "text") for part in content] if isinstance(content, list) else [content]
    return "".join(part for part in parts if isinstance(part, str))


def check_address(option: str, url: str) -> None:
    """Raise PoSEError if `url` is not the address of a server.

    Args:
        option: how the user gave it, for the message.
    """
    try:
        TypeAdapter(HttpUrl).validate_python(url)
    except ValidationError:
        right = False
    else:
        # pydantic drops control characters at the ends, and the client fails at them.
        right = url.isprintable()
    if not right:
        address = without_password(url)
        raise PoSEError(f"{option} {address!r} is not an address; write e.g. http://localhost:8000/v1")


def key_of(variable: str | None) -> str | None:
    """Return the API key that an environment variable holds; None if no variable is named.

    Raises:
        PoSEError: there is no such variable. The message does not repeat a name that could be the key itself.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise PoSEError("--key-variable: the environment has no variable of that name; export it first")
    if not key.isascii() or not key.isprintable():
        raise PoSEError("--key-variable: its value has characters that no key has and that cannot be sent")
    return key


class Pace:
    """Spaces requests evenly under a limit of requests and tokens per minute; 0 for no limit.

    Servers that count by the second would refuse a burst at the start of each minute.
    """

    def __init__(self, requests_per_minute: float = 0, tokens_per_minute: float = 0) -> None:
        self._per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._free = 0.0

    def delay(self, now: float, tokens: int) -> float:
        """Reserve the next start. Returns the seconds until then.

        Args:
            tokens: of the prompt and its longest answer.
        """
        start = max(now, self._free)
        self._free = start + max(self._per_request, tokens * self._per_token)
        return start - now
