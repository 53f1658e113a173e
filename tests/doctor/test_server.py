"""`pose-plugin doctor --url`: it distinguishes a server that ignores the scaling from one that applies it."""

from __future__ import annotations

import json
import re
import threading

import pytest

pytest.importorskip("openai")

from pose_plugin import extend_context
from pose_plugin.cli import doctor
from pose_plugin.cli.main import main
from pose_plugin.doctor.server import DEPTHS, Needle, judge_needles
from tests.evaluation.model_server import ModelServer
from tests.models import make_llama, make_tokenizer
from tests.servers import Listening, completion

# The tokenizer cuts words that begin with its special tokens w0, w1 and w2, so neither prompts nor answers have them.
WORDS = " ".join(f"w{30 + i * 37 % 70}" for i in range(300))


def make_model(scaled: bool):
    """The random Llama with a window of 64, extended to 512 or not; equal weights."""
    from transformers import LlamaForCausalLM

    plain = make_llama(head_dim=16)
    for name, weight in plain.named_parameters():
        if "self_attn" in name or "lm_head" in name:
            weight.data *= 20  # a random model hardly looks at positions otherwise
    # Only words that the tokenizer does not cut.
    plain.lm_head.weight.data[:30] = plain.lm_head.weight.data[100:] = 0
    if not scaled:
        return plain
    model = LlamaForCausalLM(extend_context(plain.config, target_length=512, rope="yarn"))
    model.load_state_dict(plain.state_dict())
    return model


def served(model, window=512, logprobs=True):
    return ModelServer(model, make_tokenizer(), ("text",), window, logprobs=logprobs)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_model(scaled=True).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(doctor, "_text", lambda length: WORDS)
    return tmp_path / "model"


def ask(server, *words):
    return main(["doctor", "--url", server.url, "--lengths", "64", "--yes", *map(str, words)])


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_ignored_scaling_is_found(folder, scaled, logprobs, capsys):
    with served(make_model(scaled), logprobs=logprobs) as server:
        code = ask(server, "--like", folder)
    shown = capsys.readouterr().out
    assert ("ignores the scaling" in shown) == (not scaled) and ("applies the scaling" in shown) == scaled
    assert code == (1 if scaled else 2)  # this model finds no needle


def test_the_cost_comes_before_the_requests(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    with served(make_model(True)) as server:
        assert main(["doctor", "--url", server.url, "--like", str(folder)]) == 0
        assert server.log == []
    assert "13 requests" in capsys.readouterr().out


def test_a_smaller_window_of_the_server_is_a_warning(folder, capsys):
    with served(make_model(True), window=300) as server:
        assert ask(server, "--like", folder) == 1
    assert "max_model_len=300" in capsys.readouterr().out


def test_compared_prompts_fit_in_the_window_of_the_server(folder, capsys):
    with served(make_model(True), window=120) as server:
        assert ask(server, "--like", folder) == 1
        assert "applies the scaling" in capsys.readouterr().out
        assert ask(server, "--like", folder, "--compare", "64,128") == 2
    assert "--compare 128" in capsys.readouterr().err


def test_refused_lengths_are_reported(capsys):
    with served(make_model(True), window=40) as server:
        assert ask(server) == 1
    assert "refused" in capsys.readouterr().out


def test_no_server(capsys):
    with served(make_model(False)) as server:
        pass
    assert ask(server) == 2
    assert server.url in capsys.readouterr().err


class Odd(Listening):
    """Needs no model: finds every number, and behaves as a real server of some kind does."""

    def __init__(self, kind):
        self.kind = kind

    def facts(self):
        # The name and the windows of a server that is broken or hostile.
        odd = {"id": "ti\x1b[2Jny", "max_model_len": "32k", "context_length": None, "meta": [1]}
        return odd if self.kind == "odd values" else {"meta": {"n_ctx": 1000}}

    def list_models(self, client):
        if self.kind == "web page":
            client.send(200, b"<!doctype html>", {"Content-Type": "text/html"})
        elif self.kind in ("key", "no list"):
            client.refuse(401 if self.kind == "key" else 500, "Invalid API key")
        else:
            super().list_models(client)

    def refusal(self, chat, asked, key):
        """Return the status and the words by which this kind of server refuses a request, if it does."""
        refusals = {
            "only chat": (not chat, 404, "Not Found"),
            "chat model": (not chat, 404, "This is a chat model and not supported in the v1/completions endpoint."),
            "nothing there": (True, 404, "Not Found"),
            "no money": (True, 402, "Insufficient credits"),
            "repeats the key": (True, 403, f"{key} is not allowed"),
            "no log-probabilities": ("logprobs" in asked, 422, "Unexpected fields in the request: {'logprobs'}"),
            "only streams": (not asked.get("stream"), 400, "stream must be true"),
            "wrong name": (True, 404, "The model `tiny` does not exist."),
            "loading": (True, 503, "Loading model"),
            "broken": (True, 500, "no chat template"),
            "wrong tokenizer": (isinstance(asked.get("prompt"), str), 400, "unordered_map::at"),
        }
        applies, *refusal = refusals.get(self.kind, (False,))
        return refusal if applies else None

    def handle(self, client, seen, raw):
        kind, chat, asked = self.kind, "chat" in client.path, seen.body
        refusal = self.refusal(chat, asked, client.headers["Authorization"])
        if refusal:
            return client.refuse(*refusal)
        if kind == "redirects":
            return client.send(307, b"", {"Location": "http://127.0.0.1:1/v1/completions"})
        if kind == "slow":
            threading.Event().wait(1)
        words = (asked["messages"][0]["content"] if chat else asked["prompt"]).split()
        read = words[-200:] if kind == "cuts" else words[: len(words) // 2] if kind == "reads the beginning" else words
        key = re.search(r"pass key is (\d+)\. Remember", " ".join(read))
        text = f" {key[1]}." if key else " green."
        answer = completion(text, len(read if kind == "cuts" else words), 1, chat)
        if kind == "odd values":
            answer["choices"] = [{"text": [{"text": text}, 5], "logprobs": "none"}]
            answer["usage"] = {"prompt_tokens": "many"}
        if kind == "no choice":
            answer["choices"] = []
        if not asked.get("stream"):
            return client.reply(answer)
        stream = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()
        client.send(200, stream, {"Content-Type": "text/event-stream"})


@pytest.mark.parametrize(
    "kind, code, shown",
    [
        ("plain", 0, "finds the number"),
        ("only chat", 0, "finds the number"),
        ("chat model", 0, "finds the number"),
        ("odd values", 0, "finds the number"),
        ("no choice", 2, "/v1"),
        ("nothing there", 2, "/v1"),
        ("no money", 2, "Insufficient credits"),
        ("redirects", 2, "redirects to http://127.0.0.1:1/v1"),
        ("repeats the key", 2, "[key] is not allowed"),
        ("no log-probabilities", 0, "finds the number"),
        ("only streams", 0, "finds the number"),
        ("cuts", 2, "prompt_tokens=200"),
        ("reads the beginning", 1, "--like"),
        ("key", 2, "--key-variable"),
        ("no list", 2, "--model"),
        ("web page", 2, "--model"),
        ("wrong name", 2, "--model tiny"),
        ("loading", 2, "Loading model"),
        ("broken", 2, "no chat template"),
        ("wrong tokenizer", 2, "tokenizer files"),
        ("slow", 2, "--timeout 0.1"),
    ],
)
def test_servers_that_behave_in_other_ways(kind, code, shown, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-0123456789")
    words = ["--key-variable", "MY_KEY", *(["--timeout", "0.1"] if kind == "slow" else [])]
    with Odd(kind) as server:
        url = server.url.replace("//", "//me:pass-word-1@")
        assert main(["doctor", "--url", url, "--lengths", "800", "--yes", *words]) == code
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert shown in output
    assert "sk-secret" not in output and "pass-word" not in output and "\x1b[2J" not in output


def test_the_answers_as_json(capsys):
    with Odd("only chat") as server:
        assert main(["doctor", "--url", server.url, "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chat"] and found["window"] == 1000 and found["rope"] is None
    assert [needle["found"] for needle in found["needles"]] == [True] * 6


def test_a_folder_that_does_not_load_is_no_traceback(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden', encoding="utf-8")
    with Odd("plain") as server:
        assert main(["doctor", "--url", server.url, "--like", str(tmp_path), "--lengths", "800", "--yes"]) == 2
    assert f"pose-plugin doctor {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("lost, near_the_end", [([0.1], True), ([0.1, 0.5], True), ([0.5], False), ([0.9], False)])
def test_only_numbers_near_the_end(lost, near_the_end):
    asked = [Needle(800, depth, 1000, depth not in lost) for depth in DEPTHS]
    (finding,) = judge_needles(asked, None)
    assert ("near the end" in str(finding)) == near_the_end


@pytest.mark.parametrize(
    "words, shown",
    [
        (["FOLDER", "--like", "x", "--lengths", "4k"], "--like x, --lengths 4k have no effect without --url; give"),
        (["FOLDER", "--compare", "64"], "--compare 64 has no effect without --url; give"),
        (["FOLDER", "--model", "x", "--timeout", "9"], "--model x, --timeout 9.0 have no effect without --url; give"),
        (
            ["FOLDER", "--key-variable", "sk-SECRET", "--yes"],
            "--key-variable, --yes have no effect without --url",
        ),
        (["--url", "http://localhost:1/v1", "--compare", "64"], "--compare 64 has no effect without --like; give"),
        (["--url", "http://localhost:1/v1", "--base", "x"], "--base x has no effect without --like; give"),
        (["--url", "http://localhost:1/v1", "--timeout", "0"], "--timeout: '0' is not a number above 0"),
        (["--url", "http://localhost:1/v1", "--timeout", "-1"], "--timeout: '-1' is not a number above 0"),
        (["--url", "http://localhost:1/v1", "--timeout", "1e9"], "--timeout: '1e9' is not a number above 0 and up to"),
    ],
)
def test_an_option_that_can_do_nothing_is_an_error(words, shown, tmp_path, capsys):
    make_llama().config.save_pretrained(tmp_path)
    assert main(["doctor", *(str(tmp_path) if word == "FOLDER" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert shown in error and "SECRET" not in error


@pytest.mark.parametrize("word", ["some/folder", "--mend=other"])
def test_options_for_folders_have_no_effect_on_a_server(word, capsys):
    assert main(["doctor", "--url", "http://localhost:1/v1", word]) == 2
    assert "--url" in capsys.readouterr().err
