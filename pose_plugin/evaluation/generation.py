"""Answers of a model in this process: prompts of one length in batches, questions about one text on its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from pose_plugin.evaluation.memory import in_batches
from pose_plugin.evaluation.model import (
    continues,
    device_of,
    end_of_short,
    evaluating,
    greedy,
    keeping,
    prefill,
    read,
)
from pose_plugin.evaluation.questions import Question, groups
from pose_plugin.utils.models import unwrap


def generate(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    keep: Callable[[Question, str], None],
    length: int,
    batch_size: int | None = None,
) -> None:
    """Answer questions greedily.

    Args:
        questions: with `length` tokens each, answer included, or a few less.
        keep: called with each question and its answer, as soon as it is known.
        batch_size: questions at a time; default: about 16k tokens.
    """
    ends, device = end_tokens(tokenizer, model), device_of(model)
    short = end_of_short(getattr(unwrap(model), "config", None)) or 0

    def write(question: Question, tokens: list[int]) -> None:
        end = next((at for at, token in enumerate(tokens) if token in ends), None)
        keep(question, tokenizer.decode(tokens[:end], skip_special_tokens=True))

    def alone(batch: Sequence[Question], chunk: int | None) -> list[None]:
        ids = torch.tensor([question.ids for question in batch], device=device)
        for question, tokens in zip(batch, greedy(model, ids, batch[0].budget, chunk).tolist(), strict=True):
            write(question, tokens)
        return [None] * len(batch)

    def together(batch: Sequence[list[Question]], chunk: int | None) -> list[None]:
        (group,) = batch
        shared, budget = group[0].shared, max(question.budget for question in group)
        longest = max(len(question.ids) + question.budget for question in group)
        # A cache of a short text does not go with the frequencies of a long one.
        outgrown = shared <= short < longest - 1
        cache = None if outgrown else cached(model, group[0].ids[:shared], chunk)
        if cache is None or not continues(model, cache):
            del cache
            for question in group:
                alone([question], None)
            return [None]
        written = answer(model, cache, [question.ids[shared:] for question in group], budget)
        for question, tokens in zip(group, written, strict=True):
            write(question, tokens[: question.budget])
        return [None]

    with evaluating(model):
        # A batch has prompts of one length.
        for size in dict.fromkeys((len(q.ids), q.budget) for q in questions if not q.shared):
            same = [q for q in questions if not q.shared and (len(q.ids), q.budget) == size]
            in_batches(model, same, length, alone, batch_size)
        in_batches(model, groups([q for q in questions if q.shared]), length, together, 1)


def end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Return the tokens that end an answer, by the tokenizer and by the model's generation config."""
    config = getattr(model, "generation_config", None)
    ends = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    return {i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None}


def cached(model: Any, ids: Sequence[int], chunk: int | None = None) -> Any:
    """Read a text into a key-value cache and return the cache.

    Args:
        chunk: tokens read at a time; None: all at once, which took a third less time on a CPU and takes more memory.
    """
    return prefill(model, torch.tensor([list(ids)], device=device_of(model)), chunk)[1]


def answer(model: Any, cache: Any, questions: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Answer questions greedily behind a cached text, each as if alone, and leave the cache as it was.

    Args:
        cache: of one text, as `cached` returns it.
        questions: token ids of each.
        budget: tokens to decode.

    Returns:
        `budget` token ids per question.
    """
    attention = getattr(unwrap(model).config, "_attn_implementation", None)
    whole = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    if whole and attention in ("sdpa", "eager"):  # other kernels take no mask
        return _together(model, cache, questions, budget)
    written, length = [], cache.get_seq_length() if whole else 0
    for question in questions:
        # A cache of another kind (sliding window, Beacon) forgets or condenses tokens.
        own = cache if whole else copy.deepcopy(cache)
        try:
            ids = torch.tensor([question], device=device_of(model))
            written.append(greedy(model, ids, budget, cache=own)[0].tolist())
        finally:
            if whole:
                _cut(cache, length)
    return written


def _together(model: Any, cache: Any, questions: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Answer all questions in the same forwards.

    A mask keeps them apart, and each starts at the position behind the text. With two questions of two and one tokens,
    the second one sees these keys:

        text text text | q0 q0 q1 | a0 a1 | a0 a1
         x    x    x           x        x       x
    """
    device, length = device_of(model), cache.get_seq_length()
    ids = torch.tensor([token for question in questions for token in question], device=device)
    owners = torch.tensor([number for number, question in enumerate(questions) for _ in question], device=device)
    places = torch.tensor([length + i for question in questions for i in range(len(question))], device=device)
    last = torch.tensor([len(question) for question in questions], device=device).cumsum(0) - 1
    known, written = owners[:0], []
    try:
        for _ in range(budget):
            known = torch.cat([known, owners])
            fed = {"position_ids": places[None], "attention_mask": _apart(known, len(ids), length, model.dtype)}
            with keeping(model, last) as extra:
                logits, cache = read(model, ids[None], cache, **fed, **extra)
            ids, places = logits[0].argmax(-1), places[last] + 1
            owners = last = torch.arange(len(questions), device=device)
            written.append(ids)
    finally:
        _cut(cache, length)
    return torch.stack(written, 1).tolist()


def _cut(cache: DynamicCache, length: int) -> None:
    """Remove what was read after the first `length` tokens."""
    added = cache.get_seq_length() - length
    if added:
        cache.crop(-added)


def _apart(owners: torch.Tensor, new: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask of the `new` last tokens: all of the text, and of the rest what is earlier and of the same owner.

    Args:
        owners: the question that each token behind the text belongs to, shape (tokens,).
        length: tokens of the text.

    Returns:
        (1, 1, new, length + tokens); 0 where a key is seen, else the smallest number.
    """
    order = torch.arange(len(owners), device=owners.device)
    seen = (owners[-new:, None] == owners) & (order[-new:, None] >= order)
    seen = torch.cat([seen.new_ones(new, length), seen], 1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[None, None]
