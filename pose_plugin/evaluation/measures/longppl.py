"""LongPPL: perplexity over the tokens that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

Plain perplexity hardly depends on far tokens, as most tokens follow from the last few hundred. A *key token* is one
that an evaluator model predicts much better with the whole text before it than with the last K tokens:

    log P(x | all before) - log P(x | last K) > alpha     and     log P(x | all before) > beta

LongPPL of a model is exp(mean loss of the key tokens), all before them given. Which tokens are key is the evaluator's
say, the same for all models; so figures with different evaluators cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.evaluation.losses import TokenLoss
from pose_plugin.evaluation.measures.perplexity import token_ids, tokenised
from pose_plugin.evaluation.memory import Fit, fitting, in_batches
from pose_plugin.evaluation.model import device_of, evaluating
from pose_plugin.utils.errors import PoSEError

ALPHA, BETA = 2.0, -2.0
"""The paper's thresholds, in nats."""


@dataclass(frozen=True)
class KeyTokens:
    """What an evaluator found in texts cut to `length` tokens.

    Attributes:
        evaluator: its name, for the definition.
        length: tokens of each text, the begin-of-text token counted in.
        short: K, the short context in tokens.
        positions: for each text, the positions of its key tokens in the window.
    """

    evaluator: str
    length: int
    short: int
    alpha: float
    beta: float
    positions: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.positions))


@dataclass(frozen=True)
class LongPPL:
    """One length: mean losses in nats over the key tokens and over all tokens beyond the short context.

    `losses` are means over the key tokens of each text that has some.
    """

    length: int
    loss: float
    tokens: int
    plain_loss: float
    plain_tokens: int
    losses: tuple[float, ...] = ()

    @property
    def longppl(self) -> float:
        return math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class LongPPLResult:
    """The lengths of one model."""

    by_length: dict[int, LongPPL]
    evaluator: str
    short: int
    alpha: float
    beta: float
    texts: int

    @property
    def definition(self) -> str:
        counts = ", ".join(f"{n}: {w.tokens} of {w.plain_tokens}" for n, w in self.by_length.items())
        return (
            f"LongPPL (arXiv 2410.23771): perplexity over key tokens of {self.texts} texts, each cut to `length` "
            f"tokens. A token is key if the evaluator, {self.evaluator}, gives it a log-probability above "
            f"{self.beta:g} with all before it, and gains more than {self.alpha:g} over the last {self.short} (to "
            f"{short_window(self.short)}) tokens alone. Key tokens by length ({counts}). An evaluator that is one of "
            "the models favours that model."
        )

    def metrics(self) -> dict[str, float]:
        return {f"longppl/{n}": window.longppl for n, window in self.by_length.items()}

    def to_dict(self) -> dict[str, Any]:
        rows = {str(n): {"longppl": w.longppl, **asdict(w)} for n, w in self.by_length.items()}
        rest = {"evaluator": self.evaluator, "short": self.short, "alpha": self.alpha, "beta": self.beta}
        return {"definition": self.definition, **rest, "texts": self.texts, "by_length": rows}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LongPPLResult:
        """The opposite of `to_dict`."""
        rows = {
            int(n): LongPPL(**{k: v for k, v in w.items() if k != "longppl"} | {"losses": tuple(w.get("losses", ()))})
            for n, w in data["by_length"].items()
        }
        return cls(rows, *(data[name] for name in ("evaluator", "short", "alpha", "beta", "texts")))

    @classmethod
    def joined(cls, parts: Sequence[LongPPLResult]) -> LongPPLResult:
        """Results of single lengths as one."""
        rows = {n: w for part in parts for n, w in part.by_length.items()}
        first = parts[0]
        return cls(dict(sorted(rows.items())), first.evaluator, first.short, first.alpha, first.beta, first.texts)


def short_window(short: int) -> int:
    """The most context in tokens that the short side gives: windows slide on by a quarter of K."""
    return short + max(1, short // 4)


def key_tokens(
    evaluator: Any,
    tokenizer: Any,
    texts: str | Sequence[str | Sequence[int]],
    length: int,
    short: int,
    name: str,
    alpha: float = ALPHA,
    beta: float = BETA,
    batch_size: int | None = None,
    progress: bool = True,
) -> KeyTokens:
    """Finds the key tokens of texts.

    Args:
        evaluator: a causal language model that can use `length` tokens.
        tokenizer: its tokenizer; models to be measured must have the same.
        texts: texts, or their token ids without special tokens; each is cut to its first `length` tokens.
        length: of the long context in tokens, the begin-of-text token counted in.
        short: K in tokens; the paper takes 4096. Each token gets K to 1.25 K tokens, as windows slide.
        name: how the evaluator is called in definitions.
        alpha: least gain in nats.
        beta: least log-probability.

    Raises:
        PoSEError: no text of that length, `short` not below it, too little memory.
    """
    if not 1 <= short < length:
        raise PoSEError(f"short={short} must be at least 1 and below length={length}: the gain of the rest is measured")
    windows, begin = _windows(tokenizer, texts, length)
    step = short_window(short) - short
    device, positions = device_of(evaluator), []
    whole, part = (_fit(evaluator, n, batch_size) for n in (length, short + step))
    with evaluating(evaluator), tqdm(windows, desc="key tokens", unit="text", disable=not progress) as bar:
        loss = TokenLoss(evaluator)
        for window in bar:
            (long,) = in_batches([window], 1, lambda row: loss(torch.tensor(row, device=device), whole.chunk)[0])
            # Tokens short … length-1, step at a time, each group with the `short` tokens before it.
            starts = range(len(begin) + short, length, step)
            near = torch.empty(0)
            for n in dict.fromkeys(min(step, length - start) for start in starts):
                same = [start for start in starts if min(step, length - start) == n]
                rows = [[*begin, *window[start - short : start + n]] for start in same]

                def run(batch: Sequence[list[int]], n: int = n) -> torch.Tensor:
                    return loss(torch.tensor(batch, device=device), part.chunk)[:, -n:]

                near = torch.cat([near, *(found.flatten() for found in in_batches(rows, part.batch, run))])
            far = long[len(begin) + short - 1 :]
            key = (near - far > alpha) & (-far > beta)
            positions.append(tuple(i + len(begin) + short for i in key.nonzero()[:, 0].tolist()))
    return KeyTokens(name, length, short, alpha, beta, tuple(positions))


def longppl(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str | Sequence[int]],
    keys: KeyTokens,
    batch_size: int | None = None,
    progress: bool = True,
) -> LongPPLResult:
    """LongPPL of a model over the key tokens that `key_tokens` found in the same texts.

    Raises:
        PoSEError: other texts or another tokenizer than the keys were found with, no key token at all.
    """
    windows, begin = _windows(tokenizer, texts, keys.length)
    if len(windows) != len(keys.positions):
        raise PoSEError(f"{len(windows)} texts, but key tokens of {len(keys.positions)}; find them in the same texts")
    if not keys.count:
        raise PoSEError(
            f"length={keys.length}: by {keys.evaluator} no token gains {keys.alpha:g} nats over the last {keys.short} "
            "tokens, so LongPPL is not defined; give longer or more texts, an evaluator that uses its context, or a "
            "smaller short context"
        )
    device, fit = device_of(model), _fit(model, keys.length, batch_size)
    total = plain = 0.0
    means: list[float] = []
    beyond = keys.short + len(begin)

    def run(batch: Sequence[list[int]]) -> torch.Tensor:
        return loss(torch.tensor(batch, device=device), fit.chunk).double()

    with evaluating(model), tqdm(total=len(windows), desc="LongPPL", unit="text", disable=not progress) as bar:
        loss = TokenLoss(model)
        rows = (row for batch in in_batches(windows, fit.batch, run) for row in batch)
        for row, positions in zip(rows, keys.positions, strict=True):
            # row[i] is the loss of the token at position i + 1.
            key = row[torch.tensor(positions, dtype=torch.long) - 1]
            total += float(key.sum())
            means += [float(key.mean())] if positions else []
            plain += float(row[beyond - 1 :].sum())
            bar.update()
    count = len(windows) * (keys.length - beyond)
    window = LongPPL(keys.length, total / keys.count, keys.count, plain / count, count, tuple(means))
    return LongPPLResult({keys.length: window}, keys.evaluator, keys.short, keys.alpha, keys.beta, len(windows))


def require_same_tokens(evaluator: Any, tokenizer: Any, texts: Sequence[str], name: str, other: str) -> None:
    """Checks that two tokenizers make the same tokens of the texts; what else they know (a pad token) does not matter.

    Args:
        evaluator: the evaluator's tokenizer, `name` its model.
        tokenizer: that of `other`, the model to be measured.

    Raises:
        PoSEError: they do not.
    """
    if token_ids(evaluator, texts) != token_ids(tokenizer, texts):
        raise PoSEError(
            f"longppl: {other} and the evaluator {name} have different tokenizers, so a key token of one is none of "
            "the other; give an evaluator with the same tokenizer, or leave longppl out"
        )


def _windows(tokenizer: Any, texts: Any, length: int) -> tuple[list[list[int]], list[int]]:
    used, begin, _ = tokenised(tokenizer, texts, [length])
    return [[*begin, *ids[: length - len(begin)]] for ids in used], begin


def _fit(model: Any, length: int, batch_size: int | None) -> Fit:
    return fitting(model, device_of(model), length, batch_size or max(1, 16384 // length))
