"""From documents to rows through a real HTTP server."""

from __future__ import annotations

import json

import pytest

from pose_plugin.cli import main
from tests.synthesize.material import byte_tokenizer, make_books
from tests.synthesize.server import Server


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tokenizer and four books of 3000 tokens."""
    folder = tmp_path_factory.mktemp("synthesize")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    make_books(folder / "books")
    return folder


def arguments(place, output, url, *more: str) -> list[str]:
    line = ["synthesize", str(place / "books"), "--output", str(output), "--tokenizer", str(place / "tokenizer")]
    line += ["--window", "6000", "--model", "writer", "--base-url", url, "--chunk-tokens", "600", "--quiet"]
    return [*line, "--retry-wait", "0.01", *more]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
