"""Evaluation while training: passkey retrieval and perplexity at lengths beyond the trained window."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from pose_plugin.errors import PoSEError
from pose_plugin.evaluation.passkey import passkey
from pose_plugin.evaluation.perplexity import perplexity
from pose_plugin.log import log


class EvaluationCallback(TrainerCallback):
    """Measures every so many steps and at the end, and logs `passkey/2048`, `perplexity/2048`, …

    The collator rewrites positions of training batches only; here the model gets plain ones. Every rank does
    the same forwards, since under ZeRO-3 and FSDP none can do one alone. Model modes and random states are as
    before afterwards, so a run with this callback trains exactly like one without.

    Args:
        tokenizer: default: the trainer's processing class.
        passkey_lengths: prompt lengths in tokens; empty measures none.
        perplexity_lengths: window sizes in tokens; empty measures none.
        texts: what perplexity is measured on; needed with perplexity_lengths.
        every: steps from one measurement to the next; None measures at the end (and at the start) only.
        at_start: whether to measure before the first step.
        at_end: whether to measure after the last step.
        passkey_options: more arguments of `passkey`, e.g. {"trials": 20}.
        perplexity_options: more arguments of `perplexity`, e.g. {"max_windows": 50}.

    Attributes:
        results: (step, PasskeyResult or None, PerplexityResult or None) of each measurement.

    Raises:
        PoSEError: nothing to measure, perplexity without texts, every < 1.

    Example:
        >>> trainer.add_callback(EvaluationCallback(passkey_lengths=[2048, 8192, 32768], every=100))
    """

    def __init__(
        self,
        tokenizer: Any = None,
        passkey_lengths: Sequence[int] = (),
        perplexity_lengths: Sequence[int] = (),
        texts: Sequence[str] | None = None,
        every: int | None = None,
        at_start: bool = False,
        at_end: bool = True,
        passkey_options: dict[str, Any] | None = None,
        perplexity_options: dict[str, Any] | None = None,
    ) -> None:
        if not passkey_lengths and not perplexity_lengths:
            raise PoSEError("EvaluationCallback measures nothing: give passkey_lengths or perplexity_lengths")
        if perplexity_lengths and not texts:
            raise PoSEError(f"perplexity_lengths={list(perplexity_lengths)} needs texts to measure on")
        if every is not None and every < 1:
            raise PoSEError(f"every={every} must be at least 1 step; None measures at the end only")
        if every is None and not at_start and not at_end:
            raise PoSEError("EvaluationCallback never measures: set every, at_start or at_end")
        self.tokenizer = tokenizer
        self.passkey_lengths = list(passkey_lengths)
        self.perplexity_lengths = list(perplexity_lengths)
        self.texts = list(texts or [])
        self.every, self.at_start, self.at_end = every, at_start, at_end
        self.passkey_options = {"progress": False, **(passkey_options or {})}
        self.perplexity_options = {"progress": False, **(perplexity_options or {})}
        self.results: list[tuple[int, Any, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.at_start and state.global_step == 0:
            self._measure(args, state, control, _handler(), kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The last step is measured here where it can be: at the train's end some loggers are already closed.
        last = self.at_end and state.global_step >= state.max_steps and not args.load_best_model_at_end
        if last or (self.every is not None and state.global_step % self.every == 0):
            self._measure(args, state, control, _handler(), kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A run that was stopped early, or whose best checkpoint has just been loaded.
        measured = any(step == state.global_step for step, _, _ in self.results)
        if self.at_end and (args.load_best_model_at_end or not measured):
            self._measure(args, state, control, _handler(), kwargs)

    def _measure(
        self, args: Any, state: Any, control: Any, handler: CallbackHandler | None, given: dict[str, Any]
    ) -> None:
        model, tokenizer = given["model"], self.tokenizer or given.get("processing_class")
        if tokenizer is None:
            raise PoSEError("EvaluationCallback has no tokenizer: give it one, or give the trainer a processing_class")
        keys = windows = None
        metrics: dict[str, float] = {}
        if self.passkey_lengths:
            keys = passkey(model, tokenizer, self.passkey_lengths, **self.passkey_options)
            metrics |= keys.metrics() | {"passkey/k_max": keys.k_max()}
        if self.perplexity_lengths:
            options = self.perplexity_options
            windows = perplexity(model, tokenizer, self.texts, self.perplexity_lengths, **options)
            metrics |= windows.metrics()
        if not self.results:
            for result in (keys, windows):
                if result is not None and state.is_world_process_zero:
                    log.info(result.definition)
        self.results.append((state.global_step, keys, windows))
        report(metrics, args, state, control, handler)


def report(metrics: dict[str, float], args: Any, state: Any, control: Any, handler: CallbackHandler | None) -> None:
    """Logs as `Trainer.log` does: into the state's history and through every callback that reports somewhere.

    `Trainer.log` itself would not do: TRL's also empties its running means of the training metrics into it.
    """
    logs = {**metrics, **({} if state.epoch is None else {"epoch": state.epoch})}
    state.log_history.append({**logs, "step": state.global_step})
    if handler is None:
        log.warning("evaluation metrics reach state.log_history only: no callback handler was found")
        return
    # on_log takes back the wish to log that this very step may have voiced for the training loss.
    wanted = control.should_log
    handler.on_log(args, state, control, logs)
    control.should_log = wanted


def _handler() -> CallbackHandler | None:
    """The handler that is calling: transformers hands callbacks everything but what they could log with."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), CallbackHandler):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
