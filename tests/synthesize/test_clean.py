"""No text from outside reaches a file or the terminal with a secret or a control character."""

from __future__ import annotations

import os

import pytest

from pose_plugin.cli.main import main
from pose_plugin.utils.clean import Cleaner, secrets_of
from tests.synthesize import proxy as proxies
from tests.synthesize.material import story
from tests.synthesize.proxy import CHANGES, faulty
from tests.synthesize.runs import arguments, lines, make_place, manifest
from tests.synthesize.server import Server, write_answer

KEY = "sk-SECRET/0123456789"
ESCAPED = "sk\\u002dSECR\\u0045T\\/01234\\u0000" + "56789"
RED = "\x1b[31m\x9b1m"


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        " ".join(KEY),
        "\x00".join(KEY),
        KEY.replace("-", "\\u002d"),
        KEY.replace("/", "\\/"),
        KEY.replace("/", "%2F"),
    ],
)
def test_a_secret_is_hidden_however_it_is_spelled(text):
    clean = Cleaner([KEY])
    assert clean.text(f"a {text} b") == "a [key] b"
    assert clean.line(f"a\n {text} b") == "a [key] b"


def test_half_of_a_secret_is_hidden():
    """An answer may end within it; shorter beginnings such as `sk-proj-` are words."""
    clean = Cleaner([KEY])
    assert clean.text(f'a "{KEY[:-3]}" b') == 'a "[key]" b'
    assert clean.text(KEY[:9]) == KEY[:9]


def test_short_secrets_are_words():
    assert Cleaner(["none", ""]).text("none\r\nof them\x1b") == "none\nof them"


def test_a_key_that_is_a_word_of_the_documents_is_refused(tmp_path, capsys, monkeypatch):
    """Servers that need no key are often given `whatever`, and [key] would replace that word in the answers."""
    place = make_place(tmp_path / "place", books=1)
    (place / "books" / "word.txt").write_text(f"{story(1, 900)} They eat whatever they find.", encoding="utf-8")
    with Server() as server:
        line = arguments(place, tmp_path / "out", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "whatever")
        assert main(line) == 2
        assert "word.txt holds the key" in capsys.readouterr().err and not server.log
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert main(line) == 0


def test_what_is_secret_in_an_address():
    found = secrets_of(KEY, "https://anna:p%40ssword1@host/v1?token=0123456789")
    assert {KEY, "p@ssword1", "p%40ssword1", "YW5uYTpwQHNzd29yZDE=", "0123456789"} <= set(found)


def _everywhere(reply):
    reply["model"] = f"m-{KEY}{RED}"
    reply["choices"][0]["finish_reason"] = KEY
    message = reply["choices"][0]["message"]
    message["content"] = message["content"].replace('"answer": "', f'"answer": "{ESCAPED}{KEY}\\u001b')


def _texts(value):
    if isinstance(value, (dict, list)):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in _texts(each)]
    return [str(value)]


@pytest.mark.parametrize(
    "fault", ["key everywhere", f"500 |{KEY}{RED}", f"400 |{' '.join(KEY)}{RED}", f"401 |{KEY}", f"307 |{KEY}", "html"]
)
def test_a_key_that_the_server_repeats_is_not_written(one_book, tmp_path, capsys, monkeypatch, fault):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setitem(CHANGES, "key everywhere", _everywhere)
    monkeypatch.setattr(proxies, "PAGE", f"<html>Authorization: Bearer {KEY}{RED}</html>".encode())
    with faulty(fault_for=lambda body: fault) as proxy:
        main(arguments(one_book, tmp_path, proxy.url, "--retries", "0"))
        assert proxy.log[0].headers["authorization"] == f"Bearer {KEY}"
    out = capsys.readouterr()
    files = [path.read_text() for path in tmp_path.iterdir()]
    # What a reader of the files gets, besides their bytes.
    read = [text for name in ("journal", "train", "sources") for text in _texts(lines(tmp_path / f"{name}.jsonl"))]
    written = "".join([out.out, out.err, *files, *read])
    assert "SECRET" not in written.replace(" ", "") and "[key]" in written
    assert not {"\x1b", "\x9b"} & set(written)


def test_control_characters_in_json_reach_no_terminal(one_book, tmp_path, capsys):
    with Server(write=lambda prompt: '{"characters": ["Ju\\u001b[31mdas \\u009b"]}') as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "biography", "--tries", "1")) == 1
    out = capsys.readouterr()
    (sentence,) = manifest(tmp_path)["given_up"]
    assert "Ju[31mdas" in sentence and "Ju[31mdas" in out.err
    assert not {"\x1b", "\x9b"} & set(sentence + out.err + out.out)


def test_a_journal_of_an_earlier_run_is_cleaned(one_book, tmp_path, monkeypatch):
    """It may hold what was not known to be a secret."""
    with Server(write=lambda prompt: write_answer(prompt).replace("Answer 0", f"Answer {KEY}")) as server:
        assert main(arguments(one_book, tmp_path, server.url)) == 0
        assert KEY in (tmp_path / "train.jsonl").read_text()
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert main(arguments(one_book, tmp_path, server.url)) == 0
        assert len(server.log) == 5
    assert KEY not in (tmp_path / "train.jsonl").read_text()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_sends_no_document_to_another_address(one_book, tmp_path, capsys, status):
    with Server() as other, faulty(fault_for=lambda body: f"{status} |{other.url}/chat/completions") as proxy:
        line = arguments(one_book, tmp_path, proxy.url, "--concurrency", "1")
        assert main(line) == 1
        assert (len(proxy.log), other.log) == (1, [])
        assert f"the server redirects ({status}) to {other.url}" in capsys.readouterr().err
        assert main([*line, "--base-url", other.url]) == 0
    assert len(lines(tmp_path / "train.jsonl")) == 1


def test_names_of_files_are_printable(tmp_path, capsys):
    """They need not be UTF-8, and may hold control characters."""
    place, output = make_place(tmp_path / "place", books=0), tmp_path / "output"
    try:
        with open(os.fsencode(place / "books") + b"/\xff\x1b[31m.txt", "w") as file:
            file.write(story(1, 3000))
    except OSError:
        pytest.skip("this file system has no such names")
    with Server(write=lambda prompt: "no") as server:
        assert main(arguments(place, output, server.url, "--tries", "1")) == 1
        assert "\x1b" not in capsys.readouterr().err
        server.write = None
        assert main(arguments(place, output, server.url, "--tries", "2")) == 0
    (source,) = lines(output / "sources.jsonl")
    (name,) = manifest(output)["files"]
    assert source["documents"][0]["source"] == name and name.endswith("\\udcff\\x1b[31m.txt")
