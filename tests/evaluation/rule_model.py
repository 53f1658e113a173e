"""Models with a known answer: what follows a text is a rule, not weights."""

from __future__ import annotations

import random
import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from pose_plugin.evaluation.prompts import PasskeyBuilder


class RuleModel(LlamaForCausalLM):
    """`rule(ids) -> id` names the token after `ids`. The cache is the ids so far."""

    def __init__(self, rule, vocab: int):
        super().__init__(
            LlamaConfig(vocab_size=vocab, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                        num_attention_heads=1, bos_token_id=None, eos_token_id=None)
        )  # fmt: skip
        self.rule = rule
        self.forwards: list[tuple[int, int]] = []

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0, **unused):
        cached = isinstance(past_key_values, torch.Tensor)
        ids = torch.cat([past_key_values, input_ids], 1) if cached else input_ids
        keep = logits_to_keep or input_ids.shape[1]
        self.forwards.append((input_ids.shape[0], keep))
        logits = torch.zeros(ids.shape[0], keep, self.config.vocab_size)
        for i, row in enumerate(ids.tolist()):
            for k in range(keep):
                logits[i, k, self.rule(row[: len(row) - keep + k + 1])] = 1
        return CausalLMOutputWithPast(logits=logits, past_key_values=ids if use_cache else None)


def right_answer(tokenizer):
    """Reads the key out of the prompt and writes it after the question."""
    builder = PasskeyBuilder(tokenizer)
    question = builder.question

    def rule(ids: list[int]) -> int:
        key = re.search(r"The pass key is ([0-9]+)\. Remember", tokenizer.decode(ids)).group(1)
        answer = builder.answer_ids(key)
        at = next((n for n in range(len(ids), 0, -1) if ids[n - len(question) : n] == question), len(ids))
        written = len(ids) - at
        return answer[written] if written < len(answer) else answer[-1]

    return rule


def constant(token: int):
    return lambda ids: token


def sometimes_wrong(right, tokens: list[int], share: float):
    """As `right`, but with probability `share` one of `tokens`; the same for the same text."""

    def rule(ids: list[int]) -> int:
        rng = random.Random(str(ids[-300:]))
        return rng.choice(tokens) if rng.random() < share else right(ids)

    return rule
