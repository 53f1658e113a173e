"""Activation Beacon in a transformers `Trainer`, whoever made it: TRL, Axolotl or the user.

    SFTTrainer(model, args=args, train_dataset=dataset, peft_config=BeaconConfig(interval=1024)).train()

A trainer whose model has a trainable Beacon adapter is bound when it begins to train, without any call.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from pose_plugin.beacon.checks import check_checkpointing
from pose_plugin.beacon.register import find_tuner
from pose_plugin.beacon.training import (
    IntervalSampler,
    beacon_gradient_norm,
    check_beacon_gradients,
    set_ratio_step,
    trained_parameters,
)
from pose_plugin.features import is_packed
from pose_plugin.training.binding import add_mixin, offer_trainer, wrap_while_alive
from pose_plugin.training.checks import parallel_sizes, refuse_settings, require_supervised, require_undivided
from pose_plugin.training.launch import let_cpu_ranks_gather, report_launch
from pose_plugin.training.precision import watch_small_steps
from pose_plugin.utils.distributed import gather, together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log, show_log

# In fp16, the loss scale begins at 2^16. DeepSpeed halves it at the second overflow.
_MOST_OVERFLOWS = 20
_LABELS_BEFORE = (
    "all labels were before the first beacon of their text, where they give it no gradient. Put what is learned behind "
    "the first interval, or use a smaller interval"
)
_CONDENSED = "several texts in one row would be condensed into one another"
_PACKED, _PACKED_BEFORE = f"{_CONDENSED}. Set it to False", f"{_CONDENSED}. Give one text per row"
_REFUSED = dict.fromkeys(("packing", "eval_packing", "padding_free"), _PACKED)


def watch(tuner: Any) -> None:
    """Bind trainers of Beacon models when they begin to train, while this model lives.

    All runs go through `Trainer.train`. By then the trainer has its model, even one from `model_init`.
    """
    wrap_while_alive(tuner, {(Trainer, "train"): _bind_before})


def _bind_before(train: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    if has_beacon(trainer.model):
        bind_beacon(trainer)
    return train(trainer, *args, **kwargs)


def bind_beacon(trainer: Any, group_by_intervals: bool | None = None) -> BeaconCallback:
    """Give a trainer what it needs to train beacons. A second call changes nothing.

    Ratios follow the global step, so all ranks draw the same ones and a resumed run draws what the first would have.
    Rows that are read together have the same number of intervals. The first step with a label behind a beacon must
    leave a gradient.

    Args:
        trainer: its model is a PEFT model with a Beacon adapter.
        group_by_intervals: order the training data by interval count (see `IntervalSampler`; it repeats some rows).
            None: if more than one row is read at a time and the lengths of the data are known.

    Returns:
        the callback that was added to the trainer.

    Raises:
        PoSEError: packing, FSDP, context parallelism, reentrant checkpointing, ZeRO-3 ranks that would read different
            numbers of intervals, or data whose texts are all too short or one too long.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, BeaconCallback):
            return callback
    show_log()
    tuner = find_tuner(trainer.model)
    require_trainable(trainer)
    _pad_on_the_right(trainer)
    _keep_dtype(trainer, tuner)
    lengths = lengths_of(trainer.train_dataset, getattr(trainer.args, "max_length", None))
    require_lengths(trainer, tuner, lengths)
    # TRL below 1.16 logs accuracy and entropy from sums that its own chunked loss would have left.
    tuner.report_statistics = getattr(trainer.args, "loss_type", None) == "chunked_nll"
    sampler = _group(trainer, tuner.active_config.interval, group_by_intervals, lengths)
    if sampler is not None:
        add_mixin(trainer)
        trainer.pose_train_sampler = sampler
    callback = BeaconCallback(sampler)
    trainer.add_callback(callback)
    offer_trainer(trainer)
    watch_small_steps(trainer)
    report_launch(trainer)
    let_cpu_ranks_gather(trainer)
    return callback


class BeaconCallback(TrainerCallback):
    """Passes the step to the model and the epoch to the sampler, and checks the first gradient."""

    def __init__(self, sampler: IntervalSampler | None = None) -> None:
        self.sampler = sampler
        self._watch: GradientWatch | None = None
        self._judged = self._labels_before = False
        self._overflows = 0
        self._next_epoch = self._condensed = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_checkpointing(find_tuner(kwargs["model"])._decoder_layers)
        # A resumed run continues in the epoch in which it was stopped.
        self._next_epoch = int((state.epoch or 0) + 1e-6)
        self._judged = self._labels_before = False
        if self.sampler is not None and state.is_world_process_zero:
            report_repeats(self.sampler)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(self._next_epoch)
        self._next_epoch += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_ratio_step(kwargs["model"], state.global_step)
        if not self._judged and self._watch is None:
            self._watch = GradientWatch(find_tuner(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._condensed = find_tuner(kwargs["model"]).condensed_since_step
        if self._watch is None:
            return
        norm = self._norm(kwargs["model"], bool(getattr(args, "fp16", False)))
        if norm is not None:
            self._watch.remove()
            self._watch, self._judged = None, True
            if state.is_world_process_zero:
                log.info("beacons: the first step with a label behind a beacon left a gradient of norm %.3g", norm)
        elif any(gather(self._condensed)) and not self._labels_before and not self._overflows:
            self._labels_before = True
            if state.is_world_process_zero:
                log.warning("beacons: step %d trained no beacon: %s", state.global_step, _LABELS_BEFORE)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tuner = find_tuner(kwargs["model"])
        before, self._condensed = self._condensed, tuner.condensed_since_step
        if not any(gather(self._condensed - before)) and not tuner.disabled and state.is_world_process_zero:
            log.warning(
                "beacons: no evaluation text was condensed, so eval_loss is the base's and says nothing "
                "about the beacons. Evaluate on texts that do not fit the window of %d tokens, or set `ratio` to a "
                "number",
                tuner.window.size,
            )

    def _norm(self, model: Any, scaled: bool) -> float | None:
        """Return the norm of all ranks' gradients; None if it says nothing yet: no rank has a label behind a beacon."""
        assert self._watch is not None
        own = beacon_gradient_norm(model, self._watch.norm) if find_tuner(model).labels_behind_beacons else None
        norms = [each for each in gather(own) if each is not None]
        if not norms:
            return None
        norm = math.hypot(*norms)
        if scaled and not math.isfinite(norm) and self._overflows < _MOST_OVERFLOWS:
            # The loss scale was too large; this step is skipped, and the scale is halved.
            self._overflows += 1
            self._watch.remove()
            self._watch = None
            return None
        if not 0 < norm < math.inf:
            with together():
                check_beacon_gradients(model, gradient=self._watch.norm)
        return norm

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
            why = "no training text was longer than one interval. Use longer texts or a smaller interval"
            log.warning("beacons: no beacon was trained: %s", _LABELS_BEFORE if self._labels_before else why)


def report_repeats(sampler: IntervalSampler) -> None:
    """Log how many rows an epoch has because some are read again; as a warning if they are more than a tenth."""
    texts, rows = len(sampler.lengths), len(sampler)
    if rows > texts:
        log.log(
            logging.WARNING if rows > 1.1 * texts else logging.INFO,
            "beacons: an epoch reads %d rows instead of %d, because %d rows with the same number of intervals are read "
            "at a time, and some again to fill that number. Smaller batches repeat less",
            rows,
            texts,
            sampler.batch_size * sampler.ranks,
        )


class GradientWatch:
    """Norms of the beacons' gradients, taken during the backward pass: DeepSpeed frees the gradients in it."""

    def __init__(self, tuner: Any) -> None:
        self._norms: dict[int, torch.Tensor] = {}
        self._handles = [
            parameter.register_hook(functools.partial(self._see, id(parameter)))
            for parameter in trained_parameters(tuner)
        ]

    def _see(self, key: int, gradient: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach().float())
        self._norms[key] = norm + self._norms[key] if key in self._norms else norm

    def norm(self, parameter: Any) -> torch.Tensor | None:
        """Return the sum of the norms of a parameter's gradients since the watch began; None if it had none."""
        return self._norms.get(id(parameter))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def require_trainable(trainer: Any) -> None:
    """Raise for settings with which no Beacon model can be trained.

    Raises:
        PoSEError: naming the setting and the fix.
    """
    args = trainer.args
    require_supervised(type(trainer), "a Beacon adapter", "Train the adapter with one of them")
    refuse_settings(lambda key: getattr(args, key, None), _REFUSED, "a Beacon adapter")
    if is_packed(trainer.train_dataset):
        raise PoSEError(f"train_dataset has the column seq_lengths, so its rows are packed: {_PACKED_BEFORE}")
    require_undivided(parallel_sizes(trainer, "cp_size", "sp_size", "tp_size"))
    if trainer.is_fsdp_enabled:
        raise PoSEError(
            "fsdp: Beacon reads its embedding and rotates keys outside the forwards of the layers, where FSDP keeps "
            "parameters divided. Use DDP, or DeepSpeed ZeRO-2 or ZeRO-3"
        )


def _pad_on_the_right(trainer: Any) -> None:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if getattr(tokenizer, "padding_side", "right") != "right":
        tokenizer.padding_side = "right"
        log.info("beacons: rows are padded on the right in training; tokenizer.padding_side was 'left'")


def _keep_dtype(trainer: Any, tuner: Any) -> None:
    """Give beacons the dtype of their config again: over a quantised base, TRL casts them to bf16."""
    dtype = tuner.active_config.torch_dtype()
    if dtype is None or trainer.is_deepspeed_enabled:
        return
    for parameter in trained_parameters(tuner):
        parameter.data = parameter.data.to(dtype)


def require_lengths(trainer: Any, tuner: Any, lengths: list[int] | None) -> None:
    """Raise before the first step for texts that would train nothing, or would stop the run later.

    Args:
        lengths: tokens of each training text; None if they are not known.

    Raises:
        PoSEError: naming the data, the length and the fix.
    """
    config = tuner.active_config
    # Interleaved, beacons of the open interval are read too.
    if lengths and max(lengths) <= config.interval and not config.interleaved:
        cut = getattr(trainer.args, "max_length", None)
        raise PoSEError(
            f"train_dataset: its longest text has {max(lengths)} tokens, and no text is condensed that is not longer "
            f"than interval={config.interval}, so no beacon would be trained. Use longer texts or a smaller interval"
            + (f"; max_length={cut} cuts texts there" if cut == max(lengths) else "")
        )
    found = {"train_dataset": lengths}
    if trainer.args.eval_strategy != "no":
        evaluated = trainer.eval_dataset
        parts = evaluated if isinstance(evaluated, dict) else {"": evaluated}
        found |= {f"eval_dataset {name}".strip(): lengths_of(part) for name, part in parts.items()}
    for name, each in found.items():
        try:
            tuner.check_length(max(each or [1]), name == "train_dataset")
        except PoSEError as error:
            raise PoSEError(f"{name}: a text of {max(each or [1])} tokens would stop the run. {error}") from error


def _group(trainer: Any, interval: int, wanted: bool | None, lengths: list[int] | None) -> IntervalSampler | None:
    """Return the sampler that orders rows by interval count; None if the trainer's own order will do."""
    args, data = trainer.args, trainer.train_dataset
    ranks, rows = max(1, int(args.world_size)), int(args.per_device_train_batch_size)
    if hasattr(trainer, "_train_batch_size"):
        rows = max(rows, int(trainer._train_batch_size or 0))
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
    # Each interval is a forward, and under ZeRO-3 each forward needs all ranks.
    must = ranks > 1 and stage == 3
    if wanted is False or (wanted is None and ranks * rows == 1):
        if must:
            raise PoSEError(
                "group_by_intervals=False: ranks of DeepSpeed ZeRO-3 that read different numbers of intervals hang. "
                "Remove it, or use DDP or ZeRO-2"
            )
        return None
    if lengths is None:
        if must or wanted:
            raise PoSEError(
                f"train_dataset: {type(data).__name__} has no known lengths, so texts cannot be grouped by interval "
                "count, and without that the ranks of DeepSpeed ZeRO-3 hang. Use a map-style dataset with `input_ids`, "
                "or DDP or ZeRO-2"
            )
        return None
    multiple = getattr(trainer.data_collator, "pad_to_multiple_of", None) or 1
    if must and interval % multiple and multiple % interval:
        raise PoSEError(
            f"interval={interval}: rows are padded to a multiple of {multiple} tokens, so texts with equal numbers of "
            "intervals may get different ones, and the ranks of DeepSpeed ZeRO-3 hang. Use an interval that is a "
            f"multiple of {multiple} (or divides it), or DDP or ZeRO-2"
        )
    seed = args.seed if args.data_seed is None else args.data_seed
    return IntervalSampler(lengths, interval, rows, ranks, seed=int(seed))


def lengths_of(data: Any, longest: int | None = None) -> list[int] | None:
    """Return the number of tokens of each row; None if it is not known before the data is read.

    Args:
        data: a map-style dataset with `input_ids` or `length`.
        longest: rows are cut there.
    """
    if data is None or not hasattr(data, "__len__") or len(data) == 0:
        return None
    names = getattr(data, "column_names", None)
    found: Sequence[int]
    if names is not None and "input_ids" in names:
        found = [len(ids) for ids in data["input_ids"]]
    elif names is None and isinstance(data[0], dict) and "input_ids" in data[0]:
        found = [len(data[at]["input_ids"]) for at in range(len(data))]
    else:
        return None
    return [min(int(n), longest) if longest else int(n) for n in found]


def has_beacon(model: Any) -> bool:
    """Return whether a model has a Beacon adapter that is not disabled."""
    try:
        tuner = find_tuner(model)
    except PoSEError:
        return False
    return not tuner.disabled
