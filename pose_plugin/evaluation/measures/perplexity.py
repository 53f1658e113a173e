"""Sliding-window perplexity at each window size (Press et al. 2021; PoSE paper, section 4.2).

    length 8, stride 4        window 1   [a b c d e f g h]
    . = seen, not scored      window 2           [. . . . i j k l]
                              window 3             [. . . . . . . m]  ends with the text

Every token of a text is scored once, with at least length - stride tokens before it but at the text's start.
So each length scores the same tokens, unless `max_windows` picks some windows out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.losses import TokenLoss
from pose_plugin.evaluation.memory import fitting, in_batches
from pose_plugin.evaluation.model import device_of, evaluating
from pose_plugin.evaluation.prompts import leading_ids, plain_tokenizer
from pose_plugin.utils.errors import PoSEError


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)


@dataclass(frozen=True)
class Bucket:
    """Mean loss in nats of the tokens at window positions start … end-1, over all windows."""

    start: int
    end: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)


@dataclass(frozen=True)
class WindowPerplexity:
    """One window size: `loss` is the mean over `tokens` scored tokens, in nats; `losses` are those of each window."""

    length: int
    stride: int
    windows: int
    tokens: int
    loss: float
    buckets: tuple[Bucket, ...]
    losses: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)


@dataclass(frozen=True)
class PerplexityResult:
    """The window sizes of one model.

    Attributes:
        by_length: window size to figures.
        bos: whether a begin-of-text token stands before every window.
        texts: texts that were measured.
        left_out: texts shorter than the largest length.
    """

    by_length: dict[int, WindowPerplexity]
    bos: bool
    texts: int
    left_out: int
    max_windows: int | None = None
    max_tokens: int | None = None

    @property
    def definition(self) -> str:
        """What was measured, in one sentence: figures of differing definitions cannot be compared."""
        strides = ", ".join(f"{n}: {w.stride}" for n, w in self.by_length.items())
        counts = ", ".join(f"{n}: {w.tokens} in {w.windows}" for n, w in self.by_length.items())
        bos = (
            "the begin-of-text token stands before every window, counts in its length and is not scored"
            if self.bos
            else "no begin-of-text token, so the first token of a text is not scored"
        )
        capped = "" if self.max_tokens is None else f" cut to {self.max_tokens} tokens"
        picked = f"; at most {self.max_windows} windows a length, evenly spaced" if self.max_windows else ""
        return (
            f"Sliding-window perplexity: strides by window size ({strides}); a token is scored once, in the "
            f"first window that holds it{picked}; mean over tokens of {self.texts} texts{capped} "
            f"({self.left_out} shorter than the largest window left out); {bos}; scored tokens "
            f"and windows ({counts}). Buckets take all tokens of every window by their position in it."
        )

    def metrics(self) -> dict[str, float]:
        """{"perplexity/2048": 8.1, …}"""
        return {f"perplexity/{length}": window.perplexity for length, window in self.by_length.items()}

    def to_dict(self) -> dict[str, Any]:
        rows = {str(n): {"perplexity": w.perplexity, **asdict(w)} for n, w in self.by_length.items()}
        counts = {"texts": self.texts, "left_out": self.left_out}
        limits = {"max_windows": self.max_windows, "max_tokens": self.max_tokens}
        return {"definition": self.definition, "bos": self.bos, **counts, **limits, "by_length": rows}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PerplexityResult:
        """The opposite of `to_dict`."""
        rows = {}
        for n, row in data["by_length"].items():
            buckets = tuple(Bucket(**bucket) for bucket in row["buckets"])
            lists = {"buckets": buckets, "losses": tuple(row.get("losses", ()))}
            rows[int(n)] = WindowPerplexity(**{k: v for k, v in row.items() if k != "perplexity"} | lists)
        return cls(rows, *(data[k] for k in ("bos", "texts", "left_out", "max_windows", "max_tokens")))

    @classmethod
    def joined(cls, parts: Sequence[PerplexityResult]) -> PerplexityResult:
        """Results of single lengths on the same texts as one."""
        rows = {n: window for part in parts for n, window in part.by_length.items()}
        return replace(parts[0], by_length=dict(sorted(rows.items())))


@dataclass(frozen=True)
class _Window:
    ids: tuple[int, ...]
    unscored: int
    """Leading tokens that are context only."""


def perplexity(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str | Sequence[int]],
    lengths: Sequence[int],
    stride: int | None = None,
    max_windows: int | None = None,
    max_tokens: int | None = None,
    bos: bool | None = None,
    buckets: int = 8,
    batch_size: int | None = None,
    progress: bool = True,
) -> PerplexityResult:
    """Measures sliding-window perplexity. Texts shorter than the largest length are left out at every length.

    Positions are plain, mode and random state of the model are as before afterwards.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: texts, or their token ids without special tokens.
        lengths: window sizes in tokens, the begin-of-text token counted in.
        stride: tokens from window to window, at most length - 1 (larger ones are lowered to it, since the
            first token of a window is never scored); default: half of each length. PoSE uses 1024 (16384 for
            very long windows), position interpolation 256.
        max_windows: windows measured at each length, spread evenly over the texts; default: all.
        max_tokens: tokens taken of each text, from its start; default: all.
        bos: whether the begin-of-text token stands before every window; default: as the tokenizer does it.
        buckets: into how many position ranges a window is split.
        batch_size: windows in one forward; default: about 16k tokens.
        progress: whether to show a progress bar.

    Raises:
        PoSEError: no text as long as the largest length, bad stride or length, no begin-of-text token to use.
    """
    lengths = sorted(set(whole(lengths)))
    counts = {"stride": stride, "max_windows": max_windows, "max_tokens": max_tokens, "buckets": buckets}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise PoSEError(f"{name}={value} must be at least 1")
    used, begin, left_out = tokenised(tokenizer, texts, lengths, max_tokens, bos)
    device = device_of(model)
    strides = {n: min(stride or n // 2, n - 1) for n in lengths}
    windows = {n: _pick(_windows(used, begin, n, strides[n]), max_windows) for n in lengths}
    fits = {n: fitting(model, device, n, batch_size or max(1, 16384 // n)) for n in lengths}
    results = {}
    total = sum(map(len, windows.values()))
    with evaluating(model), tqdm(total=total, desc="perplexity", unit="window", disable=not progress) as bar:
        token_loss = TokenLoss(model)
        for n in lengths:
            bar.set_postfix_str(f"{n} tokens")
            tally = _Tally(n, buckets)

            def measure(
                batch: Sequence[_Window], chunk: int | None = fits[n].chunk
            ) -> tuple[Sequence[_Window], torch.Tensor]:
                ids = torch.tensor([window.ids for window in batch], device=device)
                return batch, token_loss(ids, chunk)

            for batch, losses in in_batches(windows[n], fits[n].batch, measure):
                tally.add(batch, losses)
                bar.update(len(batch))
            results[n] = tally.result(strides[n], len(windows[n]))
    return PerplexityResult(results, bool(begin), len(used), left_out, max_windows, max_tokens)


def tokenised(
    tokenizer: Any,
    texts: str | Sequence[str | Sequence[int]],
    lengths: Sequence[int],
    max_tokens: int | None = None,
    bos: bool | None = None,
) -> tuple[list[list[int]], list[int], int]:
    """What `perplexity` measures on; the arguments and what is raised are the same.

    Returns:
        token ids of each text that fills the largest window, ids before every window, texts left out.
    """
    tokenizer = plain_tokenizer(tokenizer)
    begin = _begin(tokenizer, bos)
    least = len(begin) + 2
    if not lengths or min(lengths) < least:
        raise PoSEError(f"lengths={lengths} must be window sizes of at least {least} tokens, e.g. [2048]")
    texts = [texts] if isinstance(texts, str) else texts
    documents = [_token_ids(tokenizer, text)[:max_tokens] for text in texts]
    used = [ids for ids in documents if len(ids) + len(begin) >= max(lengths)]
    if not used:
        longest = max(map(len, documents), default=0)
        raise PoSEError(
            f"length={max(lengths)} is more than the longest of {len(documents)} texts has ({longest} tokens"
            + (f", max_tokens={max_tokens}" if max_tokens else "")
            + "); give longer texts or shorter lengths"
        )
    return used, begin, len(documents) - len(used)


class _Tally:
    """Sums in float64: a mean over a million tokens keeps its digits."""

    def __init__(self, length: int, buckets: int) -> None:
        self.length = length
        self.total, self.tokens = 0.0, 0
        self.losses: list[float] = []
        edges = [(length * k // buckets, length * (k + 1) // buckets) for k in range(buckets)]
        # Position 0 has nothing before it, so a bucket of its own would be empty.
        self.edges = [(start, end) for start, end in edges if max(start, 1) < end]
        self.sums, self.counts = [0.0] * len(self.edges), [0] * len(self.edges)

    def add(self, batch: Sequence[_Window], losses: torch.Tensor) -> None:
        losses = losses.double()
        for window, row in zip(batch, losses, strict=True):
            # row[i] is the loss of the token at position i + 1.
            scored = row[max(window.unscored, 1) - 1 :]
            self.total += float(scored.sum())
            self.tokens += len(scored)
            self.losses.append(float(scored.mean()))
        for i, (start, end) in enumerate(self.edges):
            part = losses[:, max(start, 1) - 1 : end - 1]
            self.sums[i] += float(part.sum())
            self.counts[i] += part.numel()

    def result(self, stride: int, windows: int) -> WindowPerplexity:
        buckets = tuple(
            Bucket(start, end, total / count, count)
            for (start, end), total, count in zip(self.edges, self.sums, self.counts, strict=True)
        )
        mean, losses = self.total / self.tokens, tuple(self.losses)
        return WindowPerplexity(self.length, stride, windows, self.tokens, mean, buckets, losses)


def _windows(documents: Sequence[list[int]], begin: list[int], length: int, stride: int) -> list[_Window]:
    holds = length - len(begin)
    windows = []
    for ids in documents:
        seen = 0
        last = len(ids) - holds
        for start in [*range(0, last, stride), last]:
            context = len(begin) + max(seen - start, 0)
            windows.append(_Window((*begin, *ids[start : start + holds]), context))
            seen = start + holds
    return windows


def _pick(windows: list[_Window], most: int | None) -> list[_Window]:
    if most is None or len(windows) <= most:
        return windows
    if most == 1:
        return windows[:1]
    return [windows[round(i * (len(windows) - 1) / (most - 1))] for i in range(most)]


def token_ids(tokenizer: Any, texts: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """The ids that stand before every text, and those of each text, however short."""
    tokenizer = plain_tokenizer(tokenizer)
    return leading_ids(tokenizer), [_token_ids(tokenizer, text) for text in texts]


def _token_ids(tokenizer: Any, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _begin(tokenizer: Any, bos: bool | None) -> list[int]:
    if bos is None:
        return leading_ids(tokenizer)
    if bos and tokenizer.bos_token_id is None:
        raise PoSEError("bos=True, but this tokenizer has no begin-of-text token; leave bos out")
    return [tokenizer.bos_token_id] if bos else []
