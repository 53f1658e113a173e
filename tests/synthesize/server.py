"""A real HTTP server that speaks OpenAI's protocol: answers from what it is asked, faults on demand, and a log."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What a fault does, by name; a number is an HTTP status.
Fault = str


@dataclass
class Seen:
    """One request: a hash of what was asked, and whether it was answered in full."""

    key: str
    body: dict[str, Any]
    headers: dict[str, str]
    time: float
    answered: bool = False
    fault: str = ""


@dataclass
class Server:
    """Listens on a free port of this machine.

    Attributes:
        faults: number of a request, from 0, in order of arrival → what goes wrong with it.
        fault_for: the same by what is asked.
        write: makes the content of an answer; default: questions with quotes from the documents in the prompt.
        pause: seconds before every answer.
        peak: the most requests that were open at once.
        hold_after: requests after that many get no answer, unless `release` is called.
    """

    faults: dict[int, Fault] = field(default_factory=dict)
    write: Callable[[str], str] | None = None
    fault_for: Callable[[dict[str, Any]], Fault] = lambda body: ""
    hold_after: int | None = None
    log: list[Seen] = field(default_factory=list)
    retry_after: str = "0.3"
    pause: float = 0.0
    peak: int = 0
    _now: int = 0
    _released: bool = False

    def __enter__(self) -> Server:
        self._lock = threading.Lock()
        self._count = 0
        self._answers = 0
        self._open = True
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._http.shutdown()
        self._http.server_close()

    def release(self) -> None:
        """Answers those that are held, too."""
        self._released = True
        self.hold_after = None

    def answered(self) -> list[str]:
        return [seen.key for seen in self.log if seen.answered]


class _Handler(BaseHTTPRequestHandler):
    server_state: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        seen = Seen(key, body, {name.lower(): value for name, value in self.headers.items()}, time.monotonic())
        with state._lock:
            number = state._count
            state._count += 1
            state.log.append(seen)
            held = state.hold_after is not None and state._answers >= state.hold_after
            state._answers += 1
        seen.fault = state.faults.get(number, "") or state.fault_for(body)
        while held and state._open and not state._released:
            time.sleep(0.02)
        if held and not state._released:
            return
        with state._lock:
            state._now += 1
            state.peak = max(state.peak, state._now)
        time.sleep(state.pause)
        try:
            self._answer(seen, body)
        finally:
            with state._lock:
                state._now -= 1

    def _answer(self, seen: Seen, body: dict[str, Any]) -> None:
        fault = seen.fault
        if fault.startswith(("4", "5")):
            status, _, said = fault.partition(" ")
            headers = {"Retry-After": self.server_state.retry_after} if status == "429" else {}
            code, _, message = said.rpartition("|")
            error = {"error": {"message": message or "fault", "type": "t", "code": code or None}}
            return self._send(int(status), json.dumps(error), headers)
        if fault == "slow":
            time.sleep(2)
            return None
        text = body["messages"][0]["content"]
        content = (self.server_state.write or write_answer)(text)
        content = {"not json": content[: len(content) // 2], "wrong schema": '{"questions": [{"ask": "?"}]}'}.get(
            fault, content
        )
        reply = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"] + "-served",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}],
            "usage": {"prompt_tokens": len(text) // 4, "completion_tokens": 50, "total_tokens": len(text) // 4 + 50},
        }
        if fault == "empty choices":
            reply["choices"] = []
        if fault == "no usage":
            del reply["usage"]
        data = json.dumps(reply)
        if fault == "broken body":
            return self._send(200, data[: len(data) // 2])
        if fault == "html":
            return self._send(200, "<html>gateway</html>", {"Content-Type": "text/html"})
        if fault == "cut":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2].encode())
            self.wfile.flush()
            self.close_connection = True
            return None
        seen.answered = True
        return self._send(200, data)

    def _send(self, status: int, data: str, headers: dict[str, str] | None = None) -> None:
        raw = data.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Tests read `log`."""


def documents_of(prompt: str) -> list[str]:
    return re.findall(r'<document id="[^"]+">\n(.*?)\n</document id=', prompt, re.S)


def write_answer(prompt: str) -> str:
    """What a good model would write, in form: quotes are really from the documents."""
    texts = documents_of(prompt)
    wanted = re.search(r"Write (\d+) questions", prompt)
    if wanted:
        spots = [(text[:60], text[-60:]) for text in texts]
        quotes = [spot for pair in spots for spot in pair]
        return json.dumps(
            {
                "questions": [
                    {"question": f"What is detail {n} of {texts[0][:12]}?", "answer": f"Answer {n}.", "quotes": quotes}
                    for n in range(int(wanted.group(1)))
                ]
            }
        )
    if "Decide whether" in prompt:
        return json.dumps({"characters": ["Ahab", "Nobody at all", "Ishmael"]})
    name = re.search(r"needed about (\w+)", prompt).group(1)
    return json.dumps({"biography": f"{name} goes to sea. " * 20})
