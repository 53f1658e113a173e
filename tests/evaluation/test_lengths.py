"""Lengths that are none, whichever measure they are given to."""

import re

import numpy as np
import pytest

from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.measures.gap import gap_probe
from pose_plugin.evaluation.measures.needle import needle
from pose_plugin.evaluation.measures.passkey import passkey
from pose_plugin.evaluation.measures.perplexity import perplexity
from pose_plugin.evaluation.measures.topics import topics
from pose_plugin.utils.errors import PoSEError

MEASURES = {
    "passkey": lambda tokenizer, lengths: passkey(None, tokenizer, lengths),
    "needle": lambda tokenizer, lengths: needle(None, tokenizer, lengths),
    "topics": lambda tokenizer, lengths: topics(None, tokenizer, lengths),
    "perplexity": lambda tokenizer, lengths: perplexity(None, tokenizer, ["a text"], lengths),
    "gap": lambda tokenizer, lengths: gap_probe(None, tokenizer, ["a text"], lengths),
}


@pytest.mark.parametrize("lengths", [8192, "8k", ["8k"], [200.5], [True], None])
@pytest.mark.parametrize("name", MEASURES)
def test_what_is_no_list_of_whole_numbers(tokenizer, name, lengths):
    with pytest.raises(PoSEError, match=re.escape(f"lengths={lengths!r} must be a list of whole numbers of tokens")):
        MEASURES[name](tokenizer, lengths)


@pytest.mark.parametrize("name", MEASURES)
def test_no_length(tokenizer, name):
    with pytest.raises(PoSEError, match=r"lengths"):
        MEASURES[name](tokenizer, [])


def test_whole_numbers_of_any_kind():
    assert list(whole((5, 3))) == [5, 3] and list(whole(np.array([5, 3]))) == [5, 3] and list(whole(range(3, 5)))
