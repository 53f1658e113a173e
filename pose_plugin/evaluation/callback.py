"""Evaluation while training: the measures of `pose-plugin evaluate` between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from pose_plugin.config import PoSESettings
from pose_plugin.evaluation.measure import Measure, Windows, prepare_where_possible, require_same_tokens
from pose_plugin.evaluation.memory import require_room, tokens_at_once
from pose_plugin.evaluation.model import device_of
from pose_plugin.evaluation.results import Result, joined
from pose_plugin.evaluation.settings import parse_block
from pose_plugin.evaluation.sharded import InStep, agreed, in_step, require_same_plan, undivided
from pose_plugin.utils.distributed import outside_training, together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import digest
from pose_plugin.utils.lengths import lengths_of
from pose_plugin.utils.log import log
from pose_plugin.utils.models import unwrap


class EvaluationCallback(TrainerCallback):
    """Measures every so many steps and at the end, and logs `passkey/2048`, `perplexity/2048`, …

    - The collator rewrites positions of training batches only; here the model gets plain ones. Model modes and random
      states are restored, so a run with this callback trains exactly like one without.
    - Every rank measures the same and the first one logs. Where weights are divided (ZeRO-3, FSDP2), all of them run
      the same forwards together.
    - What cannot work is refused before the first step. A measurement that fails later logs a warning, and the training
      goes on. Lengths that do not fit in memory are left out, and named once.
    - With divided weights, what only one rank may have met, such as a lack of memory, ends the run as it would in a
      step: the other ranks would wait forever.

    Args:
        measures: what is measured.
        lengths: in tokens; "32k" stands for 32,768.
        tokenizer: default: the trainer's processing class.
        every: steps from one measurement to the next; None measures at the end (and at the start) only.
        at_start: whether to measure before the first step.
        at_end: whether to measure after the last step.
        train_length: L_c, for defaults of measures.

    Attributes:
        results: (step, {name of the measure: result}) of each measurement.
        where_possible: whether lengths that a measure cannot be measured at are left out; else they are an error.

    Example:
        >>> callback = EvaluationCallback([Passkey(trials=20)], lengths=[2048, 8192, 32768], every=100)
        >>> trainer.add_callback(callback)
        >>> callback.bind_trainer(trainer)
    """

    def __init__(
        self,
        measures: Sequence[Measure],
        lengths: Sequence[int | str],
        tokenizer: Any = None,
        every: int | None = None,
        at_start: bool = False,
        at_end: bool = True,
        train_length: int | None = None,
    ) -> None:
        if every is None and not at_start and not at_end:
            raise PoSEError("EvaluationCallback never measures: set every, at_start or at_end")
        if every is not None and every < 1:
            raise PoSEError(f"every={every}: give a number of steps of at least 1, or None to measure at the end only")
        self.measures = [measure.model_copy(update={"progress": False}) for measure in measures]
        self.lengths, self.tokenizer, self.train_length = lengths_of(lengths), tokenizer, train_length
        self.every, self.at_start, self.at_end, self.where_possible = every, at_start, at_end, False
        self.trainer: Any = None
        self.results: list[tuple[int, dict[str, Result]]] = []
        self._named: dict[str, set[int]] = {}

    def bind_trainer(self, trainer: Any) -> None:
        """Tell the callback its trainer, which transformers does not: its loggers and, for DeepSpeed, its model."""
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None:
            raise PoSEError(
                "EvaluationCallback does not know its trainer; after trainer.add_callback(callback) call "
                "callback.bind_trainer(trainer)"
            )
        self._prepare(kwargs["model"])
        if self.at_start and state.global_step == 0:
            self._measure(args, state, control, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The last step is measured here if possible: when the training ends, some loggers are already closed.
        last = self.at_end and state.global_step >= state.max_steps and not args.load_best_model_at_end
        if last or (self.every is not None and state.global_step % self.every == 0):
            self._measure(args, state, control, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A run that was stopped early, or whose best checkpoint has just been loaded.
        measured = any(step == state.global_step for step, _ in self.results)
        if self.at_end and (args.load_best_model_at_end or not measured):
            self._measure(args, state, control, kwargs["model"])

    def _prepare(self, model: Any) -> None:
        with together():
            tokenizer = self.tokenizer or self.trainer.processing_class
            if tokenizer is None:
                raise PoSEError("EvaluationCallback has no tokenizer: give it one, or the trainer a processing_class")
            model = in_step(model, self.trainer)
            if any(measure.reads_lengths for measure in self.measures):
                # Before long prompts are made that no memory could read.
                require_room(unwrap(model).config, min(self.lengths, default=1), device_of(model))
            for measure in self.measures:
                try:
                    if self.where_possible:
                        left_out, why = prepare_where_possible(measure, tokenizer, self.lengths, self._windows(model))
                        if left_out:
                            listed = ", ".join(map(str, left_out))
                            log.info("%s is not measured at %s: %s", measure.name, listed, why)
                    else:
                        measure.prepare(tokenizer, self.lengths, self._windows(model))
                    if measure.needs_evaluator and measure.answers is None:
                        measure.answers = self._ask(measure, model, tokenizer)
                except PoSEError as error:
                    raise PoSEError(f"evaluate.tasks={measure.name}: {error}") from error
        for measure in self.measures:
            # Another rounding on another machine must not measure other tokens.
            measure.answers = agreed(model, measure.answers)
        require_same_plan(model, digest([[measure.depends() for measure in self.measures], self.lengths]))

    def _windows(self, model: Any) -> Windows:
        from pose_plugin.rope.read import original_length, text_config

        config = text_config(unwrap(model).config)
        return Windows(original_length(config) or getattr(config, "max_position_embeddings", None), self.train_length)

    def _ask(self, measure: Measure, model: Any, tokenizer: Any) -> dict[int, Any]:
        """Return what the measure's evaluator says about each length; the model is removed from memory afterwards."""
        from pose_plugin.checkpoints.load import describe, load

        source = describe(measure.evaluator)  # type: ignore[attr-defined]
        require_same_tokens(measure, source.tokenizer, tokenizer, source.name, "the trained model")
        answers: dict[int, Any] = {}
        with undivided(), _random_states():
            evaluator = load(source, device=str(device_of(model)))
            for n in measure.pieces():
                try:
                    tokens_at_once(evaluator, n)
                    answers[n] = measure.ask(evaluator, n)
                except PoSEError as error:
                    if not answers and n == measure.pieces()[-1]:
                        raise
                    log.warning("%s is not measured at %d: %s", measure.name, n, error)
            del evaluator
        torch.cuda.empty_cache()
        return answers

    def _measure(self, args: Any, state: Any, control: Any, model: Any) -> None:
        model = in_step(model, self.trainer)
        found: dict[str, Result] = {}
        metrics: dict[str, float] = {}
        with outside_training(model.wrapped) if isinstance(model, InStep) else nullcontext():
            for measure in self.measures:
                parts = self._parts(measure, model, state.global_step)
                if parts:
                    result = found[measure.name] = joined(parts)
                    metrics |= result.metrics()
                    metrics |= {f"{measure.name}/{key}": value for key, value in measure.summary(result).items()}
        if not self.results and state.is_world_process_zero:
            for result in found.values():
                log.info(result.described)
        self.results.append((state.global_step, found))
        if metrics:
            report(metrics, args, state, control, self.trainer.callback_handler)

    def _parts(self, measure: Measure, model: Any, step: int) -> list[Result]:
        """Return the results of the lengths that can be measured, the shortest first.

        Raises:
            Exception: with divided weights, what only one rank may have met.
        """
        parts: list[Result] = []
        for n in measure.pieces():
            try:
                tokens_at_once(model, measure.work(n).length)
                parts.append(measure.run(model, n))
            except Exception as error:
                # A measure of the user may raise anything.
                foreseen = isinstance(error, PoSEError) and not isinstance(error.__cause__, torch.OutOfMemoryError)
                if isinstance(model, InStep) and not foreseen:
                    raise
                left_out = [m for m in measure.pieces() if m >= n]
                # They are tried again each time, as memory may come back, but named once.
                if not self._named.setdefault(measure.name, set()).issuperset(left_out):
                    text = error if isinstance(error, PoSEError) else f"{type(error).__name__}: {error}"
                    listed = ", ".join(map(str, left_out))
                    log.warning(
                        "step %d: %s is not measured at %s, the training goes on: %s", step, measure.name, listed, text
                    )
                self._named[measure.name].update(left_out)
                torch.cuda.empty_cache()
                break
        return parts


def from_settings(settings: PoSESettings) -> EvaluationCallback:
    """Return the callback that a `pose:` block with `evaluate:` asks for.

    Raises:
        PoSEError: naming the key that cannot work.
    """
    block = parse_block(settings)
    when = block.schedule
    callback = EvaluationCallback(
        block.measures(), block.lengths, None, when.every, when.at_start, when.at_end, settings.train_length
    )
    callback.where_possible = block.where_possible
    return callback


def report(metrics: dict[str, float], args: Any, state: Any, control: Any, handler: Any) -> None:
    """Log as `Trainer.log` does: into the state's history and through every callback that reports somewhere.

    `Trainer.log` itself would not do: TRL's also empties its running means of the training metrics into it.
    """
    logs = {**metrics, **({} if state.epoch is None else {"epoch": state.epoch})}
    state.log_history.append({**logs, "step": state.global_step})
    # on_log resets the request to log that this very step may have made for the training loss.
    wanted = control.should_log
    handler.on_log(args, state, control, logs)
    control.should_log = wanted


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore all random states: loading a model may draw random numbers."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
