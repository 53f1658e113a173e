"""`evaluate:` in the `pose:` block: which measures it names, and what each needs before the first step."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pose_plugin.config import EvaluateSettings, PoSESettings
from pose_plugin.evaluation.by_length import ByLength
from pose_plugin.evaluation.callback import EvaluationCallback
from pose_plugin.evaluation.measures.gap import TOKENS as GAP_TOKENS
from pose_plugin.evaluation.measures.gap import gap_probe
from pose_plugin.evaluation.measures.longppl import KeyTokens, LongPPLResult, key_tokens, longppl, require_same_tokens
from pose_plugin.evaluation.measures.needle import DEPTHS, needle, needle_prompts
from pose_plugin.evaluation.measures.perplexity import PerplexityResult, perplexity, tokenised
from pose_plugin.evaluation.measures.topics import topic_prompts, topics
from pose_plugin.evaluation.model import device_of, innermost
from pose_plugin.evaluation.retrieval import RetrievalResult
from pose_plugin.evaluation.sharded import agreed
from pose_plugin.evaluation.text_file import read_text
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

Measure = Callable[[Any, Any], Any]


def from_settings(settings: PoSESettings) -> EvaluationCallback:
    """The callback that a `pose:` block with `evaluate:` asks for.

    Raises:
        PoSEError: a text that cannot be read; LongPPL without a length beyond its short context.
    """
    asked = settings.evaluate
    assert asked is not None
    lengths = asked.lengths or doubled(settings.train_length or settings.target_length, settings.target_length)
    tasks = asked.tasks or (["passkey", "perplexity"] if asked.texts else ["passkey"])
    texts = [read_text(path, "evaluate.texts") for path in asked.texts]
    shared: dict[str, Any] = {"batch_size": asked.batch_size, "progress": False}
    more = further_measures(tasks, lengths, texts, asked, shared)
    if "short" in tasks:
        more["short"] = ShortGuard(texts, asked.short_length, settings.train_length, asked.max_windows, shared)
    if "longppl" in tasks:
        assert asked.evaluator is not None
        short = asked.short_context or settings.train_length or min(lengths)
        more["longppl"] = LongPPLTask(texts, [n for n in lengths if n > short], short, asked.evaluator, shared)

    def check(model: Any, tokenizer: Any) -> None:
        check_further(tokenizer, tasks, lengths, texts)
        for measure in more.values():
            if isinstance(measure, ShortGuard | LongPPLTask):
                measure.prepare(model, tokenizer)

    return EvaluationCallback(
        passkey_lengths=lengths if "passkey" in tasks else (),
        perplexity_lengths=lengths if "perplexity" in tasks else (),
        texts=texts,
        every=asked.every,
        at_start=asked.at_start,
        at_end=asked.at_end,
        passkey_options={"trials": asked.trials, "seed": asked.seed, **shared},
        perplexity_options={"max_windows": asked.max_windows, **shared},
        more=more,
        check=check,
    )


def further_measures(
    tasks: Sequence[str], lengths: Sequence[int], texts: Sequence[str], asked: EvaluateSettings, shared: dict[str, Any]
) -> dict[str, Measure]:
    """Those that need nothing but lengths and texts, by name; passkey and perplexity are the callback's own."""
    trials = max(asked.trials, len(DEPTHS))

    def needles(model: Any, tokenizer: Any, n: int) -> RetrievalResult:
        return needle(model, tokenizer, [n], trials=trials, seed=asked.seed, **shared)

    def topic(model: Any, tokenizer: Any, n: int) -> RetrievalResult:
        return topics(model, tokenizer, [n], trials=asked.trials, seed=asked.seed, **shared)

    def gap(model: Any, tokenizer: Any) -> Any:
        return gap_probe(model, tokenizer, texts, lengths, max_windows=asked.max_windows, **shared)

    known: dict[str, Measure] = {
        "needle": ByLength("needle", lengths, needles, RetrievalResult),
        "topics": ByLength("topics", lengths, topic, RetrievalResult),
        # Its texts are short at every length.
        "gap": gap,
    }
    return {name: known[name] for name in tasks if name in known}


def check_further(tokenizer: Any, tasks: Sequence[str], lengths: Sequence[int], texts: Sequence[str]) -> None:
    """Checks the shortest length of each further measure; the rest can only be easier.

    Raises:
        PoSEError: as the measure itself would.
    """
    if "needle" in tasks:
        needle_prompts(tokenizer, [min(lengths)], trials=len(DEPTHS))
    if "topics" in tasks:
        topic_prompts(tokenizer, [min(lengths)], trials=1)
    if "gap" in tasks:
        tokenised(tokenizer, texts, [min(GAP_TOKENS, *lengths)])


@dataclass(frozen=True)
class ShortResult:
    """Perplexity at the old window."""

    perplexity: PerplexityResult

    @property
    def definition(self) -> str:
        return f"Short-context guard, at the window that the base was made with. {self.perplexity.definition}"

    def metrics(self) -> dict[str, float]:
        """{"short_perplexity/2048": 8.1}"""
        return {f"short_{name}": value for name, value in self.perplexity.metrics().items()}


class ShortGuard:
    """Whether short skill suffers: perplexity at the window of the base.

    Args:
        texts: to measure on.
        length: the window in tokens; None: the base's, as `extend_context` has noted it in the model's config.
        trained: L_c, where the config says nothing.
        max_windows: as in `perplexity`.
        shared: further arguments of `perplexity`.
    """

    def __init__(
        self, texts: Sequence[str], length: int | None, trained: int | None, max_windows: int, shared: dict[str, Any]
    ) -> None:
        self.texts, self.length, self.trained = texts, length, trained
        self.max_windows, self.shared = max_windows, shared

    def prepare(self, model: Any, tokenizer: Any) -> None:
        """Finds the window and checks that a text fills it.

        Raises:
            PoSEError: none does.
        """
        from pose_plugin.rope.read import RECORD_KEY, lookup, text_config

        if self.length is None:
            config = text_config(innermost(model).config)
            known = (lookup(config, RECORD_KEY) or {}).get("original_length")
            self.length = known or self.trained or config.max_position_embeddings
        try:
            tokenised(tokenizer, self.texts, [self.length])
        except PoSEError as error:
            raise PoSEError(f"evaluate.tasks: short, evaluate.short_length={self.length}: {error}") from None

    def __call__(self, model: Any, tokenizer: Any) -> ShortResult:
        assert self.length is not None
        found = perplexity(model, tokenizer, self.texts, [self.length], max_windows=self.max_windows, **self.shared)
        return ShortResult(found)


class LongPPLTask:
    """LongPPL on key tokens that an evaluator finds once, before the first step.

    Args:
        texts: to measure on.
        lengths: those beyond `short`.
        short: K in tokens.
        evaluator: folder or hub name of a model that can use the lengths.
        shared: further arguments of `longppl`.

    Raises:
        PoSEError: no lengths.
    """

    def __init__(
        self, texts: Sequence[str], lengths: Sequence[int], short: int, evaluator: str, shared: dict[str, Any]
    ) -> None:
        if not lengths:
            raise PoSEError(
                f"evaluate.tasks: longppl compares with the last {short} tokens, and no length of evaluate.lengths is "
                "longer; give longer ones, or a smaller evaluate.short_context"
            )
        self.texts, self.lengths, self.short, self.evaluator, self.shared = texts, lengths, short, evaluator, shared
        self.keys: dict[int, KeyTokens] = {}
        self._shared_keys = False

    def prepare(self, model: Any, tokenizer: Any) -> None:
        """Asks the evaluator, which is gone from memory afterwards.

        Raises:
            PoSEError: it does not load, has another tokenizer, or no length has a key token.
        """
        if self.keys:
            return
        from pose_plugin.checkpoints.load import describe, load

        source = describe(self.evaluator)
        require_same_tokens(source.tokenizer, tokenizer, self.texts, source.name, "the trained model")
        for n in self.lengths:
            tokenised(tokenizer, self.texts, [n])
        with _as_if_alone(), _random_states():
            judge = load(source, device=str(device_of(model)))
            asking = ByLength("longppl", self.lengths, functools.partial(self._keys, source.name))
            found = asking.parts(judge, tokenizer)
            del judge
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.keys = {n: keys for n, keys in found.items() if keys.count}
        without = [n for n in found if n not in self.keys]
        if not self.keys:
            raise PoSEError(
                f"evaluate.tasks: longppl: by {source.name} no token of evaluate.texts gains from more than the last "
                f"{self.short} tokens, at {', '.join(map(str, without))}; give longer or more texts, or an "
                "evaluate.evaluator that uses its context"
            )
        for n in without:
            log.warning("longppl: by %s there is no key token at %d, so it is not measured there", source.name, n)

    def __call__(self, model: Any, tokenizer: Any) -> LongPPLResult:
        if not self._shared_keys:
            self.keys, self._shared_keys = agreed(model, self.keys), True
            self._measure = ByLength("longppl", list(self.keys), self._at, LongPPLResult)
        return self._measure(model, tokenizer)

    def _keys(self, name: str, judge: Any, tokenizer: Any, n: int) -> KeyTokens:
        return key_tokens(judge, tokenizer, self.texts, n, self.short, name, **self.shared)

    def _at(self, model: Any, tokenizer: Any, n: int) -> LongPPLResult:
        return longppl(model, tokenizer, self.texts, self.keys[n], **self.shared)


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Within a distributed run a model is loaded whole, on every rank: not divided (ZeRO-3), not empty (FSDP)."""
    from transformers import modeling_utils
    from transformers.integrations import deepspeed

    name, variable = "is_deepspeed_zero3_enabled", "FSDP_CPU_RAM_EFFICIENT_LOADING"
    # Both, as Axolotl replaces them too.
    kept, said = [(module, getattr(module, name)) for module in (modeling_utils, deepspeed)], os.environ.get(variable)
    for module, _ in kept:
        setattr(module, name, lambda: False)
    if said is not None:
        os.environ[variable] = "false"
    try:
        yield
    finally:
        for module, function in kept:
            setattr(module, name, function)
        if said is not None:
            os.environ[variable] = said


@contextmanager
def _random_states() -> Iterator[None]:
    """Loading may draw numbers, and the training must not notice."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def doubled(shortest: int, longest: int) -> list[int]:
    """shortest, twice that, … and longest."""
    lengths = [shortest]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return sorted({*lengths, longest})
