"""A client of OpenAI-compatible servers: which models they serve, completions of prompts, and their errors in words."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.utils.clean import Cleaner, secrets_of, without_password
from pose_plugin.utils.errors import PoSEError

# Seconds to connect. A machine that does not exist often does not refuse the connection either.
CONNECT = 30.0
# Where vLLM, SGLang and gateways state a model's window.
WINDOWS = ("max_model_len", "context_length", "max_context_length", "context_window")
# What servers say of a prompt and an answer that are longer than their context.
TOO_LONG = re.compile(r"context|too (?:long|large|many)|max_(?:completion_)?tokens|maximum|exceed", re.I)


class ServerGoneError(PoSEError):
    """No further request can succeed: the server, the key or the money is missing."""


class FailedError(ServerGoneError):
    """The server fails at a request, however often it is repeated."""


class RefusedError(PoSEError):
    """The server will never accept this request, but it may accept others."""


class TooLongError(RefusedError):
    """A prompt with its answer is longer than the server's context."""


@dataclass(frozen=True)
class Reply:
    """An answer of a server.

    Attributes:
        text: what the model wrote.
        read: tokens of the prompt as the server counts them; None if it does not count.
    """

    text: str
    read: int | None


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
        address: the URL without a password.
        model: the model's name on the server.
        window: the longest prompt with its answer, in tokens; None if the server does not state it.
        client: of the openai package, for requests that this class has no method for.

    Raises:
        PoSEError: the package openai is missing, the server does not answer, or it does not have the model.
    """

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
        self._openai: Any = openai
        self._clean = Cleaner(secrets_of(key or "", url))
        self.address = without_password(url)
        self.client = openai.OpenAI(
            base_url=url,
            # The client would otherwise send what OPENAI_API_KEY holds to any server.
            api_key=key or "none",
            timeout=openai.Timeout(timeout, connect=min(timeout, CONNECT)),
            max_retries=retries,
            # A redirect would carry prompts and key to an address that the user has not given.
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )
        self.model, self.window = self._model(model, option)

    def _model(self, wanted: str | None, option: str) -> tuple[str, int | None]:
        """Return the model's name, and the window that the server states, if it does."""
        facts = self._models()
        if wanted is None and len(facts) != 1:
            raise PoSEError(f"--url {self.address} lists {', '.join(facts) or 'no model'}; choose one with {option}")
        if wanted is not None and wanted not in facts:
            # `transformers serve` loads any folder, and lists only what is in the cache of the hub.
            if not facts or Path(wanted).is_dir():
                return wanted, None
            raise PoSEError(f"{option} {wanted}: the server at {self.address} has {', '.join(facts)}")
        name = wanted or next(iter(facts))
        # llama.cpp states it one level deeper.
        stated = [*map(facts[name].get, WINDOWS), (facts[name].get("meta") or {}).get("n_ctx")]
        return name, next((int(each) for each in stated if each), None)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return what the server states of each model; {} if it cannot list them, which some servers cannot."""
        try:
            listed = self._sent(self.client.models.list)
        except (RefusedError, FailedError):
            return {}
        return {model.id: model.model_extra or {} for model in getattr(listed, "data", None) or []}

    def complete(self, prompt: str | list[int], tokens: int, stop: list[str] | None = None) -> Reply:
        """Continue a prompt greedily, by POST /completions.

        Args:
            prompt: a text or its token ids.
            tokens: the most that are written.
            stop: texts that end the answer.

        Raises:
            TooLongError, RefusedError, ServerGoneError
        """
        more = {"stop": stop} if stop else {}
        answer = self._sent(
            self.client.completions.create,
            model=self.model, prompt=prompt, max_tokens=tokens, temperature=0, **more,
        )  # fmt: skip
        return self._reply(answer, lambda choice: choice.text)

    def chat(self, text: str, tokens: int, stop: list[str] | None = None) -> Reply:
        """Answer a message greedily, by POST /chat/completions; arguments and errors as for `complete`."""
        more = {"stop": stop} if stop else {}
        answer = self._sent(
            self.client.chat.completions.create,
            model=self.model, messages=[{"role": "user", "content": text}], max_tokens=tokens, temperature=0, **more,
        )  # fmt: skip
        return self._reply(answer, lambda choice: choice.message.content)

    def _reply(self, answer: Any, text_of: Any) -> Reply:
        choices = getattr(answer, "choices", None)
        if not choices:
            start = self._clean.line(str(answer), 80)
            raise ServerGoneError(
                f"--url {self.address}: the answer is not a completion but {start!r}; a URL mostly ends in /v1"
            )
        usage = getattr(answer, "usage", None)
        return Reply(text_of(choices[0]) or "", getattr(usage, "prompt_tokens", None))

    def _sent(self, call: Any, **parameters: Any) -> Any:
        try:
            return call(**parameters)
        except self._openai.APIStatusError as error:
            raise self._of_status(error) from None
        except self._openai.APIError as error:
            # A lost connection, a timeout, or a body that is not JSON.
            cause = error.__cause__ or error
            why = self._clean.line(f"{type(cause).__name__}: {cause}")
            raise ServerGoneError(f"--url {self.address}: the server does not answer ({why})") from None

    def _of_status(self, error: Any) -> PoSEError:
        status, body = error.status_code, error.body if isinstance(error.body, dict) else {}
        said = self._clean.line(f"{status}: {body.get('message') or error.message}")
        where = f"--url {self.address}: the server refuses"
        if status in (401, 403):
            return ServerGoneError(f"{where} every request ({said}); name the key's variable with --key-variable")
        if status == 402 or "insufficient_quota" in (error.code, error.type):
            return ServerGoneError(f"{where} every request without payment ({said})")
        if status in (408, 409, 429):
            return ServerGoneError(f"{where} more requests ({said}); send fewer at a time")
        if 300 <= status < 400:
            to = self._clean.line(without_password(error.response.headers.get("location", "nowhere")))
            return ServerGoneError(f"--url {self.address} redirects to {to}; give that address if you trust it")
        if status == 413 or (status in (400, 422, 500) and TOO_LONG.search(said)):
            return TooLongError(f"{where} this length ({said})")
        if status >= 500 and status != 501:
            return FailedError(f"--url {self.address}: the server fails ({said})")
        return RefusedError(f"{where} the request ({said})")


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
    return key


class Pace:
    """Spaces requests evenly under a limit of requests and tokens per minute; 0 is no limit.

    Servers that count by the second would refuse a burst at the start of each minute.
    """

    def __init__(self, requests_per_minute: float = 0, tokens_per_minute: float = 0) -> None:
        self._per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._free = 0.0

    def delay(self, now: float, tokens: int) -> float:
        """Reserve the next start. Returns the seconds until then.

        Args:
            now: seconds of a monotonic clock.
            tokens: of the prompt and its longest answer.
        """
        start = max(now, self._free)
        self._free = start + max(self._per_request, tokens * self._per_token)
        return start - now
