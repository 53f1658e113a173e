"""Activation Beacon in a transformers `Trainer`, whoever made it: TRL, Axolotl, or the user.

    SFTTrainer(model, args=args, train_dataset=dataset, peft_config=BeaconConfig(interval=1024)).train()

A trainer whose model has a trainable Beacon adapter is bound when it begins to train; nothing needs to be called.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from pose_plugin.beacon.checks import check_checkpointing
from pose_plugin.beacon.layer import BeaconLayer
from pose_plugin.beacon.register import find_tuner
from pose_plugin.beacon.training import IntervalSampler, beacon_gradient_norm, check_beacon_gradients, set_ratio_step
from pose_plugin.training.precision import watch_small_steps
from pose_plugin.utils.distributed import gather, together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log, show_log


def bind_beacon(trainer: Any, group_by_intervals: bool | None = None) -> BeaconCallback:
    """Gives a trainer what training beacons needs. A second call changes nothing.

    Ratios follow the global step, so ranks draw alike and a resumed run draws what the first would have drawn; rows
    read at the same time have the same number of intervals; the first step that condenses must leave a gradient.

    Args:
        trainer: whose model is a PEFT model with a Beacon adapter.
        group_by_intervals: order the training data by interval count (see `IntervalSampler`; it repeats some rows).
            None: where more than one row is read at a time and the data has lengths.

    Raises:
        PoSEError: packing, FSDP, context parallelism, reentrant checkpointing, or ZeRO-3 ranks that would read
            different numbers of intervals.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, BeaconCallback):
            return callback
    show_log()
    tuner = find_tuner(trainer.model)
    refuse(trainer)
    _pad_on_the_right(trainer)
    # TRL below 1.16 logs accuracy and entropy from sums that its own chunked loss would have left.
    tuner.report_statistics = getattr(trainer.args, "loss_type", None) == "chunked_nll"
    callback = BeaconCallback(_group(trainer, tuner.active_config.interval, group_by_intervals))
    trainer.add_callback(callback)
    watch_small_steps(trainer)
    return callback


class BeaconCallback(TrainerCallback):
    """Tells the model the step, the sampler the epoch, and judges the first gradient."""

    def __init__(self, sampler: IntervalSampler | None = None) -> None:
        self.sampler = sampler
        self._watch: GradientWatch | None = None
        self._judged = False
        self._next_epoch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_checkpointing(find_tuner(kwargs["model"])._decoder_layers)
        # After a resume the trainer goes on in the epoch in which it was stopped.
        self._next_epoch = int((state.epoch or 0) + 1e-6)
        self._judged = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(self._next_epoch)
        self._next_epoch += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_ratio_step(kwargs["model"], state.global_step)
        if not self._judged and self._watch is None:
            self._watch = GradientWatch(find_tuner(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is None:
            return
        norm = self._norm(kwargs["model"])
        if norm is not None:
            self._watch.remove()
            self._watch, self._judged = None, True
            if state.is_world_process_zero:
                log.info("beacons: the first step that condensed left a gradient of norm %.3g", norm)

    def _norm(self, model: Any) -> float | None:
        """Of the gradients of all ranks; None where nothing was condensed on any.

        Ranks read rows of their own, and one whose labels all stand before its first beacon leaves no gradient. That is
        no fault while another leaves one; and where none does, all stop.
        """
        assert self._watch is not None
        condensed = find_tuner(model).condensed_since_step
        own = beacon_gradient_norm(model, self._watch.norm) if condensed else None
        norms = [each for each in gather(own) if each is not None]
        if not norms:
            return None
        norm = math.hypot(*norms)
        if not 0 < norm < math.inf:
            with together():
                check_beacon_gradients(model, gradient=self._watch.norm)
        return norm

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
            log.warning(
                "beacons: no training text was longer than one interval, so nothing was condensed and no beacon was "
                "trained. Give longer texts, or a smaller interval"
            )


class GradientWatch:
    """Norms of the beacons' gradients as backward makes them: DeepSpeed has used and freed them when it is done."""

    def __init__(self, tuner: Any) -> None:
        self._norms: dict[int, torch.Tensor] = {}
        self._handles = []
        for layer in tuner.model.modules():
            if not isinstance(layer, BeaconLayer):
                continue
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    if parameter.requires_grad:
                        seen = functools.partial(self._see, id(parameter))
                        self._handles.append(parameter.register_hook(seen))

    def _see(self, key: int, gradient: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach().float())
        self._norms[key] = norm + self._norms[key] if key in self._norms else norm

    def norm(self, parameter: Any) -> torch.Tensor | None:
        """The sum of the norms of a parameter's gradients since the watch began; None where there were none."""
        return self._norms.get(id(parameter))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def refuse(trainer: Any) -> None:
    """What cannot be right for beacons, whatever the model.

    Raises:
        PoSEError: naming the setting and the way out.
    """
    args = trainer.args
    for key in ("packing", "eval_packing", "padding_free"):
        if getattr(args, key, False):
            raise PoSEError(
                f"{key}=True puts several texts into one row, and beacons would condense one into another. "
                f"Set {key}=False"
            )
    if trainer.is_fsdp_enabled:
        raise PoSEError(
            "fsdp: Beacon reads its embedding and rotates keys outside of the layers' forwards, where FSDP keeps "
            "parameters divided. Use DDP, or DeepSpeed ZeRO-2 or ZeRO-3"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for key in ("cp_size", "sp_size", "tp_size"):
        size = getattr(parallel, key, None) or 1
        if size > 1:
            raise PoSEError(
                f"{key}={size} divides a row or a projection over devices, and beacons read a row in intervals with "
                f"whole projections. Set {key}: 1 and use data parallelism or ZeRO"
            )
    asked = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    if getattr(args, "gradient_checkpointing", False) and asked.get("use_reentrant"):
        raise PoSEError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} gives every beacon parameter a zero gradient. Set "
            "{'use_reentrant': False}. TRL sets it to true by itself for PEFT with DeepSpeed ZeRO-3 and checkpointing: "
            "use ZeRO-2 there, or no checkpointing"
        )


def _pad_on_the_right(trainer: Any) -> None:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if getattr(tokenizer, "padding_side", "right") != "right":
        tokenizer.padding_side = "right"
        log.info("beacons: rows are padded on the right in training; tokenizer.padding_side was 'left'")


def _group(trainer: Any, interval: int, wanted: bool | None) -> IntervalSampler | None:
    args, data = trainer.args, trainer.train_dataset
    ranks, rows = max(1, int(args.world_size)), int(args.per_device_train_batch_size)
    if hasattr(trainer, "_train_batch_size"):
        rows = max(rows, int(trainer._train_batch_size or 0))
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
    must = ranks > 1 and stage == 3
    if wanted is False or (wanted is None and ranks * rows == 1):
        if must:
            raise PoSEError(
                "group_by_intervals=False: under DeepSpeed ZeRO-3 ranks that read different numbers of intervals wait "
                "for each other for ever. Leave it out, or use DDP or ZeRO-2"
            )
        return None
    lengths = lengths_of(data, getattr(args, "max_length", None))
    if lengths is None:
        if must or wanted:
            raise PoSEError(
                f"train_dataset: {type(data).__name__} tells no lengths, so texts cannot be grouped by interval count, "
                "which DeepSpeed ZeRO-3 needs (its ranks would wait for each other for ever). Use a map-style dataset "
                "with `input_ids`, or DDP or ZeRO-2"
            )
        return None
    multiple = getattr(trainer.data_collator, "pad_to_multiple_of", None) or 1
    if must and interval % multiple and multiple % interval:
        raise PoSEError(
            f"interval={interval}: rows are padded to a multiple of {multiple} tokens, so that ranks whose texts have "
            "the same number of intervals would read different ones, and under DeepSpeed ZeRO-3 wait for each other "
            f"for ever. Use an interval that is a multiple of {multiple} (or divides it), or DDP or ZeRO-2"
        )
    sampler = IntervalSampler(lengths, interval, rows, ranks, seed=int(args.data_seed or args.seed))
    trainer._get_train_sampler = lambda *_args, **_kwargs: sampler
    return sampler


def lengths_of(data: Any, longest: int | None = None) -> list[int] | None:
    """Tokens of each row; None where they are not known before the data is read.

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


class _Watch:
    """While a trainable Beacon model lives, trainers of such models are bound when they begin to train.

    `Trainer.train` is what every trainer's run goes through; it is left as it was when the last model is gone.
    """

    _alive = 0
    _original: Any = None

    @classmethod
    def add(cls, tuner: Any) -> None:
        cls._alive += 1
        weakref.finalize(tuner, cls._release).atexit = False
        if cls._original is not None:
            return
        cls._original = original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if has_beacon(trainer.model):
                bind_beacon(trainer)
            return original(trainer, *args, **kwargs)

        Trainer.train = train  # type: ignore[method-assign,assignment]

    @classmethod
    def _release(cls) -> None:
        cls._alive -= 1
        if cls._alive == 0:
            Trainer.train, cls._original = cls._original, None  # type: ignore[method-assign]


watch = _Watch.add


def has_beacon(model: Any) -> bool:
    try:
        tuner = find_tuner(model)
    except PoSEError:
        return False
    return not tuner.disabled
