"""A model behind an OpenAI-compatible server takes the place of a model in this process: `Asking` measures ask it.

Prompts are those of a model in this process, made by the model's own tokenizer. They are sent as token ids if the
server takes them, else as text, else as a chat message, whose template changes the prompt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pose_plugin.checkpoints.load import Source
from pose_plugin.evaluation import fingerprints
from pose_plugin.evaluation.asking import Asking
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.prompts import leading_ids, plain_tokenizer
from pose_plugin.evaluation.questions import Answerer, Answers, Question, groups, unanswered
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import digest
from pose_plugin.utils.server import FailedError, Pace, RefusedError, Reply, Server, ServerGoneError, TooLongError

FORMS = ("ids", "text", "chat")
SENTENCE = 4 * "Wolfgang's 1987 zeppelin flew 3,141 km over Qikiqtaaluk, and jazz quartets vexed 26 squawking ospreys. "
"""Rare words and numbers, which tokenizers split differently; several times, so that the difference is more than one
token. It is sent once in each form, to learn what the server takes and whether it has the same tokenizer."""
CHAT_ROOM = 32
"""More tokens for the answer of a chat model, which begins with a few words."""
LEAST_READ = 0.9
"""A server that reads a smaller share of a prompt has cut it. Text takes a few tokens more or less than its ids."""


class ServedModel(Answerer):
    """Asks a server for answers, several at a time.

    Args:
        server: the server and its model.
        tokenizer: the model's tokenizer.
        form: "ids", "text" or "chat"; "auto": the first of them that the server takes.
        concurrency: requests at a time.
        requests_per_minute: 0 for no limit.
        max_requests: after so many requests PoSEError is raised; None for no limit.
        penalty: the model's own repetition penalty. vLLM and SGLang apply it unless a request says otherwise.

    Attributes:
        sent: requests so far, without the test sentence and the repeats of the openai client.

    Example:
        >>> model = ServedModel(Server("http://localhost:8000/v1"), tokenizer)
        >>> passkey(model, tokenizer, [2048, 8192], trials=20).k_max()
        8192
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        form: str = "auto",
        concurrency: int = 4,
        requests_per_minute: float = 0,
        max_requests: int | None = None,
        penalty: float = 1.0,
    ) -> None:
        self.server, self.tokenizer, self.concurrency = server, plain_tokenizer(tokenizer), concurrency
        self.max_requests, self.sent = max_requests, 0
        self._asked, self._form = form, ""
        self.penalty, self._more = penalty, {} if penalty == 1 else {"repetition_penalty": 1.0}
        self._pace, self._lock = Pace(requests_per_minute), threading.Lock()
        self._gone: ServerGoneError | None = None

    def answer(self, questions: Sequence[Question], keep: Callable[..., None]) -> None:
        """Ask for answers.

        Args:
            questions: the first of those that share a beginning is asked alone, so that the server's prefix cache has
                the beginning when the others come.
            keep: called with a question, its answer and columns for the journal, as soon as the answer is there.

        Raises:
            TooLittleMemory: a prompt does not fit in the server's context.
            PoSEError: the server refuses, cuts a prompt, or does not answer. Answers on their way are kept.
        """
        if questions and not self._form:
            self._form = self._learn()
        single: list[Question] = []
        for group in groups(questions):
            if len(group) == 1:
                single += group
            else:
                self._ask_all(group[:1], keep)
                self._ask_all(group[1:], keep)
        self._ask_all(single, keep)

    def require_fits(self, length: int) -> None:
        """Raise TooLittleMemory if a length does not fit in the context that the server states."""
        from pose_plugin.evaluation.memory import TooLittleMemory

        if self.server.window is not None and length > self.server.window:
            raise TooLittleMemory(
                f"length={length} is more than the server's context of {self.server.window} tokens; start it with a "
                "longer one, or use shorter lengths"
            )

    def _ask_all(self, questions: Sequence[Question], keep: Callable[..., None]) -> None:
        more = {"penalty": self.penalty} if self.penalty != 1 and not self._more else {}

        def one(question: Question) -> None:
            reply, sent = self._ask(question), len(question.ids)
            with self._lock:
                # In the thread of the request: what was answered is kept, even if the run is interrupted now.
                keep(question, reply.text, form=self._form, tokens=sent, read=reply.read, **more)

        with ThreadPoolExecutor(self.concurrency) as pool:
            asked = [pool.submit(one, question) for question in questions]
            try:
                for each in as_completed(asked):
                    each.result()
            finally:
                for each in asked:
                    each.cancel()

    def _ask(self, question: Question) -> Reply:
        ids = question.ids
        # The API takes four at most; the answer is cut at all of them afterwards.
        stop = list(getattr(question, "stop", ()))[:4]
        try:
            reply = self._send(self._form, ids, question.budget, stop)
        except TooLongError as error:
            from pose_plugin.evaluation.memory import TooLittleMemory

            raise TooLittleMemory(f"length={len(ids) + question.budget}: {error}") from None
        if reply.read is not None and reply.read < LEAST_READ * len(ids):
            # The score would silently be that of a shorter prompt.
            raise PoSEError(
                f"{self.server.address} read {reply.read} tokens of a prompt of {len(ids)}, so it cuts prompts; start "
                "it with a longer context"
            )
        return self._without_thoughts(reply)

    def _without_thoughts(self, reply: Reply) -> Reply:
        """Return the answer of a reasoning model. Raise PoSEError if its thoughts took all tokens of the answer."""
        if self._form != "chat":
            return reply
        _, end, text = reply.text.rpartition("</think>")
        begun = not end and text.lstrip().startswith("<think>")
        if begun or (reply.thoughts and not text.strip()):
            # The score would silently be 0.
            raise PoSEError(
                f"{self.server.address} spends the few tokens of an answer on the model's thoughts; switch reasoning "
                "off in the server's chat template, or serve the model so that it takes --prompts ids or text"
            )
        return replace(reply, text=text)

    def _send(self, form: str, ids: list[int], tokens: int, stop: list[str] | None = None) -> Reply:
        with self._lock:
            if self._gone is not None:
                raise self._gone
            if self._form:
                if self.max_requests is not None and self.sent >= self.max_requests:
                    said = f"--max-requests {self.max_requests} is reached; run the command again to resume"
                    raise ServerGoneError(said)
                self.sent += 1
            wait = self._pace.delay(time.monotonic(), len(ids) + tokens)
        time.sleep(wait)
        try:
            return self._request(form, ids, tokens, stop)
        except ServerGoneError as error:
            # All other requests would wait for their repeats too.
            self._gone = None if self._form == "" and isinstance(error, FailedError) else error
            raise

    def _request(self, form: str, ids: list[int], tokens: int, stop: list[str] | None) -> Reply:
        if form == "ids":
            return self.server.complete(ids, tokens, stop, self._more)
        # The server puts the beginning-of-text token before a text by itself.
        begin = len(leading_ids(self.tokenizer))
        text = self.tokenizer.decode(ids[begin:], clean_up_tokenization_spaces=False)
        if form == "text":
            return self.server.complete(text, tokens, stop, self._more)
        return self.server.chat(text, tokens + CHAT_ROOM, stop, self._more)

    def _learn(self) -> str:
        """Return the form of prompts that the server takes.

        Raises:
            PoSEError: it takes none, or its tokenizer is another one.
        """
        # verbose=False: no warning about a model_max_length below the sentence.
        ids = list(self.tokenizer(SENTENCE, verbose=False)["input_ids"])
        short = SENTENCE
        # A tokenizer of few entries makes many tokens of it, and a tiny model has a short window.
        while self.server.window and len(ids) > self.server.window // 2 and len(short) > 1:
            short = short[: len(short) // 2]
            ids = list(self.tokenizer(short, verbose=False)["input_ids"])
        taken: list[str] = []
        refusals: list[str] = []
        # Text first: ids of another tokenizer mean other words, or none, which some servers do not survive.
        for form in ("text", "ids", "chat"):
            if form == "chat" and taken:
                break
            try:
                reply = self._first(form, ids)
            except (RefusedError, FailedError) as error:
                refusals.append(str(error))
                continue
            taken.append(form)
            # A server may add a beginning-of-text token that the tokenizer does not.
            if form == "text" and reply.read is not None and abs(reply.read - len(ids)) > 1:
                raise PoSEError(
                    f"--like: its tokenizer makes {len(ids)} tokens of a test sentence, but {self.server.model} at "
                    f"{self.server.address} makes {reply.read}; give the folder of the served model or of its base"
                )
        wanted = [form for form in FORMS if form in taken and self._asked in ("auto", form)]
        if not wanted:
            raise PoSEError("; ".join(dict.fromkeys(refusals)))
        return wanted[0]

    def _first(self, form: str, ids: list[int]) -> Reply:
        """Send the test sentence; without the fields of vLLM if the server refuses them."""
        try:
            return self._send(form, ids, 1)
        except (RefusedError, FailedError):
            if not self._more:
                raise
        more, self._more = self._more, {}
        try:
            return self._send(form, ids, 1)
        except PoSEError:
            # They were not the reason.
            self._more = more
            raise


@dataclass
class ServedSource(Source):
    """A served model to evaluate. Tokenizer and config are those of a folder: the served model, or its base."""

    model: ServedModel = field(kw_only=True)

    @property
    def maximum(self) -> int | None:
        """The server's window if it states one."""
        return self.model.server.window or super().maximum

    @property
    def facts(self) -> dict[str, Any]:
        server = self.model.server
        return {**super().facts, "path": server.address, "served_model": server.model, "window": server.window}

    def notes_of(self, answers: Answers) -> list[str]:
        """Return how the prompts were sent, for readers of the results."""
        notes, rows = [], answers.rows()
        forms = {row.get("form") for row in rows}
        counted = [row["read"] - row["tokens"] for row in rows if row.get("read") and row.get("form") != "chat"]
        if "text" in forms:
            notes.append("prompts were sent as text, because the server takes no token ids")
        if "chat" in forms:
            notes.append("prompts were sent as chat messages, and the server's chat template changes them")
        if penalties := {row["penalty"] for row in rows if row.get("penalty")}:
            listed = ", ".join(map(str, sorted(penalties)))
            notes.append(
                f"the server takes no repetition_penalty, so it may have applied that of generation_config.json "
                f"({listed}), which makes digits of the prompt less likely in the answer; models in this process are "
                "measured without it"
            )
        if any(counted):
            notes.append(f"the server read {min(counted):+} to {max(counted):+} tokens more than a prompt has")
        return notes


def describe_served(like: Source, model: ServedModel, form: str) -> ServedSource:
    """Return the source of a served model.

    Args:
        like: the folder of the served model, or of its base.
        model: the served model.
        form: of prompts, as the user asked for it.
    """
    server = model.server
    return ServedSource(
        name=f"{server.model.rstrip('/').rsplit('/', 1)[-1]} (served)",
        path=" ".join([server.address, server.model, form]),
        base=like.path,
        config=like.config,
        tokenizer=like.tokenizer,
        record=like.record,
        revision=digest([like.revision, _weights(server)]),
        model=model,
    )


def penalty_of(like: Source) -> float:
    """Return the repetition penalty of generation_config.json in a folder; 1 for none."""
    from transformers import GenerationConfig

    for place in dict.fromkeys((like.path, like.base)):
        with suppress(OSError, ValueError, TypeError):
            return float(GenerationConfig.from_pretrained(place).repetition_penalty or 1)
    return 1.0


def _weights(server: Server) -> list[Any]:
    """Return what tells one state of the served weights from another, as far as a server states it.

    `created` does not count, because it is the time of the request in vLLM, SGLang and llama.cpp. Neither does the
    window: another start with the same weights may have a longer one.
    """
    root, meta = server.facts.get("root"), server.facts.get("meta")
    root = root if isinstance(root, str) and root else server.model
    sizes = {key: value for key, value in meta.items() if key != "n_ctx"} if isinstance(meta, dict) else None
    try:
        # Often a folder of this machine.
        state = fingerprints.of_model(root)
    except (OSError, ValueError):
        state = [root]
    return [state, server.facts.get("parent"), sizes]


def cost(model: ServedModel, missing: Iterable[tuple[Measure, int]], kept: Answers) -> str:
    """Return a line per measure and length, to read: how many requests are still needed, and their tokens.

    Raises:
        PoSEError: they are more than `max_requests`.
    """
    lines, requests, read, written = [], 0, 0, 0
    for measure, length in missing:
        if not isinstance(measure, Asking):
            lines.append(f"  {measure.name:<11} not estimated")
            continue
        window = model.server.window
        if window is not None and length > window:
            lines.append(f"  {measure.name:<11} {length:>8} tokens do not fit in the server's context of {window}")
            continue
        questions = unanswered(measure.questions(length), kept)
        requests += len(questions)
        read += sum(len(question.ids) for question in questions)
        written += sum(question.budget for question in questions)
        lines.append(f"  {measure.name:<11} {length:>8} tokens × {len(questions):>5} requests")
    total = f"{requests:,} requests, {read:,} tokens of prompts, at most {written:,} of answers"
    if model.max_requests is not None and requests > model.max_requests:
        raise PoSEError(
            f"--max-requests {model.max_requests} is less than what is missing: {total}. Nothing was sent; raise it to "
            f"{requests}, or measure less"
        )
    return "\n".join([*lines, f"  together {total}"])
