"""Servers that fail in many ways: no answer is lost or paid for twice, and each run ends with a clear message."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from pose_plugin.cli.main import main
from pose_plugin.synthesize import server as servers
from pose_plugin.synthesize.answers import Questions
from pose_plugin.synthesize.settings import Settings
from pose_plugin.utils.clean import Cleaner
from tests.forked import LIMIT
from tests.servers import held_port
from tests.synthesize.proxy import REFUSALS, faulty
from tests.synthesize.runs import arguments, lines, manifest
from tests.synthesize.server import Server, write_answer

# Fault of the second request → what the manifest counts it as, unless the openai client repeated it: unusable.
PASSING = {
    "429 |slow down": "",
    "500 |oops": "",
    "503 |busy": "",
    "hang up": "",
    "cut": "",
    "broken body": "",
    "html": "",
    "slow": "",
    "not json": "its JSON is broken or cut off",
    "wrong schema": "questions.0.question: Field required",
    "empty choices": "",
    "no usage": "",
}


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_is_repeated(one_book, tmp_path, monkeypatch, fault):
    with faulty({1: fault}) as proxy:
        line = arguments(one_book, tmp_path, proxy.url, "--timeout", "60")
        if fault == "slow":
            # On a busy machine, a good answer may take longer than any short limit.
            monkeypatch.setattr(asyncio, "wait_for", proxy.wait_for())
            line += ["--concurrency", "1"]
        assert main(line) == 0
        (row,) = lines(tmp_path / "train.jsonl")
        assert len(row["messages"]) == 20
        found = manifest(tmp_path)["requests"]
        assert found["faults"] == {}
        assert sum(found["unusable"].values()) == bool(PASSING[fault])
        assert "".join(found["unusable"]).startswith(PASSING[fault])
        assert found["asked"] == len(proxy.log) == 5 + (0 if fault == "no usage" else 1)
        assert found["repeated"] == len(proxy.log) - 5 - bool(PASSING[fault])
        # The server worked for answers that were spoilt on their way back, but not for refused requests.
        assert len(proxy.forwarded) == len(proxy.log) - (fault == "slow" or fault.startswith(REFUSALS))
        # Each answered request was sent once.
        assert len(set(proxy.answered())) == len(proxy.answered())


# Fault of every answer → whether its content is used all the same.
MALFORMED = {
    "content parts": True,
    "content number": False,
    "message text": False,
    "choices object": False,
    "usage list": True,
    "usage text": True,
    "usage negative": True,
    "usage huge": True,
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_answers_are_counted_and_do_not_break_the_folder(one_book, tmp_path, fault):
    """They were paid for, so they are kept. Impossible token counts are estimated, or the budget would not hold."""
    prices = ("--price-input", "1", "--price-output", "1", "--budget", "1", "--tries", "1")
    with faulty(fault_for=lambda body: fault) as proxy:
        line = arguments(one_book, tmp_path, proxy.url, *prices)
        assert main(line) == 1 - MALFORMED[fault]
        found = manifest(tmp_path)
        assert 0 < found["cost"] < 1 and found["requests"]["answers_in_journal"] == len(proxy.log) == 5
        proxy.fault_for = lambda body: ""
        assert main([*line, "--tries", "2"]) == 0
        assert len(proxy.log) == (5 if MALFORMED[fault] else 10)


@pytest.mark.parametrize("limit", ["timeout", "total"])
def test_a_limit_ends_a_request(tmp_path, limit):
    """Silence ends it after --timeout seconds; for a server that sends single bytes there is a limit on the whole."""
    with faulty(fault_for=lambda body: "slow") as proxy:
        settings = Settings(
            inputs=(),
            output=tmp_path,
            tokenizer="t",
            model="m",
            window=6000,
            base_url=proxy.url,
            timeout=0.2,
            retries=0,
        )

        async def ask():
            server = servers.Server(settings, "none", Cleaner())
            if limit == "total":
                server._client.timeout = None
            try:
                await server.ask("?", Questions, 0)
            finally:
                await server.close()

        with pytest.raises(servers.FaultError, match=r"0\.2 s"):
            asyncio.run(ask())
        assert proxy.forwarded == []


def test_retry_after_is_respected(one_book, tmp_path):
    """The openai client's own wait would be 0.5 s at most."""
    with faulty({0: "429 |slow down"}, retry_after="1") as proxy:
        assert main(arguments(one_book, tmp_path, proxy.url, "--concurrency", "1")) == 0
        assert min(seen.time - proxy.log[0].time for seen in proxy.log[1:]) >= 1


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({0: "400 |response_format json_schema is not supported"}, {"answer_format": "object-schema"}),
        (
            {0: "400 |json_schema unknown", 1: "422 |response_format.schema: extra"},
            {"answer_format": "object"},
        ),
        (
            {0: "400 |json_schema unknown", 1: "422 |no schema", 2: "400 |response_format json_object is unknown"},
            {"answer_format": "text"},
        ),
        ({0: "400 |use max_completion_tokens instead"}, {"length_parameter": "max_completion_tokens"}),
        ({0: "400 |temperature does not support 0.7"}, {"temperature_sent": False}),
        (
            {0: "400 |Invalid schema for response_format: 'maxItems' is not permitted"},
            {"limits_sent": False, "answer_format": "schema"},
        ),
        ({0: "422 |body, seed: Extra inputs are not permitted"}, {"seed_sent": False}),
    ],
)
def test_parameters_that_a_server_refuses_are_left_out(one_book, tmp_path, faults, expected):
    with faulty(faults) as proxy:
        assert main(arguments(one_book, tmp_path, proxy.url, "--concurrency", "1")) == 0
        assert len(proxy.log) == 5 + len(faults)
        last = proxy.log[-1].body
    found = manifest(tmp_path)
    assert expected.items() <= found["server"].items()
    assert found["requests"]["faults"] == {}
    formats = {"schema": "json_schema", "object-schema": "json_object", "object": "json_object", "text": None}
    limited = found["server"]["limits_sent"] and found["server"]["answer_format"] in ("schema", "object-schema")
    assert ("maxItems" in json.dumps(last)) == limited
    assert last.get("response_format", {}).get("type") == formats[found["server"]["answer_format"]]
    assert found["server"]["length_parameter"] in last
    assert ("temperature" in last) is found["server"]["temperature_sent"]
    assert ("seed" in last) is found["server"]["seed_sent"]


def test_a_fixed_answer_format_is_not_changed(one_book, tmp_path, capsys):
    with faulty(fault_for=lambda body: "400 |response_format json_schema is not supported") as proxy:
        code = main(arguments(one_book, tmp_path, proxy.url, "--answer-format", "schema"))
    assert code == 1
    assert manifest(tmp_path)["given_up_count"] == 5
    assert "400: response_format json_schema is not supported" in manifest(tmp_path)["given_up"][0]


def test_a_request_that_never_succeeds_is_left_out(place, tmp_path, capsys):
    victim = (place / "books" / "book0.txt").read_text()[:200]

    def fault(body):
        return "500 |oops" if victim in body["messages"][0]["content"] else ""

    def whole_book_asked(extra=()):
        return main(arguments(place, tmp_path, proxy.url, "--tasks", "multi", "--retries", "2", *extra))

    with faulty(fault_for=fault) as proxy:
        assert whole_book_asked() == 1
        out = capsys.readouterr()
        assert (
            "left out: " in out.err
            and "book0.txt, multi, document: no answer after up to 2 repeats (--retries)" in out.err
        )
        assert "given up: 1 requests without an answer; the same command repeats them" in out.out
        assert len(lines(tmp_path / "train.jsonl")) == 3
        assert manifest(tmp_path)["state"] == "finished"
        # The server works again: only the missing request is sent.
        proxy.fault_for = lambda body: ""
        before = len(proxy.log)
        assert whole_book_asked() == 0
        assert len(proxy.log) == before + 1
    assert len(lines(tmp_path / "train.jsonl")) == 4


def test_unusable_answers_are_not_paid_for_again(one_book, tmp_path, capsys):
    with Server(write=lambda prompt: "I would rather not.") as server:
        line = arguments(one_book, tmp_path, server.url, "--tasks", "multi")
        assert main(line) == 1
        out = capsys.readouterr()
        assert "no usable answer in 3 tries (--tries), last: it holds no JSON object" in out.err
        assert "given up: 1 requests with 3 unusable answers each; --tries 6 asks again" in out.out
        assert main(line) == 1
        assert len(server.log) == 3
        # Each try adds the reason, and has another seed.
        texts = [seen.body["messages"][0]["content"] for seen in server.log]
        assert "An earlier answer could not be used: it holds no JSON object" in texts[1]
        assert [seen.body["seed"] for seen in server.log] == [0, 1, 2]
        found = manifest(tmp_path)
        assert found["tokens"]["output"] == 150 and found["rows"]["count"] == 0
        server.write = None
        assert main([*line, "--tries", "4"]) == 0
        assert len(server.log) == 4
    assert manifest(tmp_path)["tokens"]["output"] == 200


STOPS = {
    "401 |Incorrect API key provided: sekret-key": ("the server refuses every request", "check the key"),
    "404 |no such model": ("the server refuses every request (404: no such model)", "check --model and --base-url"),
    "402 |pay": ("the server requires payment (402: pay)", ""),
    "429 insufficient_quota|You exceeded your quota": ("the server requires payment (429:", ""),
}


@pytest.mark.parametrize("fault", STOPS)
def test_errors_that_no_repeat_can_fix_stop_the_run(one_book, tmp_path, capsys, monkeypatch, fault):
    monkeypatch.setenv("OPENAI_API_KEY", "sekret-key")
    with faulty(fault_for=lambda body: fault) as proxy:
        # The openai client repeats a 429, whatever its code.
        line = arguments(one_book, tmp_path, proxy.url, "--concurrency", "1", "--retries", "0")
        assert main(line) == 1
        out = capsys.readouterr()
        for part in STOPS[fault]:
            assert part in out.err
        assert "run the same command again to resume" in out.err
        assert len(proxy.log) == 1
        assert proxy.log[0].headers["authorization"] == "Bearer sekret-key"
        proxy.fault_for = lambda body: ""
        assert main(line) == 0
    written = out.out + out.err + "".join(p.read_text() for p in tmp_path.iterdir())
    assert "sekret-key" not in written


def test_a_key_that_is_revoked_during_the_run(one_book, tmp_path, capsys):
    with faulty({2: "401 |revoked"}) as proxy:
        assert main(arguments(one_book, tmp_path, proxy.url, "--concurrency", "1")) == 1
        assert len(proxy.log) == 3
    assert "stopped: the server refuses every request (401: revoked); check the key" in capsys.readouterr().err
    assert manifest(tmp_path)["requests"]["answers_in_journal"] == 2


def test_a_server_that_refuses_every_request(place, tmp_path, capsys):
    """The run stops instead of sending thousands, and the error says what to change."""
    said = "This model's maximum context length is 4096 tokens"
    with faulty(fault_for=lambda body: f"400 |{said}") as proxy:
        assert main(arguments(place, tmp_path, proxy.url, "--concurrency", "1")) == 1
        assert len(proxy.log) == 8
    err = capsys.readouterr().err
    assert f"stopped: the server refuses every request (8 so far), last: 400: {said}; lower " in err
    assert "--answer-tokens, --chunk-tokens or --request-tokens" in err


def test_refused_texts_do_not_stop_a_resumed_run(place, tmp_path):
    with faulty({1: "401 |revoked"}) as proxy:
        assert main(arguments(place, tmp_path, proxy.url, "--concurrency", "1")) == 1
    with faulty(dict.fromkeys(range(8), "400 |not this text")) as proxy:
        assert main(arguments(place, tmp_path, proxy.url, "--concurrency", "1")) == 1
        # Four documents of five requests, one of which was answered before.
        assert len(proxy.log) == 19
    assert manifest(tmp_path)["requests"]["answers_in_journal"] == 12


def test_no_server_at_the_address(one_book, tmp_path, capsys):
    """Of five requests at once, the first that has no repeat left stops all."""
    with held_port() as port:
        url = "http://{}:{}/v1".format(*port.getsockname())
        assert main(arguments(one_book, tmp_path, url, "--retries", "1")) == 1
    err = capsys.readouterr().err
    assert f"stopped: no connection to {url}/ (ConnectError: " in err
    assert err.count("start the server there, or correct --base-url") == 1
    assert manifest(tmp_path)["requests"]["asked"] <= 10
    assert manifest(tmp_path)["unfinished"] == 1


def test_a_server_that_closes_every_connection(place, tmp_path, capsys):
    with faulty(fault_for=lambda body: "hang up") as proxy:
        assert main(arguments(place, tmp_path, proxy.url, "--retries", "1")) == 1
        assert len(proxy.log) < 2 * 20
    err = capsys.readouterr().err
    assert "stopped: 8 requests in a row got no answer, last: " in err and "see --base-url" in err
    assert manifest(tmp_path)["requests"]["answers_in_journal"] == 0


def test_a_server_that_stops_during_the_run(one_book, tmp_path, capsys):
    with Server() as server:
        line = arguments(one_book, tmp_path, server.url, "--retries", "0", "--concurrency", "1")

        def leave(prompt):
            server.stop()
            return write_answer(prompt)

        server.write = leave
        assert main(line) == 1
    err = capsys.readouterr().err
    assert (
        err.count("no answer after up to 0 repeats (--retries), last: no connection to ") == 4
        and "stopped: " not in err
    )
    assert len(lines(tmp_path / "train.jsonl")) == 1


def test_a_long_retry_after_is_reported(one_book, tmp_path, capsys):
    with faulty(fault_for=lambda body: "429 |tomorrow", retry_after="86400") as proxy:
        assert main(arguments(one_book, tmp_path, proxy.url, "--concurrency", "1", "--retries", "0")) == 1
    assert "429: tomorrow; it asks to wait 86400 s" in capsys.readouterr().err


def test_concurrency_is_respected(place, tmp_path):
    def wait(text):
        end = time.monotonic() + LIMIT
        while server.peak < 3 and time.monotonic() < end:
            time.sleep(0.01)
        return write_answer(text)

    with Server(pause=0.03, write=wait) as server:
        assert main(arguments(place, tmp_path, server.url, "--concurrency", "3")) == 0
        assert server.peak == 3


def test_budget_is_never_exceeded(place, tmp_path, capsys):
    prices = ("--price-input", "1000", "--price-output", "1000", "--answer-tokens", "100", "--concurrency", "2")
    with Server() as server:
        line = arguments(place, tmp_path, server.url, *prices)
        assert main([*line, "--budget", "3"]) == 1
        found = manifest(tmp_path)
        assert 0 < found["cost"] <= 3
        assert found["state"] == "stopped" and found["unfinished"] > 0
        assert "stopped: the next request might exceed --budget 3" in capsys.readouterr().err
        asked = len(server.log)
        assert asked * 50 == found["tokens"]["output"]
        # A larger budget resumes, and includes what was spent before.
        assert main([*line, "--budget", "100"]) == 0
        assert len(server.log) == 20
    found = manifest(tmp_path)
    assert found["tokens"]["output"] == 20 * 50 and found["unfinished"] == 0
    assert found["cost"] == pytest.approx((found["tokens"]["input"] + 1000) * 1e-3)
