"""A server that answers anything: `evaluate --url` and `doctor --url` end with a sentence, and repeat no secret."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("openai")

from pose_plugin.cli.main import main
from tests.fuzz.settings import fuzz
from tests.fuzz.test_fuzz_synthesize import ANYTHING, SCALARS, TEXTS
from tests.servers import Listening

BASE = Path(__file__).parents[2] / "example_configs" / "quickstart" / "base"
KEY = "sk-SECRET-0123456789"
STATUSES = [200, 200, 200, 200, 301, 307, 400, 401, 402, 403, 404, 413, 422, 429, 500, 501, 503]
REFUSALS = ["maximum context length", "logprobs", "stream", "model", "chat", f"wrong key {KEY}", f"Bearer {KEY}"]


@st.composite
def answers(draw) -> tuple[int, bytes]:
    """The status and the body of an answer: of the right form with odd values, an error, or anything."""
    status = draw(st.sampled_from(STATUSES))
    if draw(st.integers(0, 5)) == 0:
        return status, draw(st.binary(max_size=20) | ANYTHING.map(lambda value: json.dumps(value).encode()))
    if status >= 400:
        return status, json.dumps({"error": {"message": draw(st.sampled_from(REFUSALS) | TEXTS)}}).encode()
    logprobs = {"token_logprobs": draw(st.lists(st.floats(max_value=0) | SCALARS, max_size=3) | ANYTHING)}
    choice = {"index": 0, "finish_reason": "stop", "text": draw(TEXTS | ANYTHING), "message": draw(ANYTHING)}
    choice |= {"logprobs": draw(st.none() | st.just(logprobs) | ANYTHING)}
    usage = {"prompt_tokens": draw(SCALARS), "completion_tokens": draw(SCALARS), "total_tokens": draw(SCALARS)}
    values = {"id": "1", "choices": draw(st.just([choice]) | ANYTHING), "usage": draw(st.just(usage) | ANYTHING)}
    return status, draw(st.sampled_from([b"", b"", b"data: "])) + json.dumps(values).encode()


@st.composite
def lists_of_models(draw) -> tuple[int, bytes]:
    model = {
        "id": draw(st.sampled_from(["m", "m", KEY, f"folder/{KEY}", "m\x1b[2J"]) | TEXTS),
        "max_model_len": draw(st.just(4096) | SCALARS),
        "meta": draw(ANYTHING),
    }
    values = {"object": "list", "data": draw(st.just([model]) | ANYTHING)}
    return draw(st.sampled_from([200, 200, 200, 404, 500])), json.dumps(draw(st.just(values) | ANYTHING)).encode()


class Hostile(Listening):
    """Answers with what a test has set, in turn."""

    models: tuple[int, bytes] = (200, b"{}")
    answers: tuple[tuple[int, bytes], ...] = ()

    def list_models(self, client):
        client.send(*self.models, {"Location": f"http://h/{KEY}"})

    def handle(self, client, seen, raw):
        client.send(*self.answers[len(self.log) % len(self.answers)], {"Location": f"http://h/{KEY}"})


@pytest.fixture(scope="module")
def server():
    with Hostile() as server:
        yield server


COMMANDS = {
    "doctor": ["--yes", "--lengths", "64"],
    "evaluate": ["--like", str(BASE), "--lengths", "300", "--trials", "1", "--retries", "1", "--no-figures", "--quiet"],
}


ONE_MODEL = (200, b'{"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}')
NAMED_AS_THE_KEY = (200, ONE_MODEL[1].replace(b'"m"', f'"{KEY}"'.encode()))


@fuzz(cost=10)
@example(models=NAMED_AS_THE_KEY, given_answers=[(200, b"")], name="doctor")
@example(models=NAMED_AS_THE_KEY, given_answers=[(200, b"")], name="evaluate")
@example(models=ONE_MODEL, given_answers=[(200, b"")], name="doctor")
@example(models=ONE_MODEL, given_answers=[(200, b'{"choices": [{"text": "", "logprobs": {"token_logprobs": 1}}]}')],
         name="doctor")  # fmt: skip
@given(
    models=lists_of_models(),
    given_answers=st.lists(answers(), min_size=1, max_size=4),
    name=st.sampled_from(sorted(COMMANDS)),
)
def test_any_server(server, tmp_path_factory, models, given_answers, name):
    output = tmp_path_factory.mktemp("output")
    server.models, server.answers = models, tuple(given_answers)
    words = [*COMMANDS[name], *(["--output", str(output)] if name == "evaluate" else [])]
    words += ["--url", server.url, "--key-variable", "THE_KEY"]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THE_KEY", KEY)
        # The openai client waits before it repeats a request.
        patch.setattr(time, "sleep", lambda seconds: None)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([name, *words])
    assert code in (0, 1, 2)
    shown = out.getvalue() + err.getvalue() + "".join(file.read_text() for file in output.iterdir())
    assert "SECRET" not in shown and "\x1b" not in shown and "Traceback" not in shown
    assert "POSE_TRACEBACK" not in err.getvalue(), err.getvalue()
