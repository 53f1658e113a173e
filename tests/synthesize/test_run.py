"""From documents to rows through a real HTTP server."""

from __future__ import annotations

import re

from pose_plugin.cli.main import main
from pose_plugin.synthesize import client
from tests.synthesize.proxy import faulty
from tests.synthesize.runs import arguments, lines, manifest
from tests.synthesize.server import Server, documents_of, write_answer


def test_single_detail_from_documents_to_rows(place, tmp_path):
    with Server() as server:
        assert main(arguments(place, tmp_path, server.url)) == 0
        asked = len(server.log)
        # Run again: everything is in the journal.
        assert main(arguments(place, tmp_path, server.url)) == 0
        assert len(server.log) == asked == 20
    rows = lines(tmp_path / "train.jsonl")
    assert len(rows) == 4
    books = {path.read_text(encoding="utf-8") for path in (place / "books").iterdir()}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * 10
        first = row["messages"][0]["content"]
        (book,) = [book for book in books if first.startswith(book)]
        books.remove(book)
        assert book not in "".join(message["content"] for message in row["messages"][1:])
    # Each turn has its quotes, at their places in the book, which are the places in the row.
    for row, source in zip(rows, lines(tmp_path / "sources.jsonl"), strict=True):
        assert len(source["quotes"]) == source["turns"] == 10
        for quote in (quote for quotes in source["quotes"] for quote in quotes):
            assert len(quote["text"]) > 30 and quote["document"] == 0
            assert row["messages"][0]["content"].startswith(quote["text"], quote["start"])
        assert all(len(quotes) == 2 for quotes in source["quotes"])


def test_a_question_of_two_passages_is_asked_once(one_book, tmp_path):
    """Each passage has its own request, so two may give the same question, with different answers."""
    with Server(write=lambda prompt: re.sub(r" of On day \w+", " of the ship", write_answer(prompt))) as server:
        assert main(arguments(one_book, tmp_path, server.url)) == 0
        assert len(server.log) == 5
    (row,) = lines(tmp_path / "train.jsonl")
    asked = [message["content"].rsplit("\n", 1)[-1] for message in row["messages"][::2]]
    assert len(asked) == len(set(asked)) == 2
    assert manifest(tmp_path)["left_out"] == {"asked twice": 8}


def test_biographies(one_book, tmp_path):
    with Server() as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "biography")) == 0
        # One request for the names, then one for each character that the book names.
        assert len(server.log) == 3
    (row,) = lines(tmp_path / "train.jsonl")
    asked = [message["content"] for message in row["messages"][::2]]
    assert asked[0].endswith("Write a biography of Ahab, as this book tells it.")
    assert asked[1] == "Write a biography of Ishmael, as this book tells it."
    assert row["messages"][3]["content"].startswith("Ishmael goes to sea.")
    assert manifest(tmp_path)["left_out"] == {"named otherwise in the text": 1}


def test_a_text_without_persons_gives_no_row(one_book, tmp_path):
    with Server(write=lambda prompt: '{"characters": []}') as server:
        assert main(arguments(one_book, tmp_path, server.url, "--tasks", "biography")) == 1
        assert len(server.log) == 1
    assert manifest(tmp_path)["left_out"] == {"rows without a question": 1, "tells of no persons": 1}


def test_a_document_too_long_for_a_request_is_shown_in_excerpts(one_book, tmp_path):
    shown = []

    def write(prompt):
        shown.extend(documents_of(prompt))
        assert "excerpts of one document" in prompt
        return write_answer(prompt)

    with Server(write=write) as server:
        line = arguments(one_book, tmp_path, server.url, "--tasks", "multi", "--request-tokens", "1300")
        assert main(line) == 0
    book = (one_book / "books" / "book0.txt").read_text()
    places = [book.index(text) for text in shown]
    # The prompt shows two pieces of at most 600 tokens, the first and the last. The row has the whole book.
    assert len(shown) == 2 and places[0] == 0 and places[1] > 2000 and sum(map(len, shown)) <= 1200
    assert lines(tmp_path / "train.jsonl")[0]["messages"][0]["content"].startswith(book)


def test_progress_and_messages(one_book, tmp_path, capfd):
    with faulty({0: "400 |too long"}) as proxy:
        line = arguments(
            one_book, tmp_path, proxy.url, "--price-input", "1", "--price-output", "1", "--concurrency", "1"
        )
        line.remove("--quiet")
        assert main(line) == 1
    err = capfd.readouterr().err
    assert "left out: " in err and "single, piece 1: refused by the server: 400: too long" in err
    assert re.search(r"5/5 .*, \d+ tokens in, 200 out, cost 0\.\d+", err)


def test_rate_limits_apply_to_each_request(one_book, tmp_path, monkeypatch):
    """Each request reserves a start with its tokens. How they are spaced is tested by itself."""
    reserved = []

    class Watched(client.Pace):
        def delay(self, now, tokens):
            reserved.append((self._per_request, self._per_token, tokens))
            return super().delay(now, tokens)

    monkeypatch.setattr(client, "Pace", Watched)
    rates = ("--requests-per-minute", "6000", "--tokens-per-minute", "6e7", "--answer-tokens", "100")
    with Server() as server:
        assert main(arguments(one_book, tmp_path, server.url, *rates)) == 0
    assert len(reserved) == 5 and {each[:2] for each in reserved} == {(0.01, 1e-6)}
    # A piece of at most 600 tokens, the prompt's own 350 and the longest answer.
    assert all(750 <= tokens <= 1050 for _, _, tokens in reserved)


def test_an_unexpected_error_stops_the_other_requests(place, tmp_path, monkeypatch):
    from pose_plugin.synthesize.tasks import multi

    async def broken(item, settings, ask):
        raise ZeroDivisionError

    monkeypatch.setattr(multi, "make", broken)
    with Server(pause=0.1) as server:
        try:
            main(arguments(place, tmp_path, server.url, "--tasks", "multi,single", "--concurrency", "2"))
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the error was swallowed")
        assert len(server.log) <= 2
