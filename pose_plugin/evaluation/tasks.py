"""What `pose-plugin evaluate` can measure: each task in pieces small enough to be kept one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pose_plugin.evaluation.cost import Work
from pose_plugin.evaluation.finished import state_of
from pose_plugin.evaluation.measures.gap import TOKENS, GapResult, gap_probe
from pose_plugin.evaluation.measures.harness import HarnessResult, harness, require_harness, version
from pose_plugin.evaluation.measures.longppl import KeyTokens, LongPPLResult, key_tokens, longppl
from pose_plugin.evaluation.measures.needle import DEPTHS, needle, needle_prompts
from pose_plugin.evaluation.measures.passkey import PasskeyBuilder, PasskeyResult, documents, passkey
from pose_plugin.evaluation.measures.perplexity import PerplexityResult, perplexity, token_ids, tokenised
from pose_plugin.evaluation.measures.topics import topic_prompts, topics
from pose_plugin.evaluation.retrieval import RetrievalResult
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import digest

if TYPE_CHECKING:
    from pose_plugin.checkpoints.load import Source


@dataclass
class Plan:
    """What was asked for on the command line; lengths in tokens.

    Attributes:
        short_length: the window of the short-context guard.
        short_context: K of LongPPL.
        keys: LongPPL's key tokens by length, once the evaluator has been asked.
    """

    lengths: list[int]
    texts: list[str]
    trials: int = 50
    depths: list[float] | None = None
    kinds: tuple[str, ...] = ("single", "multi", "kv")
    filler: str | None = None
    seed: int = 0
    stride: int | None = None
    max_windows: int | None = None
    max_tokens: int | None = None
    batch_size: int | None = None
    short_length: int = 2048
    short_context: int = 4096
    evaluator: str = ""
    keys: dict[int, KeyTokens] = field(default_factory=dict)
    harness_tasks: tuple[str, ...] = ()
    harness_limit: int | None = None
    harness_path: str | None = None
    progress: bool = True

    @property
    def shared(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "progress": self.progress}

    @property
    def needle_depths(self) -> Sequence[float]:
        return self.depths or DEPTHS

    def texts_for(self, source: Source, lengths: Sequence[int]) -> list[list[int]]:
        """Token ids of the texts that fill the largest of the lengths, the same texts at every length."""
        return tokenised(source.tokenizer, self.texts, lengths, self.max_tokens)[0]

    def tokens(self, source: Source) -> str:
        """The same for tokenizers that make the same tokens of the texts; "" without texts."""
        return digest(str(token_ids(source.tokenizer, self.texts))) if self.texts else ""


@dataclass(frozen=True)
class Task:
    """One measure.

    Attributes:
        pieces: lengths that are measured one by one; 0 stands for all at once.
        check: raises PoSEError for what cannot work, before any weights are loaded.
        run: of (model, source, plan, piece).
        work: what a piece will take, of (source, plan, piece).
        depends: what else than model, task and piece the result depends on.
        result: the class of the result, with from_dict and perhaps joined.
        needs_texts: whether there is nothing to measure without --texts.
    """

    pieces: Callable[[Plan], list[int]]
    check: Callable[[Source, Plan], Any]
    run: Callable[[Any, Source, Plan, int], Any]
    work: Callable[[Source, Plan, int], Work]
    depends: Callable[[Plan], dict[str, Any]]
    result: Any
    needs_texts: bool = False

    def joined(self, parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else self.result.joined(parts)


def _prompts(plan: Plan) -> dict[str, Any]:
    filler = None if plan.filler is None else digest(plan.filler)
    return {"trials": plan.trials, "seed": plan.seed, "depths": plan.depths, "filler": filler}


def _texts(plan: Plan) -> dict[str, Any]:
    return {"texts": [digest(text) for text in plan.texts], "max_tokens": plan.max_tokens}


def _windows(source: Source, plan: Plan, length: int, lengths: Sequence[int]) -> int:
    stride = min(plan.stride or length // 2, length - 1)
    counts = [max(0, -(-(len(ids) - length) // stride)) + 1 for ids in plan.texts_for(source, lengths)]
    return min(sum(counts), plan.max_windows or sum(counts))


def _passkey(model: Any, source: Source, plan: Plan, n: int) -> PasskeyResult:
    options: dict[str, Any] = {"filler_text": plan.filler, **plan.shared}
    return passkey(model, source.tokenizer, [n], plan.trials, plan.depths, plan.seed, **options)


def _perplexity(model: Any, source: Source, plan: Plan, n: int) -> PerplexityResult:
    used = plan.texts_for(source, plan.lengths)
    result = perplexity(model, source.tokenizer, used, [n], plan.stride, plan.max_windows, **plan.shared)
    from dataclasses import replace

    return replace(result, left_out=len(plan.texts) - len(used), max_tokens=plan.max_tokens)


def _needle(model: Any, source: Source, plan: Plan, n: int) -> RetrievalResult:
    options: dict[str, Any] = {"filler_text": plan.filler, **plan.shared}
    return needle(model, source.tokenizer, [n], plan.kinds, plan.needle_depths, plan.trials, plan.seed, **options)


def _topics(model: Any, source: Source, plan: Plan, n: int) -> RetrievalResult:
    return topics(model, source.tokenizer, [n], plan.trials, seed=plan.seed, filler_text=plan.filler, **plan.shared)


def _longppl(model: Any, source: Source, plan: Plan, n: int) -> LongPPLResult:
    return longppl(model, source.tokenizer, plan.texts_for(source, [n]), plan.keys[n], **plan.shared)


def _gap(model: Any, source: Source, plan: Plan, _: int) -> GapResult:
    most = plan.max_windows or 8
    return gap_probe(model, source.tokenizer, plan.texts, plan.lengths, max_windows=most, **plan.shared)


def _short(model: Any, source: Source, plan: Plan, _: int) -> PerplexityResult:
    n, most = plan.short_length, plan.max_windows or 20
    return perplexity(model, source.tokenizer, plan.texts, [n], None, most, plan.max_tokens, **plan.shared)


def _harness(model: Any, source: Source, plan: Plan, _: int) -> HarnessResult:
    folder = source.tokenizer.name_or_path or source.path
    options: dict[str, Any] = {
        "limit": plan.harness_limit,
        "batch_size": plan.batch_size,
        "include_path": plan.harness_path,
    }
    return harness(model, source.tokenizer, folder, plan.harness_tasks, plan.lengths, seed=plan.seed, **options)


def find_keys(evaluator: Any, source: Source, plan: Plan, n: int) -> KeyTokens:
    """The key tokens of LongPPL at `n` tokens."""
    used = plan.texts_for(source, [n])
    return key_tokens(evaluator, source.tokenizer, used, n, plan.short_context, plan.evaluator, **plan.shared)


def longppl_lengths(plan: Plan) -> list[int]:
    """The lengths that are longer than the short context."""
    return [n for n in plan.lengths if n > plan.short_context]


def _check_longppl(source: Source, plan: Plan) -> None:
    if not longppl_lengths(plan):
        raise PoSEError(
            f"longppl compares with the last {plan.short_context} tokens, and no length of {plan.lengths} is longer; "
            "give longer --lengths, or a smaller --short-context"
        )
    plan.texts_for(source, longppl_lengths(plan))


def _one(plan: Plan) -> list[int]:
    return [0]


TASKS: dict[str, Task] = {
    "passkey": Task(
        pieces=lambda plan: plan.lengths,
        check=lambda source, plan: documents(
            PasskeyBuilder(source.tokenizer, None, plan.filler), plan.lengths[:1], plan.trials, plan.depths, plan.seed
        ),
        run=_passkey,
        work=lambda source, plan, n: Work("passkey", n, plan.trials),
        depends=_prompts,
        result=PasskeyResult,
    ),
    "perplexity": Task(
        pieces=lambda plan: plan.lengths,
        check=lambda source, plan: plan.texts_for(source, plan.lengths),
        run=_perplexity,
        work=lambda source, plan, n: Work("perplexity", n, _windows(source, plan, n, plan.lengths)),
        depends=lambda plan: {
            **_texts(plan), "stride": plan.stride, "max_windows": plan.max_windows, "longest": max(plan.lengths)
        },
        result=PerplexityResult,
        needs_texts=True,
    ),
    "needle": Task(
        pieces=lambda plan: plan.lengths,
        check=lambda source, plan: needle_prompts(
            source.tokenizer, plan.lengths[:1], plan.kinds, plan.needle_depths, plan.trials, plan.seed, plan.filler
        ),
        run=_needle,
        work=lambda source, plan, n: Work("needle", n, plan.trials * len(plan.kinds), 16),
        depends=lambda plan: {**_prompts(plan), "kinds": plan.kinds},
        result=RetrievalResult,
    ),
    "topics": Task(
        pieces=lambda plan: plan.lengths,
        check=lambda source, plan: topic_prompts(source.tokenizer, plan.lengths[:1], 1, filler_text=plan.filler),
        run=_topics,
        work=lambda source, plan, n: Work("topics", n, plan.trials, 12),
        depends=_prompts,
        result=RetrievalResult,
    ),
    "longppl": Task(
        pieces=longppl_lengths,
        check=_check_longppl,
        run=_longppl,
        work=lambda source, plan, n: Work("longppl", n, len(plan.texts_for(source, [n]))),
        depends=lambda plan: {
            **_texts(plan), "short": plan.short_context, "keys": {n: k.positions for n, k in plan.keys.items()}
        },
        result=LongPPLResult,
        needs_texts=True,
    ),
    "gap": Task(
        pieces=_one,
        check=lambda source, plan: tokenised(source.tokenizer, plan.texts, [min(TOKENS, *plan.lengths)]),
        run=_gap,
        work=lambda source, plan, _: Work(
            "gap", min(TOKENS, *plan.lengths), (plan.max_windows or 8) * (len(plan.lengths) + 1)
        ),
        depends=lambda plan: {**_texts(plan), "lengths": plan.lengths, "max_windows": plan.max_windows},
        result=GapResult,
        needs_texts=True,
    ),
    "short": Task(
        pieces=_one,
        check=lambda source, plan: plan.texts_for(source, [plan.short_length]),
        run=_short,
        work=lambda source, plan, _: Work(
            "short", plan.short_length, min(_windows(source, plan, plan.short_length, [plan.short_length]), 20)
        ),
        depends=lambda plan: {**_texts(plan), "length": plan.short_length, "max_windows": plan.max_windows},
        result=PerplexityResult,
        needs_texts=True,
    ),
    "harness": Task(
        pieces=_one,
        check=lambda source, plan: require_harness(plan.harness_tasks, plan.lengths, plan.harness_path),
        run=_harness,
        work=lambda source, plan, _: Work("harness", max(plan.lengths), 0),
        depends=lambda plan: {
            "tasks": plan.harness_tasks, "limit": plan.harness_limit, "lengths": plan.lengths, "seed": plan.seed,
            "path": plan.harness_path and state_of(Path(plan.harness_path)), "lm_eval": version(),
        },
        result=HarnessResult,
    ),
}  # fmt: skip
