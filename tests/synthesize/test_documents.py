"""Reading, filtering and assigning documents, and input that cannot work."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest

from pose_plugin.cli.main import main
from pose_plugin.synthesize.client import GivenUpError
from pose_plugin.synthesize.documents import Copies, find_files, pieces, read, sketch, spread
from pose_plugin.synthesize.output import MarkerSplitter, described_settings
from pose_plugin.synthesize.select import assign, collect
from pose_plugin.synthesize.settings import parse_settings
from pose_plugin.synthesize.tasks import single
from pose_plugin.utils.clean import tidy
from pose_plugin.utils.errors import PoSEError
from tests.synthesize.material import byte_tokenizer, story
from tests.synthesize.runs import arguments, lines, manifest
from tests.synthesize.server import Server, documents_of, ends


def settings(folder, **changes):
    values = {"inputs": (folder,), "output": folder / "out", "tokenizer": "t", "model": "m", "window": 6000}
    return parse_settings({**values, "chunk_tokens": 600, **changes})


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_every_kind_of_file(tmp_path, tokenizer):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "a" / ".hidden").mkdir(parents=True)
    (tmp_path / "a" / "one.txt").write_text(story(1, 700))
    (tmp_path / "a" / "two.md").write_bytes(b"\xef\xbb\xbf" + story(2, 700).replace("\n", "\r\n").encode())
    (tmp_path / "a" / "skipped.pdf").write_text("x")
    (tmp_path / "a" / ".hidden" / "not.txt").write_text("x")
    rows = [json.dumps({"body": story(n, 700), "other": 1}) for n in (3, 4)]
    (tmp_path / "b.jsonl").write_text("\n".join([rows[0], "", rows[1]]))
    parquet.write_table(pyarrow.table({"body": [story(5, 700)], "n": [1]}), tmp_path / "c.parquet")
    inputs = (tmp_path / "a", tmp_path / "b.jsonl", tmp_path / "c.parquet", tmp_path / "a" / "one.txt")
    found = collect(settings(tmp_path, inputs=inputs, text_field="body"), tokenizer)
    places = [(document.source.rsplit("/", 1)[1], document.index) for document in found.long]
    assert places == [("one.txt", 0), ("two.md", 0), ("b.jsonl", 0), ("b.jsonl", 2), ("c.parquet", 0)]
    assert [document.text for document in found.long] == [story(n, 700) for n in (1, 2, 3, 4, 5)]
    assert len(found.files) == 4 and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in found.files.values())


def test_files_and_rows_without_text_are_counted(tmp_path, tokenizer):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / ".hidden").write_bytes(b"")
    rows = [{"text": None}, {"text": story(1, 900)}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = collect(settings(tmp_path), tokenizer)
    assert found.dropped == {"files that do not end in .txt, .md, .markdown, .jsonl, .parquet": 1, "empty": 1}
    assert len(found.long) + len(found.short) == 1


def test_filters(tmp_path, tokenizer):
    pytest.importorskip("py3langid")
    german = "Der Wal schwamm um die Insel, und niemand auf dem Schiff hat ihn gesehen. " * 12
    texts = {
        "long": story(1, 800),
        "again": "\n" + story(1, 800) + " ",
        "short": story(2, 300),
        "tiny": "The whale came up at dawn.",
        "huge": story(3, 6000),
        "empty": " \n\0 ",
        "german": german,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = collect(settings(tmp_path, languages=("en",)), tokenizer)
    assert [document.source.rsplit("/", 1)[1] for document in found.long] in (["again.txt"], ["long.txt"])
    assert [document.source.rsplit("/", 1)[1] for document in found.short] == ["short.txt"]
    assert found.dropped == {
        "the same text again": 1,
        "shorter than 64 tokens (--min-short)": 1,
        "longer than 4500 tokens (--max-tokens)": 1,
        "empty": 1,
        "another language": 1,
    }
    both = collect(settings(tmp_path, languages=("en", "de")), tokenizer)
    assert "another language" not in both.dropped and len(both.long) == 2


def test_min_tokens_may_be_below_min_short(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text(story(1, 50))
    assert len(collect(settings(tmp_path, min_tokens=40), tokenizer).long) == 1


def test_longer_documents_are_split(tmp_path, tokenizer):
    (tmp_path / "huge.txt").write_text(story(3, 10000))
    found = collect(settings(tmp_path, longer="split"), tokenizer)
    assert [document.part for document in found.long] == [0, 1, 2]
    assert all(600 <= document.tokens <= 4500 for document in found.long)
    joined = " ".join(" ".join(document.text for document in found.long).split())
    assert joined == " ".join(story(3, 10000).split())


REPEATING = {
    # One long document, and how many of its pieces are new.
    "sentence": ("The whale came up at dawn. " * 800, 1),
    "chapters": (story(1, 4000) * 4, 1),
    "counted": ("".join(f"Day {number}: the whale came up at dawn.\n" for number in range(500)), 5),
    "book": (story(1, 12000), 3),
    # No spaces: runs of characters.
    "japanese": ("鯨は夜明けに浮かび上がった。" * 400, 1),
}


@pytest.mark.parametrize("name", REPEATING)
def test_pieces_of_one_text_differ(tmp_path, tokenizer, name):
    text, new = REPEATING[name]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    found = collect(settings(tmp_path, longer="split"), tokenizer)
    assert len(found.long) == new
    left_out = found.dropped["the same text again"] + found.dropped["nearly the same text again"]
    assert (left_out > 0) == (name in ("sentence", "chapters", "japanese"))


def test_editions_of_one_book(tmp_path, tokenizer):
    book, other = story(1, 3000), story(2, 3000)
    texts = {
        "a": book,
        "b": "Another edition.\n\n" + book.replace(" and Ishmael", " and\nIshmael"),
        "c": other,
        # A third of it is in the first: it is another book.
        "d": book[:1000] + story(3, 2000),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = collect(settings(tmp_path), tokenizer)
    assert [document.source[-5] for document in found.long] == ["a", "c", "d"]
    assert found.dropped == {"nearly the same text again": 1}


def test_editions_of_one_book_that_is_split(tmp_path, tokenizer):
    """Their pieces do not begin at the same places, so that each shares only a part with each of the other edition."""
    book = story(1, 16000)
    (tmp_path / "a.txt").write_text(book)
    (tmp_path / "b.txt").write_text(f"{story(2, 2100)}\n\n{book}")
    found = collect(settings(tmp_path, longer="split"), tokenizer)
    assert {document.source[-5] for document in found.long} == {"a"}
    assert found.dropped == {"nearly the same text again": 1}


def test_pieces_of_a_text_whose_parts_differ_in_density_fit(tmp_path, tokenizer):
    """Sizes are measured by the mean, and a Japanese character has three tokens here, an English one has one."""
    japanese = "".join(random.Random(1).choices("鯨は夜明けに浮かび上がった", k=6000))
    (tmp_path / "text.txt").write_text(f"{story(1, 9000)}\n\n{japanese}", encoding="utf-8")
    found = collect(settings(tmp_path, longer="split"), tokenizer)
    assert found.dropped == {}
    assert sum(document.characters for document in found.long) >= 14900
    assert max(document.tokens for document in found.long) <= 4500


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_sketches_estimate_the_share_of_runs(share):
    words = [str(number) for number in range(8000)]
    other = [word if number < share * 8000 else f"x{word}" for number, word in enumerate(words)]
    # Of 8000 in each, `share` are in both.
    expected = share / (2 - share)
    assert sketch(" ".join(words)).jaccard(sketch(" ".join(other))) == pytest.approx(expected, abs=0.15)


def test_sketches_are_the_same_in_every_process():
    """A resumed run must find the same copies, or it would ask about other documents and pay again."""
    found = sketch("The whale came up at dawn, and nobody saw it.")
    assert found.hashvalues[:3].tolist() == [206986355, 990753968, 1508868552]
    assert (found.hashvalues == sketch("the WHALE came up\nat dawn, and  nobody saw it.").hashvalues).all()


def test_texts_with_a_common_licence_are_not_copies():
    seen = Copies()
    licence = story(0, 300)
    assert not any(seen.like(f"{licence} {story(number, 900)}") for number in range(1, 9))
    assert seen.like(f"{licence} {story(3, 900)}")


def test_no_document_is_used_twice(tmp_path, tokenizer):
    pytest.importorskip("sklearn")
    for number in range(9):
        (tmp_path / f"long{number}.txt").write_text(story(number, 800))
        (tmp_path / f"short{number}.txt").write_text(story(100 + number, 300))
    wanted = {"single": 2, "multi": None, "biography": 1, "compare": 2}
    given = settings(tmp_path, tasks=wanted, group_size=3)
    items = assign(collect(given, tokenizer), given)
    counts = {task: sum(item.task == task for item in items) for task in wanted}
    assert counts == {"single": 2, "multi": 6, "biography": 1, "compare": 2}
    used = [document.sha256 for item in items for document in item.documents]
    assert len(used) == len(set(used))
    assert {len(item.documents) for item in items if item.task == "compare"} <= {2, 3}
    # The same in every run, another with another seed.
    again = assign(collect(given, tokenizer), given)
    assert [item.id for item in again] == [item.id for item in items]
    other = settings(tmp_path, tasks=wanted, group_size=3, seed=1)
    assert [item.id for item in assign(collect(other, tokenizer), other)] != [item.id for item in items]


def test_groups_share_a_subject(tmp_path, tokenizer):
    pytest.importorskip("sklearn")
    subjects = {
        "bread": "flour yeast oven dough crust baker kneading loaf rye sourdough",
        "stars": "galaxy telescope nebula orbit astronomer planet comet parallax supernova redshift",
        "chess": "bishop gambit checkmate rook castling pawn opening endgame grandmaster stalemate",
    }
    for name, words in subjects.items():
        for number in range(3):
            shuffled = words.split()
            random.Random(number).shuffle(shuffled)
            text = f"Note {number} on {' '.join(shuffled[:7])}. It tells of {shuffled[7]} and {shuffled[8]}."
            (tmp_path / f"{name}{number}.txt").write_text(text)
    # A copy but for a digit gives nothing to compare.
    (tmp_path / "bread9.txt").write_text((tmp_path / "bread0.txt").read_text().replace("0", "8"))
    given = settings(tmp_path, tasks={"compare": None}, group_size=3)
    items = assign(collect(given, tokenizer), given)
    groups = [{document.source.rsplit("/", 1)[1][:5] for document in item.documents} for item in items]
    assert sorted(map(sorted, groups)) == [["bread"], ["chess"], ["stars"]]
    names = [document.source.rsplit("/", 1)[1] for item in items for document in item.documents]
    assert not {"bread0.txt", "bread9.txt"} <= set(names)


def test_compare_end_to_end(place, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "short").mkdir()
    for number in range(4):
        (tmp_path / "short" / f"{number}.txt").write_text(story(50 + number, 400))
    with Server() as server:
        line = arguments(place, tmp_path / "out", server.url, "--tasks", "compare", "--group-size", "2")
        line[1] = str(tmp_path / "short")
        assert main(line) == 0
        assert [len(documents_of(seen.body["messages"][0]["content"])) for seen in server.log] == [2, 2]
    for row, source in zip(
        lines(tmp_path / "out" / "train.jsonl"), lines(tmp_path / "out" / "sources.jsonl"), strict=True
    ):
        first = row["messages"][0]["content"]
        assert first.startswith("Document 1:\n\n") and "\n\nDocument 2:\n\n" in first
        assert len(source["documents"]) == 2 and len(row["messages"]) == 20


def test_rows_beyond_the_window_are_dropped_and_counted(place, tmp_path, capsys):
    def long_answers(prompt):
        one = {"question": "Why?", "answer": "because " * 400, "quotes": ends(documents_of(prompt)[0])}
        return json.dumps({"questions": [one]})

    with Server(write=lambda prompt: long_answers(prompt) if "book" not in prompt else "") as server:
        line = arguments(place, tmp_path, server.url, "--tasks", "multi", "--max-tokens", "3500")
        line[line.index("--window") + 1] = "6100"
        # A run without rows has failed.
        assert main(line) == 1
    assert "there is no row" in capsys.readouterr().err
    found = manifest(tmp_path)
    assert found["left_out"] == {"rows longer than 6100 tokens (--window)": 4}
    assert found["rows"]["count"] == 0 and (tmp_path / "train.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <|im_end|> b", "a < |im_end|> b"),
        ("[INST] <s>", "[ INST] < s>"),
        ("<|a<|b|>|>", "<|a< |b|>|>"),
        ("<start_of_turn>", "< start_of_turn>"),
        ("x < y, [1], <div>, {{ a }}", "x < y, [1], <div>, {{ a }}"),
    ],
)
def test_markers(text, expected):
    split_markers = MarkerSplitter()
    assert split_markers(text)[0] == expected
    assert split_markers(expected) == (expected, 0)


def test_the_tokenizers_own_markers():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["@@user", "Ω"]})
    assert MarkerSplitter(tokenizer)("@@user Ω.") == ("@ @user .", 2)


def test_tidy():
    assert tidy("\ufeff a\r\nb\rc\0\x07\ud800\n\n\n\n\n\nd\t ") == "a\nb\nc\n\n\nd"


def test_no_line_end_joins_words():
    """Word breaks lines by a vertical tab, pdftotext pages by a form feed, EBCDIC lines by U+0085."""
    assert tidy("a\x0bb\x0cc\n\x0cd\r\n\x0ce\x85f") == "a\nb\nc\nd\ne\nf"


def test_pieces_lose_nothing_and_end_at_borders():
    text = story(1, 3000)
    parts = pieces(text, 3000, 700)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert max(map(len, parts)) <= 700 and min(map(len, parts[:-1])) >= 350
    assert all(part.endswith(".") for part in parts[:-1])
    assert pieces("x" * 10, 10, 4) == ["xxxx", "xxxx", "xx"]


def test_spread():
    letters = list("abcdefghij")
    assert spread(letters, 4) == ["a", "d", "g", "j"]
    assert spread(letters, 1) == ["f"] and spread(letters, 20) == letters


BAD_FILES = {
    "binary.txt": (b"\x00\x01\xff\xfe", "binary.txt: byte 2 is not UTF-8; it is not text"),
    "latin.txt": (b"caf\xe9 au lait", "latin.txt: byte 3 is not UTF-8; convert it (iconv -f LATIN1"),
    "wide.txt": ("a text".encode("utf-16"), "wide.txt: byte 0 is not UTF-8; convert it (iconv -f UTF-16"),
    "torn.jsonl": (b'{"text": "a"}\n{"text": ', "torn.jsonl, line 2 is not JSON"),
    "list.jsonl": (b"[1]\n", "list.jsonl, line 1: a list, not an object with 'text'"),
    "other.jsonl": (b'{"body": "a", "id": 3}\n', "no field 'text'; give --text-field one of: body, id"),
    "number.jsonl": (b'{"text": 3}\n', "'text' is int, not text; see --text-field"),
    "no.parquet": (b"PAR1 not", "no.parquet is not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PoSEError, match=re.escape(message)):
        list(read(tmp_path / name, "text"))


def test_inputs_that_are_not_there(tmp_path):
    with pytest.raises(PoSEError, match=r"nowhere does not exist"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(PoSEError, match="no document in"):
        find_files([tmp_path])
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(PoSEError, match=re.escape("ends in .pdf; supported are .txt, .md")):
        find_files([tmp_path / "a.pdf"])


# What a message names: the option, its value, and what it is limited by.
BAD_SETTINGS = [
    ({"window": 10}, "--window 10: Input should be greater than or equal to 64"),
    ({"concurrency": 0}, "--concurrency 0: "),
    ({"temperature": float("nan")}, "--temperature nan: "),
    ({"timeout": 0}, "--timeout 0: "),
    ({"tokens_per_minute": float("inf")}, "--tokens-per-minute inf: "),
    ({"max_tokens": 6000}, "--max-tokens 6000 leaves no room for questions in --window 6000; give at most 4500"),
    ({"min_tokens": 5000}, "--min-tokens 5000 is above --max-tokens 4500"),
    ({"tasks": {"compare": None}, "min_short": 600}, "--min-short 600 must be below --min-tokens 600"),
    ({"tasks": "poem"}, "--tasks poem 'poem': Input should be 'single', 'multi', 'compare' or 'biography'"),
    ({"tasks": "multi=0"}, "--tasks multi '0': "),
    ({"tasks": "single=x"}, "--tasks single 'x': "),
    ({"tasks": "multi,multi=3"}, "--tasks multi,multi=3 names a task twice"),
    ({"tasks": ""}, "--tasks {}: "),
    ({"price_input": 1.0}, "give both --price-input and --price-output"),
    ({"price_input": -1.0, "price_output": 1.0}, "--price-input -1.0: "),
    ({"budget": 5.0}, "--budget 5 needs prices; add --price-input and --price-output"),
    ({"base_url": "localhost:8000"}, "--base-url 'localhost:8000' is not an address"),
    ({"base_url": "http://:80/v1"}, "--base-url 'http://:80/v1' is not an address"),
    ({"base_url": "http://my server/v1"}, "--base-url 'http://my server/v1' is not an address"),
    ({"base_url": "http://localhost:99999/v1"}, "--base-url 'http://localhost:99999/v1' is not an address"),
    ({"base_url": "http://localhost:port/v1"}, "--base-url 'http://localhost:port/v1' is not an address"),
    ({"base_url": "me:secret@localhost/v1"}, "--base-url 'localhost/v1' is not an address"),
    ({"model": " "}, "--model ' ': "),
    ({"longer": "cut"}, "--longer 'cut': Input should be 'drop' or 'split'"),
    ({"window": 10, "longer": "cut"}, "--longer 'cut': "),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_settings_that_cannot_work(tmp_path, changes, message):
    with pytest.raises(PoSEError, match=re.escape(message)):
        settings(tmp_path, **changes)


def test_tasks_and_languages_are_lists_with_commas(tmp_path):
    given = settings(tmp_path, tasks="single=20, multi", languages="EN, de")
    assert given.tasks == {"single": 20, "multi": None} and given.languages == ("en", "de")


def test_the_order_in_which_tasks_are_named_changes_nothing(place, tmp_path, tokenizer):
    """Another order would give each document another task, and all answers would be paid for again."""
    asked = []
    for tasks in ("single,multi,biography=1", "biography=1, multi,single"):
        given = settings(place / "books", output=tmp_path, tasks=tasks)
        asked.append([item.id for item in assign(collect(given, tokenizer), given)])
    assert asked[0] == asked[1] and len(asked[0]) == 4


@pytest.mark.parametrize("key", ["sk-SECRET-0123456789", "AIza.SECRET"])
def test_a_key_in_place_of_its_variables_name_is_not_repeated(tmp_path, key):
    """Keys without a dash or dot look like a variable: the manifest holds no `key_variable` at all."""
    with pytest.raises(PoSEError, match="--key-variable is not the name") as caught:
        settings(tmp_path, key_variable=key)
    assert "SECRET" not in str(caught.value)
    assert "key_variable" not in described_settings(settings(tmp_path))


WRONG_LINES = {
    ("--tokenizer", "nowhere"): "--tokenizer nowhere cannot be loaded",
    ("--languages", "xx"): "--languages 'xx' is not supported",
    ("--min-tokens", "4000"): "none of 4 documents can be used: 0 have 4000 to 4500 tokens, 4 are shorter",
}


@pytest.mark.parametrize("change", WRONG_LINES)
def test_lines_that_cannot_work(place, tmp_path, capsys, change):
    assert main([*arguments(place, tmp_path / "out", "http://127.0.0.1:9/v1"), *change]) == 2
    assert WRONG_LINES[change] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_key_is_required_without_base_url(place, tmp_path, capsys):
    line = arguments(place, tmp_path / "out", "http://x")
    del line[line.index("--base-url") : line.index("--base-url") + 2]
    assert main(line) == 2
    assert "$OPENAI_API_KEY holds no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OPENAI_BASE_URL", "localhost:8000", "$OPENAI_BASE_URL 'localhost:8000' is not an address"),
        ("OPENAI_API_KEY", "sk-\u0430bc", "$OPENAI_API_KEY holds characters that no key has"),
    ],
)
def test_variables_that_cannot_work(place, tmp_path, capsys, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    line = arguments(place, tmp_path / "out", "http://x")
    del line[line.index("--base-url") : line.index("--base-url") + 2]
    assert main(line) == 2
    err = capsys.readouterr().err
    assert message in err and "sk-" not in err


def test_rows_of_other_programs_are_not_overwritten(place, tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("mine")
    assert main([*arguments(place, tmp_path, "http://127.0.0.1:9/v1"), "--accept-changes"]) == 2
    assert "has a train.jsonl but no manifest.json" in capsys.readouterr().err
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def test_rows_that_were_edited_are_not_overwritten(one_book, tmp_path, capsys):
    """Who reads the rows, as the page advises, may delete bad ones."""
    with Server() as server:
        line = arguments(one_book, tmp_path, server.url)
        assert main(line) == 0
        path = tmp_path / "train.jsonl"
        written = path.read_bytes()
        path.write_bytes(written.replace(b"Answer 0.", b"A better one."))
        edited = path.read_bytes()
        assert main(line) == 2
        assert "was changed since" in capsys.readouterr().err
        assert path.read_bytes() == edited
        path.rename(tmp_path / "mine.jsonl")
        assert main(line) == 0
    assert path.read_bytes() == written


def test_output_files_are_not_read_as_documents(tmp_path, tokenizer):
    """--output in a folder of documents, or that folder itself, and the same command again."""
    (tmp_path / "text.txt").write_text(story(1, 900))
    for output in (tmp_path, tmp_path / "data"):
        output.mkdir(exist_ok=True)
        for name in ("train.jsonl", "sources.jsonl", "journal.jsonl", "manifest.json"):
            (output / name).write_text("{}\n")
        found = collect(settings(tmp_path, output=output), tokenizer)
        assert (found.documents, found.dropped) == (1, {})
        for name in ("train.jsonl", "sources.jsonl", "journal.jsonl", "manifest.json"):
            (output / name).unlink()


def test_requests_do_not_exceed_the_plan(tmp_path, tokenizer):
    """Pieces end with paragraphs: there are more of them than would fill the document."""
    text = "\n\n".join(" ".join(story(number, 350).split()) for number in range(4))
    (tmp_path / "text.txt").write_text(text)
    given = settings(tmp_path)
    (item,) = assign(collect(given, tokenizer), given)
    asked = []

    async def ask(request):
        asked.append(request.tokens)
        raise GivenUpError

    asyncio.run(single.make(item, given, ask))
    planned = single.forecast(item.documents, given)
    assert len(planned) == len(asked) == 4 and len(text) < 3 * given.chunk_tokens
    assert sum(asked) <= sum(planned)


def test_output_that_is_a_file(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(arguments(place, tmp_path / "file", "http://127.0.0.1:9/v1")) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_a_plan_sends_nothing_and_prints_the_cost(place, tmp_path, capsys):
    prices = ("--price-input", "2", "--price-output", "8", "--budget", "0.1")
    with Server() as server:
        line = arguments(place, tmp_path / "out", server.url, "--tasks", "single=1,multi=1,biography", *prices)
        assert main([*line, "--plan"]) == 0
        assert server.log == []
        planned = capsys.readouterr().out
        assert not (tmp_path / "out").exists()
        assert main([*line[:-2]]) == 0
    # Five pieces of 600 tokens, a book, and twice one book for its characters and three lives, with a prompt each;
    # the books have 2999 tokens or 3000.
    read = 5 * 950 + 3350 + 2 * 4 * 3350
    assert "rows: biography 2, multi 1, single 1" in planned
    planned_read = int(re.search(r"requests: at most 14, (\d+) tokens to read", planned).group(1))
    assert read - 9 <= planned_read <= read
    money = float(re.search(r"cost: about ([\d.]+)", planned).group(1))
    assert money == pytest.approx((read * 2 + (1500 + 1500 + 2 * 4 * 700) * 8) / 1e6, rel=0.01)
    assert "the run stops before it exceeds 0.1 (--budget)" in planned
    assert len(server.log) <= 14
