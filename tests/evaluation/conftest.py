"""Tiny tokenizers of three kinds, and a tiny model."""

from __future__ import annotations

import pytest

from tests import models

MAKERS = {
    "single digits": lambda: models.bpe_tokenizer("single"),
    "joined digits": lambda: models.bpe_tokenizer("joined"),
    "with BOS": models.sentencepiece_tokenizer,
}


@pytest.fixture(scope="session")
def tokenizers_by_name():
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session", params=MAKERS)
def any_tokenizer(request, tokenizers_by_name):
    return tokenizers_by_name[request.param]


@pytest.fixture(scope="session")
def tokenizer(tokenizers_by_name):
    return tokenizers_by_name["single digits"]


def tiny_llama(vocab: int = 400, seed: int = 0, **changes):
    """A model for these tokenizers; its larger weights make attention matter."""
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    sizes |= {"max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 1, "use_cache": True}
    return models.make_llama(seed=seed, vocab_size=vocab, **{**sizes, **changes}).eval()


@pytest.fixture(scope="session")
def make_llama():
    return tiny_llama
