"""A new sampler is one class and one entry in `SAMPLERS`: the package only reads what the class declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from pose_plugin.checkpoints.schema import Record
from pose_plugin.cli.main import main
from pose_plugin.collator import PositionCollator
from pose_plugin.config import parse_settings
from pose_plugin.export.card import _method
from pose_plugin.positions import SAMPLERS, Draws, Layout, Row, Sampler, coverage
from pose_plugin.utils.errors import PoSEError


@dataclass(frozen=True)
class Halves(Sampler):
    """Two halves, the second one at the end of the target."""

    name = "halves"
    refused_contents = {"aligned": "its halves are not where the text is"}  # noqa: RUF012 - never changed

    def most_chunks(self, window: int, borders: int = 0) -> int:
        return 2

    def __call__(self, row: Row, draws: Draws) -> Layout:
        half = row.window // 2
        return Layout([half, row.window - half], [0, row.target - row.window])


class Lines:
    """A border after each token 9."""

    def __init__(self, tokenizer: Any) -> None:
        assert tokenizer == "the tokenizer"

    def __call__(self, tokens: np.ndarray, supervised: np.ndarray | None) -> np.ndarray | None:
        assert supervised is None, "only samplers of chats get the loss mask"
        found = np.flatnonzero(tokens[:-1] == 9) + 1
        return found if found.size else None


@dataclass(frozen=True)
class AtLines(Halves):
    """Moves everything after the first line to the end of the target."""

    chunks: int = 2

    name = "lines"
    border_finder = Lines

    def usual_spacing(self, window: int) -> int:
        return window // 4

    def __call__(self, row: Row, draws: Draws) -> Layout:
        first = row.window if row.borders is None else row.borders[0]
        return Layout([first, row.window - first], [0, row.target - row.window])


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for sampler in (Halves, AtLines):
        monkeypatch.setitem(SAMPLERS, sampler.name, sampler)


class Stack:
    tokenizer = "the tokenizer"

    def __call__(self, features):
        return {"input_ids": torch.tensor([feature["input_ids"] for feature in features])}


def test_settings_know_its_name_its_options_and_its_contents():
    assert parse_settings({"target_length": 32, "sampler": "halves"}).sampler == "halves"
    assert parse_settings({"target_length": 32, "sampler": "lines", "chunks": 3}).chunks == 3
    for changes, named in (
        ({"chunks": 3}, "chunks=3 has no effect with sampler=halves; .* pose, clamped, turns, lines"),
        ({"content": "aligned", "train_length": 8}, "content=aligned .* not where the text is. Write content: window"),
    ):
        with pytest.raises(PoSEError, match=named):
            parse_settings({"target_length": 32, "sampler": "halves", **changes})


def test_the_collator_draws_it():
    collate = PositionCollator(Stack(), {"target_length": 32, "sampler": "halves"})
    assert collate([{"input_ids": [5, 6, 7, 8]}])["position_ids"].tolist() == [[0, 1, 30, 31]]
    assert collate.trained() == {"documents": 1, "skipped": 1, "tokens": 4, "farthest": 31}


def test_the_collator_finds_its_borders_and_counts_them():
    collate = PositionCollator(Stack(), {"target_length": 32, "sampler": "lines"})
    features = [{"input_ids": [9, 6, 7, 8], "labels": [9, 6, 7, 8]}, {"input_ids": [5, 6, 7, 8]}]
    assert collate(features)["position_ids"].tolist() == [[0, 29, 30, 31], [0, 1, 2, 3]]
    # The second row shows no border, and this sampler leaves such rows plain.
    assert {key: collate.trained()[key] for key in ("skipped", "anywhere", "uncut")} == {
        "skipped": 1, "anywhere": 0, "uncut": 0,
    }  # fmt: skip


def test_coverage_is_exact():
    settings = parse_settings({"target_length": 64, "train_length": 8, "sampler": "halves"})
    expected = np.zeros(64)
    # Within a half, and from one half to the other: 0…3 and 60…63.
    expected[[1, 2, 3, *range(57, 64)]] = 1
    assert coverage(settings, draws=3).probability.tolist() == expected.tolist()
    lines = parse_settings({"target_length": 64, "train_length": 8, "sampler": "lines"})
    expected[:] = 0
    expected[[*range(1, 6), *range(57, 64)]] = 1
    assert coverage(lines, draws=3).probability.tolist() == expected.tolist()


def test_the_commands_print_it(tmp_path, capsys):
    lengths = ["--target-length", "64", "--train-length", "8", "--draws", "20"]
    assert main(["coverage", *lengths, "--sampler", "halves", "--compare", "lines:2"]) == 0
    out = capsys.readouterr().out
    assert "\nhalves " in out and "\nlines, 2 chunks " in out
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    for sampler, line in (("halves", "sampler halves"), ("lines", "sampler lines, 2 chunks")):
        assert main(["plan", "--base", str(tmp_path), *lengths, "--rope", "none", "--sampler", sampler]) == 0
        assert line in capsys.readouterr().out


def test_the_model_card_names_it():
    assert "sampler halves)" in _method(Record(target_length=64, sampler="halves", chunks=2))
    assert "sampler lines, 2 chunks)" in _method(Record(target_length=64, sampler="lines", chunks=2))
    assert "sampler unheard-of)" in _method(Record(target_length=64, sampler="unheard-of", chunks=2))
