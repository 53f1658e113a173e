"""The documents of example_configs/beacon/quickstart_data.py, for training and judging."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from tests.pages import importing_from

FOLDER = Path(__file__).parents[2] / "example_configs" / "beacon"


@pytest.fixture(scope="module")
def example():
    with importing_from(FOLDER):
        return importlib.import_module("quickstart_data")


@pytest.fixture(scope="module")
def tokenizer(example):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(example.QUICKSTART / "base")


def test_a_document_repeats_one_fact(example, tokenizer):
    documents, rng = example.FactDocuments(tokenizer), random.Random(1)
    for length in (80, 96, 192, 384, 1024):
        gap = example.FAR if length == 1024 else (8, max(20, min(150, length - 90)))
        ids, places = documents.draw(length, gap, rng)
        text = tokenizer.decode(ids)
        key = text.partition("The pass key is ")[2][0]
        assert len(ids) == length and places
        assert {tokenizer.decode([ids[at]]) for at in places} == {key}
        assert text.count(f"What is the pass key? The pass key is {key}\n") + text.endswith(f"is {key}") == len(places)
        # Every digit of the text is the key.
        assert {letter for letter in text if letter.isdigit()} == {key}


def test_judged_facts_are_more_than_a_window_apart(example, tokenizer):
    documents, rng = example.FactDocuments(tokenizer), random.Random(2)
    for _ in range(20):
        ids, places = documents.draw(1024, example.FAR, rng)
        digits = [at for at, token in enumerate(ids) if tokenizer.decode([token]).strip().isdigit()]
        before = [at for at in digits if at < places[0]]
        assert len(places) > 3
        assert all(after - at > 128 for at, after in itertools.pairwise([before[-1], *places]))


def test_all_keys_are_drawn_and_sentences_are_whole(example, tokenizer):
    documents, rng = example.FactDocuments(tokenizer), random.Random(3)
    drawn = [documents.draw(192, example.NEAR, rng) for _ in range(200)]
    assert {tokenizer.decode([ids[places[0]]]) for ids, places in drawn} == set("123456789")
    for ids, _ in drawn[:20]:
        *lines, _ = tokenizer.decode(ids).splitlines()
        assert all(line.endswith((".", "?")) or line[-1:].isdigit() for line in lines if line.strip()), lines


def test_rows_have_the_digits_for_labels(example, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quickstart_data.py", "--out", str(tmp_path), "--rows", "12"])
    example.main()
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and {len(row["input_ids"]) for row in rows} <= set(example.LENGTHS)
    for row in rows:
        kept = [(token, label) for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert kept and all(token == label for token, label in kept)
        assert len({token for token, _ in kept}) == 1
        assert len(row["attention_mask"]) == len(row["input_ids"]) == len(row["labels"])


def test_the_published_recipe():
    """Section 3.1 of arXiv 2401.03462, and the 400K of its title."""
    yaml = pytest.importorskip("yaml")

    from pose_plugin.beacon.ratios import BeaconWindow
    from pose_plugin.frameworks.axolotl_beacon import beacon_config

    values = yaml.safe_load((FOLDER / "llama2-7b-chat.yaml").read_text())
    config = beacon_config(values["beacon"])
    assert (config.window, config.interval, config.ratios) == (4096, 1024, [2, 4, 8, 16, 32, 64, 128])
    assert (config.train_ratio, config.mask, config.layout, config.target_modules) == ("random", "stepwise", "v1", None)
    assert BeaconWindow(config.window, config.interval).capacity(128) == 394240
    names = ("sequence_len", "min_sample_len", "max_steps", "learning_rate", "lr_scheduler", "warmup_steps")
    assert [values[name] for name in names] == [8192, 1024, 10000, 5e-5, "linear", 0]
