"""Evaluation while training: passkey retrieval and perplexity at lengths beyond the trained window."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from pose_plugin.evaluation.by_length import ByLength
from pose_plugin.evaluation.lengths import whole
from pose_plugin.evaluation.measures.passkey import PasskeyBuilder, PasskeyResult, documents, passkey
from pose_plugin.evaluation.measures.perplexity import PerplexityResult, perplexity, tokenised
from pose_plugin.evaluation.memory import require_room
from pose_plugin.evaluation.model import device_of, innermost
from pose_plugin.evaluation.sharded import InStep, in_step, require_same_plan
from pose_plugin.utils.distributed import outside_training, together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.journal import digest
from pose_plugin.utils.log import log


class EvaluationCallback(TrainerCallback):
    """Measures every so many steps and at the end, and logs `passkey/2048`, `perplexity/2048`, …

    The collator rewrites positions of training batches only; here the model gets plain ones. Model modes and random
    states are as before afterwards, so a run with this callback trains exactly like one without.

    Every rank measures the same and the first one logs; where weights are divided (ZeRO-3, FSDP2), all of them run the
    same forwards together.

    What cannot work is refused before the first step. A measurement that fails later (out of memory, say) is told in
    a warning and the training goes on: a run is worth more than a look at it. Lengths that do not fit in memory are
    left out alone, as in `pose-plugin evaluate`, and named once. With divided weights what only one rank may have met,
    such as a lack of memory, ends the run, as in a step: the others would wait for it for ever.

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
        check: called with model and tokenizer before the first step; raises PoSEError for what cannot work.
        more: further measures by name, functions of (model, tokenizer) whose result has `metrics()` and `definition`.

    Attributes:
        results: (step, PasskeyResult or None, PerplexityResult or None) of each measurement.
        more_results: (step, {name: result}) of each measurement.

    Raises:
        PoSEError: nothing to measure, perplexity without texts, lengths or `every` that are no whole numbers, an option
            of another name; before the first step also prompts or texts that do not fit, no tokenizer, FSDP 1, and
            ranks with divided weights that would measure unlike.

    Example:
        >>> trainer.add_callback(EvaluationCallback(passkey_lengths=[2048, 8192, 32768], every=100))
    """

    def __init__(
        self,
        tokenizer: Any = None,
        passkey_lengths: Sequence[int] = (),
        perplexity_lengths: Sequence[int] = (),
        texts: str | Sequence[str] | None = None,
        every: int | None = None,
        at_start: bool = False,
        at_end: bool = True,
        passkey_options: dict[str, Any] | None = None,
        perplexity_options: dict[str, Any] | None = None,
        more: dict[str, Callable[[Any, Any], Any]] | None = None,
        check: Callable[[Any, Any], None] | None = None,
    ) -> None:
        texts = [texts] if isinstance(texts, str) else texts
        whole(passkey_lengths, "passkey_lengths")
        whole(perplexity_lengths, "perplexity_lengths")
        _require_known("passkey_options", passkey_options, passkey)
        _require_known("perplexity_options", perplexity_options, perplexity)
        if not passkey_lengths and not perplexity_lengths and not more:
            raise PoSEError("EvaluationCallback measures nothing: give passkey_lengths or perplexity_lengths")
        if perplexity_lengths and not texts:
            raise PoSEError(f"perplexity_lengths={list(perplexity_lengths)} needs texts to measure on")
        if every is not None and (every < 1 or int(every) != every):
            raise PoSEError(f"every={every} must be a whole number of steps, at least 1; None measures at the end only")
        if every is None and not at_start and not at_end:
            raise PoSEError("EvaluationCallback never measures: set every, at_start or at_end")
        self.tokenizer = tokenizer
        self.passkey_lengths = list(passkey_lengths)
        self.perplexity_lengths = list(perplexity_lengths)
        self.texts = list(texts or [])
        self.every, self.at_start, self.at_end = every, at_start, at_end
        self.passkey_options = {"progress": False, **(passkey_options or {})}
        self.perplexity_options = {"progress": False, **(perplexity_options or {})}
        self.more, self.check = dict(more or {}), check
        self._passkey = ByLength("passkey", self.passkey_lengths, self._passkey_at, PasskeyResult)
        self._perplexity = ByLength("perplexity", self.perplexity_lengths, self._perplexity_at, PerplexityResult)
        self.results: list[tuple[int, Any, Any]] = []
        self.more_results: list[tuple[int, dict[str, Any]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check(kwargs)
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

    def _tokenizer(self, given: dict[str, Any]) -> Any:
        tokenizer = self.tokenizer or given.get("processing_class")
        if tokenizer is None:
            raise PoSEError("EvaluationCallback has no tokenizer: give it one, or give the trainer a processing_class")
        return tokenizer

    def _check(self, given: dict[str, Any]) -> None:
        with together():
            tokenizer = self._tokenizer(given)
            model = in_step(given["model"], _caller(Trainer))
            lengths = [*self.passkey_lengths, *self.perplexity_lengths]
            if lengths and getattr(model, "config", None) is not None:
                require_room(innermost(model).config, min(lengths), device_of(model))
            self._check_inputs(tokenizer)
            if self.check is not None:
                self.check(model, tokenizer)
        asked = [self.passkey_lengths, self.perplexity_lengths, self.passkey_options, self.perplexity_options]
        require_same_plan(model, digest(repr([asked, self.texts, sorted(self.more)])))

    def _check_inputs(self, tokenizer: Any) -> None:
        if self.passkey_lengths:
            options = {"trials": 50, "depths": None, "seed": 0, **self.passkey_options}
            builder = PasskeyBuilder(tokenizer, options.get("template"), options.get("filler_text"))
            shortest = [min(self.passkey_lengths)]
            documents(builder, shortest, options["trials"], options["depths"], options["seed"])
        if self.perplexity_lengths:
            options = self.perplexity_options
            tokenised(tokenizer, self.texts, self.perplexity_lengths, options.get("max_tokens"), options.get("bos"))

    def _measure(
        self, args: Any, state: Any, control: Any, handler: CallbackHandler | None, given: dict[str, Any]
    ) -> None:
        trainer, tokenizer = _caller(Trainer), self._tokenizer(given)
        model = in_step(given["model"], trainer)
        measures = dict(self.more)
        if self.perplexity_lengths:
            measures = {"perplexity": self._perplexity, **measures}
        if self.passkey_lengths:
            measures = {"passkey": self._passkey, **measures}
        found: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        with outside_training(model.wrapped) if isinstance(model, InStep) else nullcontext():
            for name, measure in measures.items():
                try:
                    found[name] = measure(model, tokenizer)
                except Exception as error:
                    foreseen = isinstance(error, PoSEError) and not isinstance(error.__cause__, torch.OutOfMemoryError)
                    if isinstance(model, InStep) and not foreseen:
                        raise
                    said = error if isinstance(error, PoSEError) else f"{type(error).__name__}: {error}"
                    log.warning("step %d: %s was not measured, the training goes on: %s", state.global_step, name, said)
                    continue
                metrics |= found[name].metrics()
        if "passkey" in found and self.passkey_lengths:
            metrics["passkey/k_max"] = found["passkey"].k_max()
        if not self.results and state.is_world_process_zero:
            for result in found.values():
                log.info(result.definition)
        own = [found.pop(name, None) for name in ("passkey", "perplexity")]
        self.results.append((state.global_step, own[0], own[1]))
        self.more_results.append((state.global_step, found))
        if metrics:
            report(metrics, args, state, control, handler)

    def _passkey_at(self, model: Any, tokenizer: Any, n: int) -> PasskeyResult:
        return passkey(model, tokenizer, [n], **self.passkey_options)

    def _perplexity_at(self, model: Any, tokenizer: Any, n: int) -> PerplexityResult:
        texts, lengths, options = self.texts, self.perplexity_lengths, self.perplexity_options
        # The texts that fill the longest length, at every length.
        used, _, left_out = tokenised(tokenizer, texts, lengths, options.get("max_tokens"), options.get("bos"))
        return replace(perplexity(model, tokenizer, used, [n], **options), left_out=left_out)


def _require_known(name: str, options: dict[str, Any] | None, measure: Callable[..., Any]) -> None:
    own = ("model", "tokenizer", "texts", "lengths")
    known = [each for each in inspect.signature(measure).parameters if each not in own]
    unknown = [each for each in options or () if each not in known]
    if unknown:
        raise PoSEError(f"{name} has the unknown key {unknown[0]!r}; known: {', '.join(known)}")


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


def _caller(kind: type) -> Any:
    """The innermost object of a kind whose method is calling, or None: transformers hands callbacks everything but what
    they could log with, and the model as it is called."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _handler() -> CallbackHandler | None:
    return _caller(CallbackHandler)
