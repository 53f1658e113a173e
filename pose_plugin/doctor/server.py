"""Ask a running OpenAI-compatible server: continue a prompt, and find a number that is hidden in a long text.

Servers differ in what they offer. The first request finds out: completions or only chat, with log-probabilities or
without, whole answers or only streams.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pose_plugin.evaluation.prompts import PasskeyTemplate
from pose_plugin.utils.findings import Finding
from pose_plugin.utils.server import RefusedError, Reply, as_json, at, count, words_of
from pose_plugin.utils.server import Server as AnyServer

# Where the number is hidden, 0 at the beginning of the text.
DEPTHS = (0.1, 0.5, 0.9)
# Tokens per English word, about.
_TOKENS_A_WORD = 1.3
# Tokens of an answer: a chat model first repeats the question.
_SHORT, _CHAT = 8, 64


@dataclass(frozen=True)
class Answer(Reply):
    """What a server wrote after a prompt.

    Attributes:
        logprobs: the server's log-probability of each of its tokens; None if it returns none.
    """

    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Needle:
    """One question for a hidden number.

    Attributes:
        words: of the prompt.
        depth: where the number was, 0 at the beginning.
        tokens: of the prompt, as the server counts; an estimate if it does not.
        found: whether the answer holds the number.
        refused: the server's reason, if it refused the length.
    """

    words: int
    depth: float
    tokens: int
    found: bool
    refused: str = ""

    @property
    def cut(self) -> bool:
        """Whether the server read fewer tokens than the text has words, so it dropped a part silently."""
        return not self.refused and self.tokens < self.words

    def __str__(self) -> str:
        result = f"refused ({self.refused})" if self.refused else "found" if self.found else "not found"
        cut = f" (of a text of {self.words:,} words)" if self.cut else ""
        return f"{self.tokens:>9,} tokens{cut}, depth {self.depth:.1f}: {result}"


class Server(AnyServer):
    """A server of which only the URL is known. Its first answers show how it is asked.

    Args:
        url, model, key, timeout: as for any server.

    Attributes:
        uses_chat: whether it has chat completions only.
        logprobs: whether it returns log-probabilities.
        stream: whether it answers by a stream only.
    """

    slow = "no answer within --timeout {:g} seconds; raise it, or use shorter --lengths"

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 600) -> None:
        super().__init__(url, model, key, timeout, retries=1)
        self.uses_chat, self.logprobs, self.stream, self._opened = False, True, False, False

    def ask(self, prompt: str, most: int) -> Answer:
        """Continue a prompt greedily.

        Args:
            prompt: as it is for completions, as the user's message for chat.
            most: tokens to answer.

        Raises:
            RefusedError: the server refuses this prompt, for example its length.
            ServerGoneError: it fails for another reason.
        """
        if not self._opened:
            # A refusal of this one is not about a length.
            self.logprobs = self._adapted("The sky is", 1).logprobs is not None
            self._opened = True
        return self._adapted(prompt, most)

    def _adapted(self, prompt: str, most: int) -> Answer:
        """Send a prompt in the way that the server takes; the first refusals teach it."""
        while True:
            try:
                return self._asked(prompt, most)
            except RefusedError as error:
                if self._opened or not self._learns(error):
                    raise

    def _learns(self, error: RefusedError) -> bool:
        """Change the way of asking after a refusal; False if no other way can help."""
        said = error.said.lower()
        if error.status in (400, 422) and "logprob" in said and self.logprobs:
            self.logprobs = False
        elif error.status in (400, 422) and "stream" in said and not self.stream:
            self.stream = True
        # "The model does not exist" is about its name, "this is a chat model" is not.
        elif error.status in (404, 405, 501) and ("model" not in said or "chat" in said) and not self.uses_chat:
            self.uses_chat = True
        else:
            return False
        return True

    def _asked(self, prompt: str, most: int) -> Answer:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": most, "temperature": 0}
        if self.uses_chat:
            call: Any = self.client.chat.completions.create
            asked |= {"messages": [{"role": "user", "content": prompt}]} | ({"logprobs": True} if self.logprobs else {})
        else:
            call = self.client.completions.create
            asked |= {"prompt": prompt} | ({"logprobs": 1} if self.logprobs else {})
        if self.stream:
            return self._joined(self._sent(lambda: list(call(**asked, stream=True))))
        answer = self._sent(call, **asked)
        if isinstance(answer, str) and answer.lstrip().startswith("data:") and not self._opened:
            self.stream = True
            return self._asked(prompt, most)
        return self._joined([answer])

    def _joined(self, parts: Sequence[Any]) -> Answer:
        """Return an answer from its only part, or from the parts of a stream."""
        text, logprobs, read = "", list[float](), None
        found = [as_json(part) for part in parts]
        if all(at(part, "choices", 0) is None for part in found):
            raise self._no_completion(parts[0] if parts else "")
        for part in found:
            read = count(at(part, "usage", "prompt_tokens")) or read
            choice = at(part, "choices", 0)
            said = at(choice, "message") or at(choice, "delta") or choice
            # Reasoning models may name the number only in their thoughts.
            for key in ("reasoning_content", "content", "text"):
                text += words_of(at(said, key))
            logprobs += _logprobs(at(choice, "logprobs"))
        return Answer(text, read, logprobs=logprobs or None)

    def find(self, words: int, depth: float, seed: int) -> Needle:
        """Ask for a number that is hidden in filler text.

        Args:
            words: of the whole prompt, about 1.3 tokens each.
            depth: of the number, 0 at the beginning.
            seed: of the number.

        Raises:
            PoSEError: the server fails for another reason than the length.
        """
        texts = PasskeyTemplate()
        key = str(random.Random(seed).randint(10000, 99999))
        around = [texts.prefix, texts.key_sentence.format(key=key), texts.question]
        sentences = texts.filler.split()
        room = max(words - len(" ".join(around).split()), 0)
        filler = (sentences * (room // len(sentences) + 1))[:room]
        place = round(depth * room)
        prompt = "\n".join([around[0], " ".join(filler[:place]), around[1], " ".join(filler[place:]), around[2]])
        try:
            answer = self.ask(prompt, _CHAT if self.uses_chat else _SHORT)
        except RefusedError as error:
            if not self._opened:
                raise
            return Needle(words, depth, round(words * _TOKENS_A_WORD), False, error.said)
        tokens = answer.read if answer.read is not None else round(words * _TOKENS_A_WORD)
        # Some models write the digits apart, or with a comma.
        return Needle(words, depth, tokens, key in re.sub(r"[\s,]", "", answer.text))


def _logprobs(found: Any) -> list[float]:
    """Return the log-probabilities of a choice: vLLM's completions list them, llama.cpp and chats name each."""
    listed = at(found, "token_logprobs")
    if not isinstance(listed, list):
        listed = at(found, "content")
        listed = [at(each, "logprob") for each in listed] if isinstance(listed, list) else []
    # JSON has integers that are too large for a float.
    return [float(each) for each in listed if isinstance(each, int | float) and abs(each) < 1e9]


def needles(server: Server, lengths: Sequence[int]) -> Iterator[Needle]:
    """Hide a number in texts of about these lengths (tokens), at each depth, and yield the answers."""
    for length in lengths:
        for number, depth in enumerate(DEPTHS):
            yield server.find(round(length / _TOKENS_A_WORD), depth, seed=length + number)


def judge_needles(asked: Sequence[Needle], rope: str | None) -> list[Finding]:
    """Return what the answers show.

    Args:
        asked: all questions, shortest first.
        rope: "applied", "other", "none" or "unclear" by the comparison with the folder; None without one.
    """
    findings = []
    cut = next((needle for needle in asked if needle.cut), None)
    if cut:
        findings.append(
            Finding(
                "prompt_tokens",
                cut.tokens,
                f"the server read {cut.tokens} tokens of a text of {cut.words} words: it drops the rest silently",
                "Start it with a larger window (Ollama: OLLAMA_CONTEXT_LENGTH, LM Studio: context length, llama.cpp: "
                "--ctx-size and no --context-shift)",
                "error",
            )
        )
    lost = [needle for needle in asked if not needle.found and not needle.refused]
    refused = [needle for needle in asked if needle.refused]
    if refused:
        findings.append(
            Finding(
                "lengths",
                f"{refused[0].tokens} tokens",
                f"the server refuses it: {refused[0].refused}",
                "Start it with the folder's window (vLLM: --max-model-len, llama.cpp: --ctx-size)",
            )
        )
    if not lost:
        found = [needle.tokens for needle in asked if needle.found]
        if found:
            findings.append(
                Finding("needles", f"{max(found)} tokens", "the server finds the number up to this length", "", "info")
            )
        return findings
    happens, fix = _REASONS[rope]
    short, depths = lost[0].words, {needle.depth for needle in lost if needle.words == lost[0].words}
    if len(depths) < len(DEPTHS) and max(depths) < min(set(DEPTHS) - depths) and not cut:
        happens = (
            "numbers are found only near the end of the text, so the server may drop the beginning, or a sliding "
            f"window hides it; if not, {happens}"
        )
    near = [needle.tokens for needle in asked if needle.found and needle.words < short]
    until = f", all found up to {max(near)}" if near else ""
    findings.append(Finding("needles", f"lost from {lost[0].tokens} tokens on{until}", happens, fix))
    return findings


# By what the comparison with the folder showed: why numbers are lost, and what to do.
_REASONS = {
    "applied": (
        "the server computes the rope of the folder, so the model itself is weak at these lengths",
        "Train it further, and compare `pose-plugin evaluate` on this machine",
    ),
    "other": ("the server computes another rope than the folder's, see above", "Mend that first, and ask again"),
    "none": ("the server does not answer as the folder's model, see above", "Mend that first, and ask again"),
    "unclear": (
        "an ignored scaling and a weak model look alike here",
        "Compare longer prompts with --compare, or serve the folder with an engine that returns log-probabilities",
    ),
    None: (
        "either the server ignores the scaling or the model is weak; needles alone cannot tell them apart",
        "Give the folder that it serves with --like",
    ),
}
