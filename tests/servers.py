"""The base of all test servers and of the proxy: a free port, a thread per request, and a log of requests.

tests/evaluation/model_server.py answers with a model, tests/synthesize/server.py with quotes from the prompt,
tests/synthesize/proxy.py with faults, and tests/doctor/test_server.py as odd servers do.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    """One request that arrived.

    Attributes:
        key: a hash of what was asked.
        answered: whether the answer went out whole.
        fault: what was done to it instead.
    """

    key: str
    body: dict[str, Any]
    headers: dict[str, str]
    time: float
    answered: bool = False
    fault: str = ""


def held_port() -> socket.socket:
    """Reserve a port of 127.0.0.1 while this is open. Connections to it are refused.

    A server that reuses addresses, as most do, may listen there all the same (on Linux).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Listening:
    """A server on this machine, as a context manager. `handle` runs in one thread per request.

    Attributes:
        name: of the only model.
        url: of this, up to /v1.
        log: every POST, in order of arrival.
    """

    name = "tiny"

    def __enter__(self) -> Any:
        self.log: list[Seen] = []
        self.open = True
        self.lock = threading.Lock()
        # Keep the port reserved: another program might get it before a client reconnects.
        self._held = held_port()
        self._http = ThreadingHTTPServer(self._held.getsockname(), type("Handler", (Client,), {"owner": self}))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._held.close()

    def stop(self) -> None:
        """Accept no further connection. Answers in progress are completed."""
        self.open = False
        self._http.shutdown()
        self._http.server_close()

    def handle(self, client: Client, seen: Seen, raw: bytes) -> None:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return what the list of models states of this one."""
        return {}

    def list_models(self, client: Client) -> None:
        """Answer a GET."""
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "me", **self.facts()}
        client.reply({"object": "list", "data": [model]})


class Client(BaseHTTPRequestHandler):
    """The connection to one client."""

    owner: Listening
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.owner.list_models(self)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(key, body, headers, time.monotonic())
        with self.owner.lock:
            self.owner.log.append(seen)
        try:
            self.owner.handle(self, seen, raw)
        except ConnectionError:  # who asked is gone
            self.close_connection = True

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        """Send an answer. One that is shorter than `length` ends the connection."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        if not self.owner.open:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        self.close_connection |= length is not None

    def reply(self, values: dict[str, Any], status: int = 200) -> None:
        self.send(status, json.dumps(values).encode())

    def refuse(self, status: int, message: str) -> None:
        self.reply({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def log_message(self, *_: object) -> None:
        """Tests read `log`."""


def completion(text: str, read: int, written: int, chat: bool = False, **values: Any) -> dict[str, Any]:
    """Return a completion as OpenAI's API has it.

    Args:
        text: the answer.
        read: tokens of the prompt.
        written: tokens of the answer.
        chat: whether it answers a chat message.
        values: other values of the completion, or of its choice for the keys of a choice.
    """
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {key: values.pop(key) for key in ("finish_reason", "logprobs") if key in values}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "1", "object": kind, "created": 0, "model": "tiny", "choices": [choice], "usage": usage, **values}
