"""A real HTTP server with OpenAI's protocol that answers from the prompt. For faults see proxy.py."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.servers import Client, Listening, Seen, completion


@dataclass
class Server(Listening):
    """A model that writes.

    Attributes:
        write: makes the content of an answer; default: questions with quotes from the documents in the prompt.
        pause: seconds before every answer.
        peak: the most requests that were open at once.
    """

    write: Callable[[str], str] | None = None
    pause: float = 0.0
    peak: int = 0
    _now: int = 0

    def handle(self, client: Client, seen: Seen, raw: bytes) -> None:
        with self.lock:
            self._now += 1
            self.peak = max(self.peak, self._now)
        time.sleep(self.pause)
        try:
            self._answer(client, seen)
        finally:
            with self.lock:
                self._now -= 1

    def _answer(self, client: Client, seen: Seen) -> None:
        text = seen.body["messages"][0]["content"]
        content = (self.write or write_answer)(text)
        seen.answered = True
        client.reply(completion(content, len(text) // 4, 50, chat=True, model=seen.body["model"] + "-served"))


def documents_of(prompt: str) -> list[str]:
    return re.findall(r'<document id="[^"]+">\n(.*?)\n</document id=', prompt, re.S)


def ends(text: str) -> tuple[str, str]:
    """Return the first and the last words of a text."""
    return text[:60].rsplit(maxsplit=1)[0], text[-60:].split(maxsplit=1)[-1]


def write_answer(prompt: str) -> str:
    """Return what a good model would write, with quotes from the documents."""
    texts = documents_of(prompt)
    wanted = re.search(r"Write (\d+) questions", prompt)
    if wanted:
        quotes = [quote for text in texts for quote in ends(text)]
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
