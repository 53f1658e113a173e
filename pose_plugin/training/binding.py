"""Bind a transformers `Trainer` to a PoSE collator or a Beacon adapter, whoever made it (Axolotl, TRL or the user).

A trainer passes neither the epoch to its collator nor whether a batch is for evaluation, and it saves less than an
extended model needs. Two things are changed, and nothing in programs that use neither object:

- While an object lives that needs its trainer (a `PoSECollator`, a trainable Beacon model), methods of trainer classes
  are wrapped, so that a trainer with this object is bound without a call (`wrap_while_alive`).
- A bound trainer becomes an instance of a subclass of its class, with `PoSETrainerMixin` in front:
  `type(trainer).__mro__` shows it, and no other trainer is affected. `class MyTrainer(PoSETrainerMixin, SFTTrainer)`
  does the same explicitly.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from pose_plugin.attention import needs_one_row
from pose_plugin.collator import PositionCollator
from pose_plugin.features import COLUMNS, Packing
from pose_plugin.rope import restore_rope
from pose_plugin.training.callback import PoSECallback
from pose_plugin.training.checks import warn_of_other_settings
from pose_plugin.training.history import last_checkpoint, whole_checkpoint
from pose_plugin.training.precision import keep_small_steps
from pose_plugin.training.saving import on_each_machine
from pose_plugin.utils.distributed import let_cpu_ranks_resume
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import show_log

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class PoSETrainerMixin(_Base):
    """What a bound trainer does differently; a trainer that is not bound behaves as without the mixin.

    Evaluation gets plain positions, saved folders are completed, and a README.md that was there before the run keeps
    its text. Write it before the trainer's class: `class MyTrainer(PoSETrainerMixin, SFTTrainer)`.

    Attributes:
        pose_callback: set by `bind`.
        pose_train_sampler: the order of the training rows, if not the trainer's own.
    """

    pose_callback: PoSECallback | None = None
    pose_train_sampler: Any = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        offer_trainer(self)
        if self.pose_callback is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is True:
            # transformers raises if there is none.
            resume_from_checkpoint = last_checkpoint(str(self.args.output_dir)) or True
        checkpoint = None
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            given, output = os.fspath(resume_from_checkpoint), str(self.args.output_dir)
            checkpoint = resume_from_checkpoint = whole_checkpoint(given, output)
        if checkpoint is not None:
            let_cpu_ranks_resume()
            model: Any = self.model
            warn_of_other_settings(checkpoint, self.pose_callback.collator.settings, model.config)
        self.pose_callback.history.checkpoint = checkpoint
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            # Here too, as transformers does not call `on_train_end` if training raises.
            self.pose_callback.boundaries.undo()

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain_positions():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain_positions():
            return super().get_test_dataloader(*args, **kwargs)

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        # These cast the whole model, and coarse frequencies cannot tell position 256 from 257.
        if self.pose_callback is not None and (self.args.bf16_full_eval or self.args.fp16_full_eval):
            restore_rope(model, only_coarse=True)
        return super().prediction_step(model, *args, **kwargs)

    @contextmanager
    def _plain_positions(self) -> Iterator[None]:
        """Give a data loader that is made now the plain form of the training collator."""
        collator = self.data_collator
        # A collator that the user has put in its place since is left alone.
        if self.pose_callback is None or collator is not self.pose_callback.collator:
            yield
            return
        self.data_collator = self.pose_callback.collator.plain()
        try:
            yield
        finally:
            self.data_collator = collator

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if self.pose_train_sampler is not None:
            return self.pose_train_sampler
        return super()._get_train_sampler(*args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        """Name the columns that `remove_unused_columns` keeps: those of the model, and those of the collator."""
        super()._set_signature_columns_if_needed()
        if self.pose_callback is not None:
            known: Any = self._signature_columns
            self.__dict__["_signature_columns"] = list(dict.fromkeys([*known, *COLUMNS]))

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        with on_each_machine(self) if self.pose_callback is not None else nullcontext():
            super().save_model(output_dir, *args, **kwargs)
        if self.pose_callback is not None:
            self.pose_callback.saved(output_dir or self.args.output_dir or ".")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.pose_callback is not None:
            self.pose_callback.before_push(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> Any:
        if self.pose_callback is None:
            return super().create_model_card(*args, **kwargs)
        with self.pose_callback.card.rewritten():
            return super().create_model_card(*args, **kwargs)


def bind(trainer: Any, collator: PositionCollator, pack: Packing | None = None) -> PoSECallback:
    """Bind a trainer and the collator that draws its training positions.

    The collator gets the epoch; evaluation gets plain positions; the run is checked before its first step; saved
    folders hold the extended config; whole modules next to an adapter are trained in float32.

    Args:
        trainer: with `trainer.data_collator` set.
        collator: the one that draws the training positions.
        pack: how rows are packed, see `self_test`.

    Returns:
        the callback that was added to the trainer.

    Raises:
        PoSEError: the collator's target is not that of the model, or an `evaluate:` block cannot work.
    """
    show_log()
    collator.settle_target(trainer.model.config)
    add_mixin(trainer)
    keep_small_steps(trainer)
    collator.packs = pack is not None
    # Evaluation may pack too, with its own collator.
    for each in (collator, getattr(trainer, "eval_data_collator", None)):
        if isinstance(each, PositionCollator):
            each.one_row = needs_one_row(trainer.model)
    trainer.pose_callback = callback = PoSECallback(trainer, collator, pack)
    trainer.add_callback(callback)
    if collator.settings.evaluate is not None:
        # Imported here, as most runs do not need it.
        from pose_plugin.evaluation.callback import from_settings

        # After our callback, so that the self-test runs before the first measurement.
        trainer.add_callback(from_settings(collator.settings))
    return callback


def add_mixin(trainer: Any) -> None:
    """Make a trainer an instance of a subclass of its class with `PoSETrainerMixin`. A second call changes nothing.

    Raises:
        PoSEError: the class names the mixin behind the trainer's class, where its methods are never called.
    """
    kind = type(trainer)
    if issubclass(kind, PoSETrainerMixin):
        if kind.__mro__.index(PoSETrainerMixin) > kind.__mro__.index(Trainer):
            raise PoSEError(f"{kind.__name__}: write PoSETrainerMixin before the trainer's class, not after it")
        return
    # Frameworks print and report the class by its name, so the subclass keeps it.
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    trainer.__class__ = type(kind.__name__, (PoSETrainerMixin, kind), same)


def offer_trainer(trainer: Any) -> None:
    """Pass the trainer to each callback with a method `bind_trainer`: transformers does not."""
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "bind_trainer"):
            callback.bind_trainer(trainer)


# Called as around(method, trainer, *args, **kwargs); it calls the method and returns what the method returns.
Around = Callable[..., Any]


@dataclass
class _Wrapped:
    """A method of a trainer class that is wrapped, and how many living objects need each wrapper."""

    original: Any
    wrapper: Any = None
    needed: Counter[Around] = field(default_factory=Counter)


_wrapped: dict[tuple[type, str], _Wrapped] = {}


def wrap_while_alive(thing: Any, wrappers: Mapping[tuple[type, str], Around]) -> None:
    """Wrap methods of trainer classes for as long as an object lives.

    The method is put back when the last object that needs a wrapper is collected.

    Args:
        thing: the object, e.g. a collator.
        wrappers: for (class, name of a method), the function that is called instead (see `Around`).
    """
    for place, around in wrappers.items():
        if place not in _wrapped:
            _wrap(place)
        _wrapped[place].needed[around] += 1
    # The objects are counted, not kept in a WeakSet, which still holds one while its finalizer runs.
    weakref.finalize(thing, _release, wrappers).atexit = False


def _wrap(place: tuple[type, str]) -> None:
    owner, name = place
    entry = _wrapped[place] = _Wrapped(getattr(owner, name))

    @functools.wraps(entry.original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        call = entry.original
        for around in tuple(entry.needed):
            call = functools.partial(around, call)
        return call(trainer, *args, **kwargs)

    entry.wrapper = method
    setattr(owner, name, method)


def _release(wrappers: Mapping[tuple[type, str], Around]) -> None:
    for place, around in wrappers.items():
        entry = _wrapped[place]
        entry.needed -= Counter([around])
        # If another package has wrapped the method since, ours stays below: without wrappers it changes nothing.
        if not entry.needed and getattr(*place) is entry.wrapper:
            setattr(*place, entry.original)
            del _wrapped[place]
