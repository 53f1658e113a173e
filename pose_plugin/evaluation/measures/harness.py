"""RULER, LongBench and other tasks of lm-eval, with the lengths passed on and checked.

lm-eval makes RULER's prompts for the lengths in `metadata`, and cuts every prompt at the model wrapper's `max_length`
from the left without failing. So both are set here, and the prompts that come back are counted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, StrictInt

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.fingerprints import of_folder
from pose_plugin.evaluation.measure import Measure, Windows
from pose_plugin.evaluation.questions import Answers, unanswered
from pose_plugin.evaluation.results import Result, Row
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap

RULER_LENGTHS = tuple(4096 * 2**k for k in range(6))
"""lm-eval's RULER has figures for these alone. Below 4096 it searches forever for a haystack that is short enough
(lm-eval issue 2963); what it measures at other lengths is thrown away."""


def harness(model: Any, tokenizer: Any, tasks: Sequence[str], lengths: Sequence[int], **options: Any) -> Result:
    """Run tasks of lm-eval on a loaded model; `options` are the fields of `Harness`."""
    return Harness(harness=list(tasks), **options).measure(model, tokenizer, lengths)


class Harness(Measure):
    """Tasks of lm-eval. RULER and tasks with a `custom_dataset` make prompts for each length; for other tasks the
    largest length is the limit."""

    name: ClassVar[str] = "harness"
    title: ClassVar[str] = "lm-eval"
    label: ClassVar[str] = "score"
    higher_is_better: ClassVar[bool] = True
    on_a_server: ClassVar[bool] = True
    while_training: ClassVar[bool] = False
    chosen_by: ClassVar[str] = "harness"
    unseen: ClassVar[str] = "data sets or files outside --harness-path"
    ranked: ClassVar[bool] = False

    harness: list[str] = Field(
        [],
        description="tasks of lm-eval, e.g. niah_single_1,ruler_vt,longbench; without --tasks nothing else is measured",
    )
    harness_limit: PositiveInt | None = Field(None, description="samples per task; default: all")
    harness_path: str | None = Field(None, description="a folder with more lm-eval task YAMLs")
    seed: StrictInt = Field(0, description="random seed of the tasks")

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        super().prepare(tokenizer, lengths, windows)
        self.harness = list(dict.fromkeys(self.harness))
        require_harness(self.harness, self._lengths, self.harness_path)

    def pieces(self) -> list[int]:
        """All lengths at once: lm-eval reads thousands of task files at each start."""
        return self._lengths[-1:]

    def run(self, model: Any, length: int) -> Result:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from pose_plugin.evaluation.served import ServedModel

        folder = self._tokenizer.name_or_path
        metadata = {"max_seq_lengths": self._lengths, "tokenizer": folder, "pretrained": folder}
        wrapped: Any
        if isinstance(model, ServedModel):
            wrapped = served(model, self._tokenizer, self._kept or Answers())
        else:
            wrapped = HFLM(
                pretrained=model, tokenizer=self._tokenizer, batch_size=self.batch_size or 1, max_length=allowed(length)
            )
        counter = _PromptCounter(wrapped, allowed(length))
        defaults = not _own_tasks_only(self.harness, self.harness_path)
        manager = TaskManager(include_path=self.harness_path, include_defaults=defaults, metadata=metadata)
        seeds = dict.fromkeys(["random_seed", "numpy_random_seed", "torch_random_seed"], self.seed)
        try:
            with without_penalties(model):
                found = lm_eval.simple_evaluate(
                    wrapped, tasks=self.harness, limit=self.harness_limit, metadata=metadata, task_manager=manager,
                    log_samples=False, bootstrap_iters=0, **seeds,
                )  # fmt: skip
        except PoSEError:
            raise
        except Exception as error:
            # Any task's own code runs in there.
            raise PoSEError(
                f"--harness {','.join(self.harness)} failed inside lm-eval: {type(error).__name__}: {str(error)[:500]}"
                "; install what it names, or download its data once with network access"
            ) from error
        rows = rows_of(found["results"], self._lengths)
        if not rows:
            raise PoSEError(
                f"--harness {','.join(self.harness)}: lm-eval returned no score for {self._lengths} tokens; check "
                "which lengths these tasks have scores for"
            )
        return Result(self.name, self._definition(counter.longest), rows)

    def depends(self) -> dict[str, Any]:
        folder = self.harness_path and of_folder(Path(self.harness_path))
        # The path as it was typed does not count.
        own = {"harness_path": None, "lengths": self._lengths, "folder": folder, "lm_eval": version()}
        return super().depends() | own

    def _definition(self, longest: int) -> str:
        samples = (
            "all samples" if self.harness_limit is None else f"the first {self.harness_limit} samples of each task"
        )
        return (
            f"lm-eval {version()}: {', '.join(self.harness)}, {samples}, lengths passed "
            f"{', '.join(map(str, self._lengths))}; the longest prompt had {longest} tokens and none was cut. "
            "Scores are lm-eval's own."
        )

    @classmethod
    def place(cls, row: Row) -> tuple[str, str]:
        return cls.title, f"{row.kind} {row.length or ''}".strip()


@contextmanager
def without_penalties(model: Any) -> Iterator[None]:
    """Let the model generate by what a task asks for, as the other measures and served models do.

    `model.generate` takes whatever a call leaves open from generation_config.json, e.g. a repetition penalty, which
    makes words of the prompt less likely in the answer.
    """
    from transformers import GenerationConfig

    inner = unwrap(model)
    given = getattr(inner, "generation_config", None)
    if given is None:
        yield
        return
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "cache_config")
    inner.generation_config = GenerationConfig(**{name: getattr(given, name, None) for name in kept})
    try:
        yield
    finally:
        inner.generation_config = given


@dataclass(frozen=True)
class Continuation:
    """A prompt of lm-eval; `stop` are texts that end the answer."""

    ids: list[int]
    budget: int
    stop: tuple[str, ...]
    shared: int = 0


def served(model: Any, tokenizer: Any, kept: Answers) -> Any:
    """Return a served model as lm-eval takes it.

    Args:
        model: a `ServedModel`.
        kept: its answers so far; new ones are kept there.
    """
    from lm_eval.api.model import LM

    class ServedLM(LM):
        max_gen_toks = 256

        def tok_encode(self, text: str) -> list[int]:
            return list(tokenizer(text, verbose=False)["input_ids"])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [self._question(*request.args) for request in requests]
            model.answer(unanswered(asked, kept), kept.keep)
            return [re.split("|".join(map(re.escape, each.stop)) or "$^", kept.get(each) or "")[0] for each in asked]

        def _question(self, text: str, options: dict[str, Any]) -> Continuation:
            return Continuation(self.tok_encode(text), answer_tokens(options, self.max_gen_toks), stops(options))

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise PoSEError(
                "the task compares log-probabilities, which most servers do not return for a prompt; measure the "
                "folder as MODEL without --url, or choose tasks that generate"
            )

        loglikelihood_rolling = loglikelihood

    return ServedLM()


def answer_tokens(options: dict[str, Any], usual: int) -> int:
    """Return the most tokens of an answer by a task's `generation_kwargs`: lm-eval's names for it, in its order."""
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    return int(next((options[name] for name in names if options.get(name) is not None), usual))


def stops(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts that end an answer by a task's `generation_kwargs`; an empty one ends none."""
    until = options.get("until") or []
    return tuple(text for text in ([until] if isinstance(until, str) else until) if text)


def allowed(length: int) -> int:
    """Return the most tokens of a prompt with its answer: RULER's are a little longer than asked for, as its template
    is not counted."""
    return length + min(256, length // 16)


def require_harness(tasks: Sequence[str], lengths: Sequence[int], include_path: str | None = None) -> None:
    """Check everything about a run of lm-eval that can be checked without a model.

    Raises:
        PoSEError: RULER at lengths it does not know, lm-eval or RULER's packages missing, an unknown task.
    """
    ruler = [task for task in tasks if task.startswith(("ruler", "niah_"))]
    unknown = [n for n in lengths if n not in RULER_LENGTHS]
    if ruler and unknown:
        raise PoSEError(
            f"lengths={unknown[0]} with {ruler[0]}: RULER in lm-eval has scores for "
            f"{', '.join(map(str, RULER_LENGTHS))} tokens only; use those, or --tasks needle, which takes any length"
        )
    for package in ("lm_eval", *(("wonderwords", "nltk") if ruler else ())):
        if importlib.util.find_spec(package) is None:
            raise PoSEError(f'--harness {",".join(tasks)} needs {package}: pip install "lm-eval[ruler]"')
    if include_path is not None and not Path(include_path).is_dir():
        raise PoSEError(f"--harness-path {include_path} is not a folder; name the one with the task YAMLs")
    if _own_tasks_only(tasks, include_path):
        return
    known = _index(include_path, True)[0]
    for task in tasks:
        if task not in known:
            near = ", ".join(sorted(name for name in known if name.startswith(task[:5]))[:8])
            raise PoSEError(
                f"--harness {task}: lm-eval {version()} has no such task; `lm-eval ls tasks` lists all"
                + (f". Similar: {near}" if near else "")
            )


def _own_tasks_only(tasks: Sequence[str], include_path: str | None) -> bool:
    """Return whether all tasks are single ones of the user's folder; a group may name tasks of lm-eval."""
    return include_path is not None and set(tasks) <= _index(include_path, False)[1]


@functools.cache
def _index(include_path: str | None, defaults: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return all names, and those of single tasks. lm-eval's own are ten thousand YAMLs, many seconds to read."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=defaults)
    return frozenset(manager.all_tasks), frozenset(manager.all_subtasks)


def version() -> str:
    """Return that of lm-eval."""
    return importlib.metadata.version("lm_eval")


def rows_of(results: dict[str, dict[str, Any]], lengths: Sequence[int]) -> tuple[Row, ...]:
    """Return lm-eval's figures: RULER's by length, others by metric. -1 is RULER's "not measured"."""
    rows = []
    for task, figures in results.items():
        for metric, value in figures.items():
            name = metric.partition(",")[0]
            if not isinstance(value, (int, float)) or name.endswith("_stderr") or name in ("alias", "sample_len"):
                continue
            if not name.isdigit():
                rows.append(Row(0, float(value), kind=f"{task} {name}"))
            elif int(name) in lengths and value >= 0:
                rows.append(Row(int(name), float(value), kind=task))
    return tuple(rows)


class _PromptCounter:
    """Counts the tokens of what lm-eval asks, before it cuts anything and before the model runs."""

    def __init__(self, wrapped: Any, room: int) -> None:
        self.longest, self.room = 0, room
        generate, likelihood = wrapped.generate_until, wrapped.loglikelihood

        def generate_until(requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                text, options = request.args
                self._count(len(wrapped.tok_encode(text)) + answer_tokens(options, wrapped.max_gen_toks))
            return generate(requests, *args, **kwargs)

        def loglikelihood(requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                self._count(len(wrapped.tok_encode("".join(request.args))))
            return likelihood(requests, *args, **kwargs)

        wrapped.generate_until, wrapped.loglikelihood = generate_until, loglikelihood

    def _count(self, tokens: int) -> None:
        """Raise PoSEError if lm-eval would cut a prompt: its score would silently be that of another question."""
        self.longest = max(self.longest, tokens)
        if tokens > self.room:
            raise PoSEError(
                f"an lm-eval prompt has {tokens} tokens with its answer, more than the largest of the lengths allows "
                f"({self.room}), so lm-eval would cut it from the left; give longer --lengths, or leave out that task"
            )
