"""The quick start's base model and data are as its scripts describe them."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.pages import importing_from

FOLDER = Path(__file__).parent.parent / "example_configs" / "quickstart"
BASE = FOLDER / "base"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """Import the three files from their own folder, as `python make_base.py` does."""
    with importing_from(FOLDER):
        return {name: importlib.import_module(name) for name in ("corpus", "make_base", "make_data")}


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(BASE)


@pytest.fixture(scope="module")
def rows(scripts, tokenizer):
    return scripts["make_data"].training_rows(tokenizer, seed=0, documents=40)


def test_base_is_what_the_docstring_says(model, tokenizer):
    assert sum(file.stat().st_size for file in BASE.iterdir()) <= 1_000_000
    assert model.num_parameters() == 156_096
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 128
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert model.config.pad_token_id == tokenizer.pad_token_id == 1
    assert len(tokenizer) == model.config.vocab_size == 512


@pytest.mark.parametrize("text", ["81501", "key is 00719.", "x=42\n\t7é"])
def test_digits_are_single_tokens_and_text_survives(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    tokens = [tokenizer.decode([index]) for index in ids]
    assert [token for token in tokens if any(map(str.isdigit, token))] == [c for c in text if c.isdigit()]


def test_base_finds_the_key_in_its_window_and_not_past_it(model, tokenizer):
    from pose_plugin.evaluation.measures.passkey import passkey

    found = passkey(model, tokenizer, lengths=[128, 1024], trials=20, seed=1, progress=False).by_length()
    assert found[128].score >= 0.9
    assert found[1024].score <= 0.1


def test_passkey_rows_fit_the_window_and_end(scripts, rows, tokenizer):
    for ids in rows[:40]:
        assert 75 <= len(ids) <= 128
        assert ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids[:-1])
        hidden, answer = (text.split(mark)[1][:5] for mark in ("Remember it. ", "key? The pass key is "))
        assert hidden == answer and answer.isdigit()
    assert len({len(ids) for ids in rows[:40]}) > 10


def test_text_rows_are_2048_tokens_of_one_training_file(scripts, rows, tokenizer):
    corpus = scripts["corpus"]
    texts = corpus.read_texts(corpus.TRAINING_FILES)
    for ids in rows[40:]:
        assert len(ids) == 2048
        # A byte-level piece may begin or end inside a character, so its ends are left out.
        assert sum(tokenizer.decode(ids)[4:-4] in text for text in texts) >= 1


def test_rows_depend_only_on_the_seed(scripts, rows, tokenizer):
    make = scripts["make_data"].training_rows
    random.seed(7)
    assert make(tokenizer, seed=0, documents=40) == rows
    assert all(a != b for a, b in zip(make(tokenizer, seed=1, documents=40), rows, strict=True))


def test_judging_texts_and_keys_are_not_in_training(scripts, tokenizer):
    corpus = scripts["corpus"]
    assert not set(corpus.TRAINING_FILES) & set(corpus.JUDGING_FILES)
    training = "\n".join(corpus.read_texts(corpus.TRAINING_FILES))
    for ids in scripts["make_data"].judging_rows(tokenizer, seed=0):
        assert len(ids) == 2048
        text = tokenizer.decode(ids)
        assert not [at for at in range(0, len(text) - 200, 200) if text[at : at + 200] in training]
    seen, unseen = (set(corpus.PasskeyMaker(tokenizer, judging=judging).keys) for judging in (False, True))
    assert not seen & unseen
    assert len(seen | unseen) == 90_000


def test_base_rows(scripts, tokenizer):
    """A batch has 16 rows of 128 tokens with marked answers and repeated copies."""
    corpus = scripts["corpus"]
    texts = [list(range(2, 502)), list(range(2, 302))]
    make = scripts["make_base"].Rows
    ids, answers = make(tokenizer, texts, seed=3).batch()
    assert ids.shape == answers.shape == (16, 128)
    for row in range(8):
        marked = tokenizer.decode(ids[row][answers[row]])
        assert marked.endswith("<|endoftext|>")
        assert int(marked.removesuffix("<|endoftext|>")) in map(int, corpus.PasskeyMaker(tokenizer, False).keys)
    assert not answers[8:].any()
    for row in range(14, 16):
        assert any((ids[row, period:] == ids[row, :-period]).all() for period in range(8, 65))
    again = make(tokenizer, texts, seed=3).batch()[0]
    assert (again == ids).all()
