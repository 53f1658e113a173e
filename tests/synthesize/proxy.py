"""A real HTTP proxy in front of any server, with a script of faults for requests and answers.

What it lets through, the server behind it has worked for: that is the bill, and it is counted here, outside of the
process that pays.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.servers import Client, Listening, Seen
from tests.synthesize.server import Server

# The proxy's own answer instead of the server's: "429 |said", "429 code|said" or "307 |address".
REFUSALS = ("3", "4", "5")
# What "html" sends.
PAGE = b"<html>gateway</html>"


def _cut_content(reply: dict[str, Any]) -> None:
    message = reply["choices"][0]["message"]
    message["content"] = message["content"][: len(message["content"]) // 8]


def _other_schema(reply: dict[str, Any]) -> None:
    reply["choices"][0]["message"]["content"] = '{"questions": [{"ask": "?"}]}'


def _content_parts(reply: dict[str, Any]) -> None:
    message = reply["choices"][0]["message"]
    message["content"] = [{"type": "text", "text": message["content"]}]


# What is changed inside an answer that arrives.
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "content parts": _content_parts,
    "content number": lambda reply: reply["choices"][0]["message"].update(content=5),
    "message text": lambda reply: reply["choices"][0].update(message="hello"),
    "choices object": lambda reply: reply.update(choices={"a": 1}),
    "usage list": lambda reply: reply.update(usage=[1]),
    "usage text": lambda reply: reply["usage"].update(prompt_tokens="many", completion_tokens=1.5),
    "usage negative": lambda reply: reply["usage"].update(prompt_tokens=-(10**9), completion_tokens=-1),
    "usage huge": lambda reply: reply["usage"].update(prompt_tokens=10**400, completion_tokens=10**10),
    "not json": _cut_content,
    "wrong schema": _other_schema,
    "no usage": lambda reply: reply.pop("usage"),
}


@dataclass
class Proxy(Listening):
    """Forwards to `upstream`, a server's address up to /v1.

    A fault is a status ("500 |oops", see REFUSALS), a name of CHANGES, or one of:
        slow: nothing is forwarded, and nothing comes, until the client gives up, see `wait_for`;
        hang up: the connection ends before the first byte;
        cut: it ends in the middle of the server's answer;
        broken body: half of the answer, as if it were all;
        html: a gateway's page instead of the answer;
        empty choices: a chat completion without an answer.

    Attributes:
        faults: number of a request, from 0, in order of arrival → its fault.
        fault_for: the same by what is asked.
        retry_after: what a 429 asks for.
        hold_after: answers to requests after that many are fetched, and stay here unless `release` is called.
        held: how many do.
        slow: how many requests have been slow.
        forwarded: keys of requests that the server has worked for.
    """

    upstream: str
    faults: dict[int, str] = field(default_factory=dict)
    fault_for: Callable[[dict[str, Any]], str] = lambda body: ""
    retry_after: str = "0.3"
    hold_after: int | None = None
    held: int = 0
    slow: int = 0
    forwarded: list[str] = field(default_factory=list)
    _released: bool = False

    def release(self) -> None:
        """Send the answers that are held."""
        self._released, self.hold_after = True, None

    def answered(self) -> list[str]:
        """Return the keys of requests whose answers arrived completely."""
        return [seen.key for seen in self.log if seen.answered]

    def wait_for(self) -> Callable[[Coroutine[Any, Any, Any], float], Coroutine[Any, Any, Any]]:
        """Return an asyncio.wait_for that times out for slow requests only, however busy the machine is.

        One request at a time.
        """
        given_up = 0

        async def wait_for(sent: Coroutine[Any, Any, Any], limit: float) -> Any:
            nonlocal given_up
            task = asyncio.ensure_future(sent)
            while not task.done():
                if self.slow > given_up:
                    given_up += 1
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    raise asyncio.TimeoutError
                await asyncio.sleep(0.01)
            return task.result()

        return wait_for

    def handle(self, client: Client, seen: Seen, raw: bytes) -> None:
        with self.lock:
            number = next(i for i, each in enumerate(self.log) if each is seen)
            hold = self.hold_after is not None and number >= self.hold_after
        fault = seen.fault = self.faults.get(number, "") or self.fault_for(seen.body)
        if fault.startswith(REFUSALS):
            self._refuse(client, fault)
        elif fault == "slow":
            with self.lock:
                self.slow += 1
            self._wait(client)
            client.close_connection = True
        else:
            status, kind, data = self._forward(client, raw)
            with self.lock:
                self.forwarded.append(seen.key)
            if hold:
                with self.lock:
                    self.held += 1
                if not self._wait(client):
                    client.close_connection = True
                    return
            self._pass_on(client, seen, status, kind, data)

    def _refuse(self, client: Client, fault: str) -> None:
        status, _, said = fault.partition(" ")
        code, _, message = said.rpartition("|")
        error = {"error": {"message": message or "fault", "type": "t", "code": code or None}}
        headers = {"Retry-After": self.retry_after} if status == "429" else {}
        if status.startswith("3"):
            headers["Location"] = message
        client.send(int(status), json.dumps(error).encode(), headers)

    def _forward(self, client: Client, raw: bytes) -> tuple[int, str, bytes]:
        """The server's status, type and body."""
        address = urlsplit(self.upstream)
        assert address.hostname
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
        own = ("host", "connection", "content-length", "accept-encoding")
        headers = {name: value for name, value in client.headers.items() if name.lower() not in own}
        try:
            connection.request("POST", client.path, raw, headers)
            reply = connection.getresponse()
            return reply.status, reply.headers["Content-Type"], reply.read()
        finally:
            connection.close()

    def _pass_on(self, client: Client, seen: Seen, status: int, kind: str, data: bytes) -> None:
        half = data[: len(data) // 2]
        if seen.fault == "hang up":
            client.close_connection = True
        elif seen.fault == "cut":
            client.send(status, half, length=len(data))
        elif seen.fault == "broken body":
            client.send(status, half)
        elif seen.fault == "html":
            client.send(200, PAGE, {"Content-Type": "text/html"})
        elif seen.fault == "empty choices":
            client.send(200, json.dumps({**json.loads(data), "choices": []}).encode(), {"Content-Type": kind})
        else:
            if seen.fault:
                reply = json.loads(data)
                CHANGES[seen.fault](reply)
                data = json.dumps(reply).encode()
            # Before the last byte, because a test may check this as soon as it arrives.
            seen.answered = status == 200
            client.send(status, data, {"Content-Type": kind})

    def _wait(self, client: Client) -> bool:
        """Wait until `release` (returns True), or until the client or this proxy is gone."""
        readable = select.poll()
        readable.register(client.connection, select.POLLIN)
        while self.open and not self._released:
            # Readable without a further request: the client has closed the connection.
            if readable.poll(0) and not client.connection.recv(1, socket.MSG_PEEK):
                return False
            time.sleep(0.02)
        return self._released


@contextmanager
def faulty(faults: dict[int, str] | None = None, **script: Any) -> Iterator[Proxy]:
    """Start a proxy in front of the test server."""
    with Server() as server, Proxy(server.url, faults or {}, **script) as proxy:
        yield proxy
