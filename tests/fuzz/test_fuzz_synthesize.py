"""Answers of any shape: a run never breaks, pays for nothing twice, and writes rows that can be trained."""

from __future__ import annotations

import itertools
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pose_plugin.synthesize import run as runs
from pose_plugin.synthesize.output import MarkerSplitter
from pose_plugin.synthesize.select import assign, collect
from pose_plugin.synthesize.server import FaultError, _completion, _reply
from pose_plugin.synthesize.settings import parse_settings
from tests.fuzz.settings import fuzz
from tests.synthesize.material import byte_tokenizer, story
from tests.synthesize.runs import lines, manifest

KEY = "sk-SECRET-0123456789"
BOOK = story(1, 1500)
SPICE = ["", "\x1b[31m", "\ud800", "\u2028", "<|im_end|>", "</s>", KEY, "\\u0000", "</think>", "<think>", "\n\n\n\n\n"]
TEXTS = st.sampled_from([*SPICE, BOOK[:60], BOOK[-60:], BOOK[:20], "Ahab", "x" * 300]) | st.text(max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | TEXTS
ANYTHING = st.recursive(SCALARS, lambda some: st.lists(some, max_size=3) | st.dictionaries(TEXTS, some, max_size=3))
QUESTION = st.fixed_dictionaries(
    {"question": TEXTS | ANYTHING, "answer": TEXTS | ANYTHING, "quotes": st.lists(TEXTS, max_size=3) | ANYTHING}
)
ANSWERS = (
    st.fixed_dictionaries({"questions": st.lists(QUESTION, max_size=4)})
    | st.fixed_dictionaries({"characters": st.lists(TEXTS, max_size=3)})
    | st.fixed_dictionaries({"biography": TEXTS})
    | ANYTHING
)
USAGE = st.fixed_dictionaries({"prompt_tokens": SCALARS, "completion_tokens": SCALARS}) | ANYTHING


@st.composite
def bodies(draw) -> bytes:
    """Return the body of a response: any JSON, or a completion with an answer that may be cut off."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=20) | ANYTHING.map(lambda value: json.dumps(value).encode()))
    content = draw(TEXTS) + json.dumps(draw(ANSWERS)) + draw(TEXTS)
    content = content[: draw(st.sampled_from([None, None, len(content) // 2]))]
    choice = {"message": {"content": draw(st.just(content) | ANYTHING)}, "finish_reason": draw(SCALARS)}
    completion = {"choices": [choice], "usage": draw(USAGE), "model": draw(SCALARS)}
    return json.dumps(completion).encode()


class Fake:
    """A server that answers with these bodies, in turn."""

    address, sent, repeated, stopped = "http://h/v1", 0, 0, False
    bodies: tuple[bytes, ...] = ()

    def __init__(self, settings, key, clean):
        self._next = itertools.cycle(type(self).bodies)

    async def ask(self, text, form, seed):
        type(self).sent += 1
        found = _completion(next(self._next))
        if found is None:
            raise FaultError("the answer is not a chat completion")
        return _reply(found, 1000)

    async def close(self):
        pass

    def described(self):
        return {}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    (folder / "book.txt").write_text(BOOK)
    return folder


@fuzz(cost=2)
@given(st.lists(bodies(), min_size=1, max_size=6), st.sampled_from(["single", "multi", "biography"]))
def test_any_answers(documents, tmp_path_factory, given_bodies, task):
    output = tmp_path_factory.mktemp("output")
    settings = parse_settings(
        {
            "inputs": (documents,), "output": output, "tokenizer": "t", "model": "m", "window": 4000, "tasks": task,
            "chunk_tokens": 500, "questions": 3, "tries": 2, "price_input": 1, "price_output": 1,
        }
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    found = collect(settings, tokenizer)
    items = assign(found, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setattr(runs, "Server", Fake)
        patch.setattr(Fake, "bodies", tuple(given_bodies))
        patch.setattr(Fake, "sent", 0)
        runs.run(items, found, settings, tokenizer, progress=False)
        first, sent = lines(output / "train.jsonl"), Fake.sent
        stored = lines(output / "journal.jsonl")
        _check(output, first, tokenizer)
        # What has an answer, usable or not, is not requested again.
        given_up = manifest(output)["given_up"]
        patch.setattr(Fake, "sent", 0)
        runs.run(items, found, settings, tokenizer, progress=False)
        if not any("no answer" in sentence for sentence in given_up):
            assert Fake.sent == 0 and sent == len(stored)
            assert lines(output / "train.jsonl") == first
    assert len({(row["key"], row["attempt"]) for row in lines(output / "journal.jsonl")}) >= len(stored)


def _check(output, rows, tokenizer):
    written = "".join(path.read_text(encoding="utf-8") for path in output.iterdir())
    assert KEY[: len(KEY) // 2] not in written and "\x1b" not in written
    split = MarkerSplitter(tokenizer)
    for row in rows:
        for message in row["messages"]:
            text = message["content"]
            assert text == text.strip() != "" and split(text)[1] == 0
            assert not any(unicodedata.category(letter) == "Cc" and letter not in "\n\t" for letter in text)
    found = manifest(output)
    assert found["state"] in ("finished", "stopped") and found["rows"]["count"] == len(rows)
    assert found["tokens"]["input"] >= 0 <= found["tokens"]["output"] and found["cost"] >= 0
