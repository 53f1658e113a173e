"""One rule for lengths: options, lists and settings."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.rope import extend_context
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import lengths_of, parse_length, parse_lengths

LENGTHS = {
    "81920": 81920,
    "32k": 32768,
    "80K": 81920,
    " 2k ": 2048,
    "1m": 1 << 20,
    "1M": 1 << 20,
    "2147483647": 2**31 - 1,
}


@pytest.mark.parametrize("text", LENGTHS)
def test_a_length(text):
    assert parse_length(text) == LENGTHS[text]
    assert parse_settings({"target_length": text, "train_length": "1"}).target_length == LENGTHS[text]
    base = {"model_type": "llama", "max_position_embeddings": 8, "head_dim": 8, "rope_theta": 1e4}
    if LENGTHS[text] > 8:
        assert extend_context(base, text, rope="linear")["max_position_embeddings"] == LENGTHS[text]


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "k", "3 k", "1e5", "4.5k", "1_000", "2147483648", "2048m", "٣", "9" * 5000]
)
def test_not_a_length(text):
    with pytest.raises(PoSEError, match="is not a number of tokens from 1 to 2147483647") as error:
        parse_length(text)
    assert len(str(error.value)) < 200


def test_a_list_of_lengths_is_sorted_and_each_counts_once():
    assert parse_lengths("4k,1024, 4096") == [1024, 4096]


def test_a_list_names_every_part_that_is_wrong():
    with pytest.raises(PoSEError, match=r"'x' is not .*'-5' is not"):
        parse_lengths("1024,x,-5")


def test_lengths_of_a_python_program():
    assert lengths_of("80k") == [81920] and lengths_of(5) == [5]
    assert lengths_of((1, "1m", np.int64(7))) == [1, 2**20, 7] and lengths_of([]) == []
    for wrong in ([2.0], ["x"], [True], [None]):
        with pytest.raises(PoSEError, match=re.escape(f"{wrong[0]!r} is not a number of tokens")):
            lengths_of(wrong)
