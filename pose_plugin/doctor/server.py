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
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import Finding

# Where the number is hidden, 0 at the beginning of the text.
DEPTHS = (0.1, 0.5, 0.9)
# Tokens per English word, about.
_TOKENS_A_WORD = 1.3
# Tokens of an answer: a chat model first repeats the question.
_SHORT, _CHAT = 8, 64
# Where servers put their window among a model's facts: vLLM and SGLang, then gateways, then llama.cpp.
_WINDOWS = ("max_model_len", "context_length", "max_context_length", "context_window")


@dataclass(frozen=True)
class Answer:
    """What a server wrote after a prompt.

    Attributes:
        text: the continuation.
        logprobs: the server's log-probability of each of its tokens; None if it returns none.
        tokens: of the prompt, as the server counts them; None if it does not.
    """

    text: str
    logprobs: list[float] | None
    tokens: int | None


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


class Server:
    """An OpenAI-compatible server.

    Args:
        url: up to and with /v1.
        model: its name there; default: the only one that it lists.
        key: the API key, if it wants one.
        timeout: seconds to wait for one answer.

    Attributes:
        window: the window that the server states, tokens; None if it states none.
        chat, logprobs, stream: how it answers; known after the first request.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 600) -> None:
        try:
            import openai
        except ImportError:
            raise PoSEError("doctor --url needs the package openai; pip install openai") from None
        self._openai = openai
        self._client = openai.OpenAI(base_url=url, api_key=key or "none", timeout=timeout, max_retries=1)
        self.url, self.timeout = url, timeout
        self.chat, self.logprobs, self.stream, self._opened = False, True, False, False
        facts = self._models()
        self.names = sorted(facts)
        if model is None and len(facts) != 1:
            raise PoSEError(
                f"--url {url} lists {', '.join(self.names) or 'no model'}; name the one to ask with --model "
                "(transformers serve: as it was started, for example the folder)"
            )
        self.model = model or self.names[0]
        stated = facts.get(self.model, {})
        found = [stated.get(key) for key in _WINDOWS] + [(stated.get("meta") or {}).get("n_ctx")]
        self.window = next((int(each) for each in found if each), None)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each model that the server lists; {} if it cannot list them, as some servers."""
        try:
            listed = self._client.models.list()
            return {model.id: model.model_extra or {} for model in listed.data or []}
        except (self._openai.AuthenticationError, self._openai.PermissionDeniedError) as error:
            raise self._failed(error) from None
        except self._openai.APIConnectionError as error:
            raise self._failed(error) from None
        except (self._openai.OpenAIError, AttributeError):  # not JSON: `listed` is a text
            return {}

    def ask(self, prompt: str, most: int) -> Answer:
        """Continue a prompt greedily.

        Args:
            prompt: as it is for completions, as the user's message for chat.
            most: tokens to answer.

        Raises:
            Refused: the server refuses the length.
            PoSEError: it fails for another reason.
        """
        if not self._opened:
            # A refusal of this one is not about a length.
            self.logprobs = self._adapted("The sky is", 1).logprobs is not None
            self._opened = True
        try:
            return self._adapted(prompt, most)
        except Refused:
            raise
        except self._openai.OpenAIError as error:
            raise self._failed(error) from None

    def _adapted(self, prompt: str, most: int) -> Answer:
        """Send a prompt in the way that the server takes; the first refusals teach it."""
        for _ in range(5):  # each try but the last may teach one of: chat, no log-probabilities, a stream
            try:
                answer = self._send(prompt, most)
            except self._openai.APIStatusError as error:
                if self._opened or not self._learns(error):
                    raise self._refused(error) from None
            except self._openai.OpenAIError as error:
                raise self._failed(error) from None
            else:
                if isinstance(answer, Answer):
                    return answer
                if not answer.lstrip().startswith("data:"):
                    break
                self.stream = True
        raise PoSEError(f"--url {self.url} does not answer as the OpenAI API does; give the URL up to and with /v1")

    def _learns(self, error: Any) -> bool:
        """Change the way of asking after a refusal; False if no other way can help."""
        text = str(error).lower()
        if error.status_code in (400, 422) and "logprob" in text and self.logprobs:
            self.logprobs = False
        elif error.status_code in (400, 422) and "stream" in text and not self.stream:
            self.stream = True
        elif error.status_code in (404, 405, 501) and "model" not in text and not self.chat:
            self.chat = True
        else:
            return False
        return True

    def _send(self, prompt: str, most: int) -> Answer | str:
        """Return the answer, or the body if it is not JSON."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": most, "temperature": 0}
        if self.stream:
            asked["stream"] = True
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
            asked |= {"logprobs": True} if self.logprobs else {}
            answer: Any = self._client.chat.completions.create(**asked)
        else:
            asked |= {"prompt": prompt} | ({"logprobs": 1} if self.logprobs else {})
            answer = self._client.completions.create(**asked)
        if isinstance(answer, str):
            return answer
        return _joined(answer if self.stream else [answer])

    def _refused(self, error: Any) -> Exception:
        """Return the exception for a status: a refused length, or a failure."""
        if self._opened and error.status_code in (400, 413, 422):
            return Refused(_message(error))
        return self._failed(error)

    def _failed(self, error: Any) -> PoSEError:
        """Return an error that names the cause of a failure, and what to do."""
        where, said = f"--url {self.url}", _message(error)
        status = getattr(error, "status_code", None)
        if isinstance(error, self._openai.APITimeoutError):
            return PoSEError(
                f"{where}: no answer within --timeout {self.timeout:g} seconds; raise it, or give shorter --lengths"
            )
        if isinstance(error, self._openai.APIConnectionError):
            return PoSEError(f"{where}: nothing answers there ({said}); start the server, and check host and port")
        if status in (401, 403):
            return PoSEError(
                f"{where}: the server wants an API key ({status}: {said}); put it into an environment variable, and "
                "name that with --key-variable"
            )
        if status in (400, 404, 422) and ("model" in said.lower() or repr(self.model) in said):
            listed = f"it lists {', '.join(self.names)}" if self.names else "name it as the server was started"
            return PoSEError(f"--model {self.model}: the server does not serve it ({status}: {said}); {listed}")
        if status == 404:
            return PoSEError(f"{where}: the server has neither /completions nor /chat/completions there; end it in /v1")
        if status in (429, 503):
            return PoSEError(f"{where}: the server is busy or still loads its model ({status}: {said}); try later")
        return PoSEError(f"{where}: the server fails at a short prompt too ({status}: {said}); look at its log")

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
        count = max(words - len(" ".join(around).split()), 0)
        filler = (sentences * (count // len(sentences) + 1))[:count]
        place = round(depth * count)
        prompt = "\n".join([around[0], " ".join(filler[:place]), around[1], " ".join(filler[place:]), around[2]])
        try:
            answer = self.ask(prompt, _CHAT if self.chat else _SHORT)
        except Refused as error:
            return Needle(words, depth, round(words * _TOKENS_A_WORD), False, str(error))
        tokens = answer.tokens if answer.tokens is not None else round(words * _TOKENS_A_WORD)
        # Some models write the digits apart, or with a comma.
        return Needle(words, depth, tokens, key in re.sub(r"[\s,]", "", answer.text))


class Refused(Exception):
    """The server refuses a prompt of this length."""


def _message(error: Any) -> str:
    """Return the server's own words, in one line of at most 200 characters."""
    body = getattr(error, "body", None)
    said = body.get("message") or body.get("detail") if isinstance(body, dict) else None
    line = " ".join(str(said or error).split())
    return line if len(line) <= 200 else line[:200] + "…"


def _joined(parts: Any) -> Answer:
    """Return an answer from its only part, or from the parts of a stream."""
    text, logprobs, tokens = "", list[float](), None
    for part in parts:
        if getattr(part, "usage", None):
            tokens = part.usage.prompt_tokens
        for choice in part.choices or []:
            said = getattr(choice, "message", None) or getattr(choice, "delta", None) or choice
            # Reasoning models may name the number only in their thoughts.
            thoughts = (getattr(said, "model_extra", None) or {}).get("reasoning_content")
            text += (thoughts or "") + (getattr(said, "content", None) or getattr(said, "text", None) or "")
            logprobs += _logprobs(choice.logprobs)
    return Answer(text, logprobs or None, tokens)


def _logprobs(found: Any) -> list[float]:
    """Return the log-probabilities of a choice: vLLM's completions list them, llama.cpp and chats name each."""
    if found is None:
        return []
    listed = getattr(found, "token_logprobs", None)
    if listed:
        return [float(each) for each in listed if each is not None]
    each_token = getattr(found, "content", None) or (found.model_extra or {}).get("content") or []
    return [float(each["logprob"] if isinstance(each, dict) else each.logprob) for each in each_token]


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
    if len(depths) < len(DEPTHS) and max(depths) < max(set(DEPTHS) - depths) and not cut:
        happens = "only the end of the text is read: the server drops the beginning, or a sliding window hides it. "
        happens += _REASONS[rope][0]
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
