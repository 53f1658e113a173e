"""Tiny tokenizers and models: trained or drawn here, nothing is downloaded."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pose_plugin.evaluation.prompts import PasskeyTemplate

TEXT = [
    PasskeyTemplate().prefix,
    PasskeyTemplate().filler * 3,
    PasskeyTemplate().key_sentence,
    PasskeyTemplate().question,
    "The quick brown fox jumps over the lazy dog, 12345 times 67890 in 2048 years.\n\nAnd so on.\n",
]


def byte_level(digits: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2. digits: "single" splits numbers up, "joined" learns number tokens."""
    tokenizer = Tokenizer(models.BPE())
    steps: list = [pre_tokenizers.Digits(individual_digits=True)] if digits == "single" else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = [f" {n}" for n in range(10, 100)] * 3 + [f" {n}" for n in range(100, 1000)] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=400 if digits == "single" else 1600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT + (numbers if digits == "joined" else []), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2: a word mark before the first word, single digits, and <s> in front of every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    # Without line breaks, so that they are written as the byte <0x0A>.
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in TEXT], trainer)
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


MAKERS = {
    "single digits": lambda: byte_level("single"),
    "joined digits": lambda: byte_level("joined"),
    "with BOS": sentencepiece_like,
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


def tiny_llama(vocab: int = 400, seed: int = 0, **changes) -> LlamaForCausalLM:
    """Two layers of width 32, random weights, the caller's random state untouched."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=vocab, **{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def make_llama():
    return tiny_llama
