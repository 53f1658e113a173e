"""RULER, LongBench and other tasks of lm-eval, with the lengths passed on and checked.

lm-eval generates RULER's prompts for lengths that it is told in `metadata`, and cuts every prompt at the model
wrapper's `max_length` from the left without failing. So both are set here, and the prompts that came back are counted.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError

RULER_SHORTEST = 4096
"""Below it lm-eval's RULER searches for ever for a haystack that is short enough (lm-eval issue 2963)."""
RULER_LENGTHS = tuple(RULER_SHORTEST * 2**k for k in range(6))
"""Those that lm-eval's RULER has figures for, 4096 to 131072; what it asks at others it throws away."""
SUITES = {
    "infinitebench": "InfiniteBench is in lm-eval from 0.4.12 on (Axolotl pins an older one, so install it in an "
    "environment of its own), or give the folder lm_eval/tasks/infinitebench of a newer lm-eval as --harness-path",
    "helmet": "HELMET has no tasks in lm-eval up to 0.4.13; run HELMET's own scripts on the folder, or give a folder "
    "of task YAMLs as --harness-path. Its recall tasks are RULER's (niah_multikey_2, niah_multikey_3, "
    "niah_multivalue), part of its questions and summaries InfiniteBench's (infinitebench_longbook_…)",
}


def allowed(lengths: Sequence[int]) -> int:
    """Tokens that a prompt with its answer may have: RULER's are a little longer than what they are asked to be, as
    its template is not counted."""
    return max(lengths) + min(256, max(lengths) // 16)


@dataclass(frozen=True)
class HarnessResult:
    """What lm-eval found.

    Attributes:
        scores: "task length" or "task metric" to figure.
        tasks: what was asked for.
        lengths: token lengths that were passed on.
        longest: tokens of the longest prompt that reached the model, answer included; 0 if unknown.
        version: of lm-eval.
        limit: samples a task; None for all.
    """

    scores: dict[str, float]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    longest: int
    version: str
    limit: int | None

    @property
    def definition(self) -> str:
        samples = "all samples" if self.limit is None else f"the first {self.limit} samples of each task"
        return (
            f"lm-eval {self.version}: {', '.join(self.tasks)}, {samples}, lengths passed "
            f"{', '.join(map(str, self.lengths))}; the longest prompt had {self.longest} tokens and none was cut. "
            "Scores are lm-eval's own."
        )

    def to_dict(self) -> dict[str, Any]:
        rest = {"tasks": list(self.tasks), "lengths": list(self.lengths), "longest": self.longest}
        return {
            "definition": self.definition,
            "scores": self.scores,
            **rest,
            "version": self.version,
            "limit": self.limit,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HarnessResult:
        """The opposite of `to_dict`."""
        return cls(
            data["scores"],
            tuple(data["tasks"]),
            tuple(data["lengths"]),
            data["longest"],
            data["version"],
            data["limit"],
        )


def require_harness(tasks: Sequence[str], lengths: Sequence[int], include_path: str | None = None) -> Any:
    """Checks everything about a run of lm-eval that can be checked without a model.

    Returns:
        the module lm_eval.

    Raises:
        PoSEError: lm-eval missing, RULER at lengths it does not know, no such folder, a task that does not exist.
    """
    ruler = [task for task in tasks if is_ruler(task)]
    if ruler and min(lengths) < RULER_SHORTEST:
        raise PoSEError(
            f"lengths={min(lengths)} with {ruler[0]}: RULER in lm-eval cannot make prompts below {RULER_SHORTEST} "
            f"tokens and would never return; use lengths of at least {RULER_SHORTEST}, or --tasks needle, which has "
            "no such limit"
        )
    unknown = [n for n in lengths if n not in RULER_LENGTHS]
    if ruler and unknown:
        raise PoSEError(
            f"lengths={unknown[0]} with {ruler[0]}: RULER in lm-eval gives no figure for it; use those of "
            f"{', '.join(map(str, RULER_LENGTHS))}, or --tasks needle, which takes any"
        )
    if include_path is not None and not Path(include_path).is_dir():
        raise PoSEError(f"--harness-path {include_path} is no folder; name the one that holds the task YAMLs")
    try:
        import lm_eval
    except ImportError as error:
        raise PoSEError(f"--harness needs lm-eval: pip install lm-eval ({error})") from None
    lacking = [name for name in ("wonderwords", "nltk") if importlib.util.find_spec(name) is None]
    if ruler and lacking:
        raise PoSEError(f'--harness {ruler[0]}: RULER needs {", ".join(lacking)}: pip install "lm-eval[ruler]"')
    if own_tasks_only(tasks, include_path):
        return lm_eval
    known = _index(include_path, True)[0]
    for task in tasks:
        if task not in known:
            hint = next((why for suite, why in SUITES.items() if task.lower().startswith(suite)), None)
            near = ", ".join(sorted(name for name in known if name.startswith(task[:5]))[:8])
            raise PoSEError(
                f"--harness {task}: lm-eval {version()} has no such task. "
                + (f"Similar: {near}; `lm-eval ls tasks` lists all" if near else hint or "`lm-eval ls tasks` lists all")
            )
    return lm_eval


def own_tasks_only(tasks: Sequence[str], include_path: str | None) -> bool:
    """Whether all are in the folder of one's own, and none is a group, which may name tasks of lm-eval."""
    return include_path is not None and set(tasks) <= _index(include_path, False)[1]


@functools.cache
def _index(include_path: str | None, defaults: bool) -> tuple[frozenset[str], frozenset[str]]:
    """All names, and those of single tasks. With lm-eval's own it reads ten thousand YAMLs, for many seconds."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=defaults)
    return frozenset(manager.all_tasks), frozenset(manager.all_subtasks)


def is_ruler(task: str) -> bool:
    return task.startswith(("ruler", "niah_"))


def version() -> str:
    from importlib.metadata import version as of

    return of("lm_eval")


def harness(
    model: Any,
    tokenizer: Any,
    tokenizer_path: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    limit: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    include_path: str | None = None,
) -> HarnessResult:
    """Runs tasks of lm-eval on a loaded model.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        tokenizer_path: where RULER loads the tokenizer from, to count the tokens of its prompts.
        tasks: names of lm-eval's tasks or groups.
        lengths: token lengths; RULER and own tasks with a `custom_dataset` are told them (`max_seq_lengths`) and make
            prompts for each, for other tasks the largest is the limit.
        limit: samples a task; None for all.
        batch_size: prompts in one forward; default 1.
        include_path: a folder with more task YAMLs.

    Raises:
        PoSEError: as `require_harness`; data that cannot be had; a prompt that was cut.
    """
    lm_eval = require_harness(tasks, lengths, include_path)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    metadata = {"max_seq_lengths": sorted(set(lengths)), "tokenizer": tokenizer_path, "pretrained": tokenizer_path}
    room = allowed(lengths)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size or 1, max_length=room)
    seen = _Seen(wrapped, room)
    try:
        found = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            limit=limit,
            metadata=metadata,
            task_manager=TaskManager(
                include_path=include_path,
                include_defaults=not own_tasks_only(tasks, include_path),
                metadata=metadata,
            ),
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            log_samples=False,
            bootstrap_iters=0,
        )
    except PoSEError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        offline = any(
            sign in text for sign in ("offline", "Offline", "ConnectionError", "Couldn't reach", "NLTK", "nltk")
        )
        way_out = (
            "install what it names"
            if isinstance(error, ImportError)
            else "its data must be downloaded once, where the network is reachable; then HF_DATASETS_OFFLINE=1 will do"
            if offline
            else "run `lm-eval run --tasks …` by itself for the whole traceback"
        )
        raise PoSEError(f"--harness {','.join(tasks)} failed inside lm-eval: {text[:500]}; {way_out}") from error
    scores = scores_of(found["results"], sorted(set(lengths)))
    if not scores:
        raise PoSEError(f"--harness {','.join(tasks)}: lm-eval returned no figure for lengths {sorted(set(lengths))}")
    return HarnessResult(scores, tuple(tasks), tuple(sorted(set(lengths))), seen.longest, version(), limit)


def scores_of(results: dict[str, dict[str, Any]], lengths: Sequence[int]) -> dict[str, float]:
    """lm-eval's figures under plain names: RULER's by length, others by metric. -1 is RULER's "not measured"."""
    scores = {}
    for task, row in results.items():
        for metric, value in row.items():
            name = metric.partition(",")[0]
            if not isinstance(value, (int, float)) or isinstance(value, bool) or name.endswith("_stderr"):
                continue
            if name.isdigit() and (int(name) not in lengths or value < 0):
                continue
            if name not in ("alias", "sample_len"):
                scores[f"{task} {name}"] = float(value)
    return scores


class _Seen:
    """Counts the tokens of what lm-eval asks, whole, before it cuts anything and before the model runs."""

    def __init__(self, wrapped: Any, room: int) -> None:
        self.longest, self.room = 0, room
        generate, likelihood = wrapped.generate_until, wrapped.loglikelihood

        def generate_until(requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                text, options = request.args
                answer = options.get("max_gen_toks", options.get("max_new_tokens", wrapped.max_gen_toks))
                self.longest = max(self.longest, len(wrapped.tok_encode(text)) + int(answer))
            self._require_whole(len(requests))
            return generate(requests, *args, **kwargs)

        def loglikelihood(requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                self.longest = max(self.longest, len(wrapped.tok_encode("".join(request.args))))
            self._require_whole(len(requests))
            return likelihood(requests, *args, **kwargs)

        wrapped.generate_until, wrapped.loglikelihood = generate_until, loglikelihood

    def _require_whole(self, prompts: int) -> None:
        """Raises PoSEError where lm-eval would cut a prompt: its score would be that of another question."""
        if self.longest > self.room:
            raise PoSEError(
                f"the longest of {prompts} lm-eval prompts has {self.longest} tokens with its answer, more than the "
                f"largest of the lengths allows ({self.room}), so lm-eval would cut it from the left; give lengths up "
                f"to {self.longest}, or leave out that task"
            )
