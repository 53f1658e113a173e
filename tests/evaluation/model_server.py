"""A small OpenAI-compatible server that runs transformers' `generate`, and counts what it was asked."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from pose_plugin.evaluation.served import CHAT_ROOM
from tests.servers import Listening, completion


class ModelServer(Listening):
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
        logprobs: whether it returns log-probabilities to those who ask for them.
        refuses: a field of requests that it refuses.
        thoughts: of an answer's text, what a chat answer of a reasoning model holds.

    Attributes:
        asked: bodies of the requests for completions that were answered.
        most: the most requests that were open at once.
    """

    def __init__(
        self, model, tokenizer, takes=("ids", "text", "chat"), window=100_000, stated=True, key=None, dies_after=None,
        cut=None, logprobs=False, refuses=None, thoughts=None,
    ):  # fmt: skip
        self.model, self.tokenizer, self.takes, self.window = model.eval(), tokenizer, takes, window
        self.stated, self.key, self.dies_after, self.cut, self.logprobs = stated, key, dies_after, cut, logprobs
        self.refuses, self.thoughts = refuses, thoughts
        self.asked: list[dict] = []
        self.running = self.most = 0

    @property
    def prompts(self):
        """The measured prompts: without the sentence that is sent once to learn what the server takes."""
        return [body for body in self.asked if body["max_tokens"] not in (1, 1 + CHAT_ROOM)]

    def facts(self):
        return {"max_model_len": self.window} if self.stated else {}

    def list_models(self, client):
        if not self.locked(client):
            super().list_models(client)

    def locked(self, client):
        """Whether the key is wrong; a server may repeat it."""
        given = client.headers.get("Authorization", "")
        if self.key is None or given == f"Bearer {self.key}":
            return False
        client.refuse(401, f"wrong key: {given}")
        return True

    def handle(self, client, seen, raw):
        body = seen.body
        if self.locked(client):
            return
        chat = client.path.endswith("/chat/completions")
        form = "chat" if chat else "text" if isinstance(body["prompt"], str) else "ids"
        if form not in self.takes:
            return client.refuse(404 if chat else 400, f"prompt must not be {form}")
        if self.refuses in body:
            return client.refuse(422, f"Unexpected fields in the request: {self.refuses}")
        if form == "ids":
            ids = body["prompt"]
        else:
            ids = self.tokenizer(body["messages"][0]["content"] if chat else body["prompt"])["input_ids"]
        if len(ids) + body["max_tokens"] > self.window:
            return client.refuse(400, f"This model's maximum context length is {self.window} tokens.")
        with self.lock:
            if self.dies_after is not None and len(self.prompts) >= self.dies_after:
                client.close_connection = True
                return
            self.asked.append(body)
            self.running += 1
            self.most = max(self.most, self.running)
        text, scores = self.generate(ids[-self.cut :] if self.cut else ids, body)
        with self.lock:
            self.running -= 1
        logprobs = {"token_logprobs": scores} if self.logprobs and body.get("logprobs") else None
        read = min(len(ids), self.cut or len(ids))
        answer = completion(text, read, len(scores), chat, finish_reason="length", logprobs=logprobs)
        if chat and self.thoughts:
            answer["choices"][0]["message"] |= self.thoughts(text)
        client.reply(answer)

    def generate(self, ids, body):
        """Return the text of a greedy continuation, and the log-probability of each of its tokens."""
        settings = GenerationConfig(max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=0)
        settings.eos_token_id = self.model.generation_config.eos_token_id
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([ids]), generation_config=settings, output_logits=True, return_dict_in_generate=True
            )
        made = found.sequences[0, len(ids) :]
        scores = [float(logits[0].log_softmax(-1)[token]) for logits, token in zip(found.logits, made, strict=True)]
        # Some tokenizers drop the space before the first word.
        start, whole = (self.tokenizer.decode(each, skip_special_tokens=True) for each in (ids, found.sequences[0]))
        text = whole[len(start) :] if whole.startswith(start) else self.tokenizer.decode(made, skip_special_tokens=True)
        for stop in body.get("stop") or []:
            text = text.partition(stop)[0]
        return text, scores
