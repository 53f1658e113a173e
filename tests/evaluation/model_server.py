"""A small OpenAI-compatible server that runs transformers' `generate`, and counts what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import GenerationConfig

from pose_plugin.evaluation.served import CHAT_ROOM


class ModelServer(ThreadingHTTPServer):
    """Serves one model on a free port.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        takes: forms of prompts that are accepted: ids, text, chat.
        window: tokens of prompt and answer; longer ones are refused.
        stated: whether /models names the window.
        key: required as a bearer token.
        dies_after: answers before every connection is closed without one.
        cut: tokens that prompts are silently cut to.

    Attributes:
        asked: bodies of the requests for completions that were answered.
    """

    daemon_threads = True

    def __init__(
        self, model, tokenizer, takes=("ids", "text", "chat"), window=100_000, stated=True, key=None, dies_after=None,
        cut=None, name="tiny",
    ):  # fmt: skip
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer, self.takes, self.window, self.stated = model, tokenizer, takes, window, stated
        self.key, self.dies_after, self.cut, self.name = key, dies_after, cut, name
        self.asked: list[dict] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def prompts(self):
        """The measured prompts: without the sentence that is sent once to learn what the server takes."""
        return [body for body in self.asked if body["max_tokens"] not in (1, 1 + CHAT_ROOM)]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, address):
        """A client that went away is part of some tests."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def send(self, values, status=200):
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, text):
        self.send({"error": {"message": text, "type": "invalid_request_error"}}, status)

    def locked(self):
        """Whether the key is wrong; a server may repeat it."""
        given = self.headers.get("Authorization", "")
        if self.server.key is None or given == f"Bearer {self.server.key}":
            return False
        self.refuse(401, f"wrong key: {given}")
        return True

    def do_GET(self):
        if self.locked():
            return
        model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "me"}
        if self.server.stated:
            model["max_model_len"] = self.server.window
        self.send({"object": "list", "data": [model]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.locked():
            return
        chat = self.path.endswith("/chat/completions")
        form = "chat" if chat else "text" if isinstance(body["prompt"], str) else "ids"
        if form not in server.takes:
            return self.refuse(404 if chat else 400, f"prompt must not be {form}")
        if form == "ids":
            ids = body["prompt"]
        else:
            ids = server.tokenizer(body["messages"][0]["content"] if chat else body["prompt"])["input_ids"]
        if len(ids) + body["max_tokens"] > server.window:
            return self.refuse(400, f"This model's maximum context length is {server.window} tokens.")
        with server.lock:
            if server.dies_after is not None and len(server.prompts) >= server.dies_after:
                return self.connection.close()
            server.asked.append(body)
            server.running += 1
            server.most = max(server.most, server.running)
        text, written = self.generate(ids[-server.cut :] if server.cut else ids, body)
        with server.lock:
            server.running -= 1
        read = min(len(ids), server.cut or len(ids))
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        choice = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self.send(
            {"id": "1", "object": "chat.completion" if chat else "text_completion", "created": 0, "model": "tiny",
             "choices": [choice], "usage": usage}
        )  # fmt: skip

    def generate(self, ids, body):
        settings = GenerationConfig(max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=0)
        settings.eos_token_id = self.server.model.generation_config.eos_token_id
        with torch.no_grad():
            made = self.server.model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :]
        text = self.server.tokenizer.decode(made, skip_special_tokens=True)
        for stop in body.get("stop") or []:
            text = text.partition(stop)[0]
        return text, len(made)
