"""TRL, and any other transformers `Trainer`: `SFTTrainer(…, data_collator=PoSECollator(tokenizer, …))`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithFlattening, ProcessorMixin, Trainer

from pose_plugin.collator import Collate, PositionCollator
from pose_plugin.config import parse_settings
from pose_plugin.evaluation.settings import checked
from pose_plugin.features import IGNORED_LABEL, Packing, is_packed
from pose_plugin.frameworks.trl_model import extended_by_name
from pose_plugin.training.binding import Around, bind, wrap_while_alive
from pose_plugin.training.checks import check_row_length, require_supervised
from pose_plugin.utils.arrays import int_array
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.lengths import LONGEST


class PoSECollator(PositionCollator):
    """A data collator that trains long distances in short windows.

        SFTTrainer(model, args=args, train_dataset=dataset, data_collator=PoSECollator(tokenizer, target_length=32768))

    Give it to any transformers `Trainer`. The trainer then passes it the epoch and evaluates on plain positions. Build
    the model from `extend_context(config, target_length=…)`. In your own training loop, call `set_epoch` at each epoch,
    use `collator.plain()` for evaluation, and call `self_test(model, collator)` once.

    Args:
        tokenizer: pads the rows; needs a pad token. Optional if `collate` is given. Of a processor, its tokenizer.
        collate: a collator to wrap (TRL's, Hugging Face's, your own); default pads `input_ids`, `labels` and masks.
        settings: the fields of `PoSESettings`. Without `target_length` it is that of the model's config, as
            `extend_context` has set it; a trainer passes it.

    Raises:
        PoSEError: a setting that cannot work, or neither tokenizer nor collator.
    """

    def __init__(self, tokenizer: Any = None, collate: Collate | None = None, **settings: Any) -> None:
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = getattr(tokenizer, "tokenizer", None)
        if tokenizer is not None and not hasattr(tokenizer, "pad") and callable(tokenizer) and collate is None:
            tokenizer, collate = None, tokenizer
        for name, value, verb in (("tokenizer", tokenizer, "pad"), ("collate", collate, "__call__")):
            if value is not None and not hasattr(value, verb):
                raise PoSEError(
                    f"PoSECollator: {name} needs a method {verb}, got {value!r}. The first argument is a tokenizer "
                    "or a collator, settings are keywords: PoSECollator(tokenizer, target_length=32768)"
                )
        if collate is None:
            if tokenizer is None:
                raise PoSEError("PoSECollator needs a tokenizer, or collate=, a collator to wrap")
            if tokenizer.pad_token is None:
                raise PoSEError(
                    "PoSECollator: the tokenizer has no pad token, so rows of different lengths cannot be stacked. Set "
                    "one, e.g. tokenizer.pad_token = tokenizer.eos_token"
                )
            collate = _PadLabels(tokenizer)
        self._tokenizer = tokenizer
        # What is wrapped unless TRL needs its own collator.
        self._own = collate
        side = getattr(tokenizer or getattr(collate, "tokenizer", None), "padding_side", "right")
        # The largest target, until the model's is known: no other setting can be too large for it.
        whole = {"target_length": LONGEST, **settings}
        given = checked(parse_settings(whole, where="PoSECollator"), where="PoSECollator")
        super().__init__(collate, given, padding_side=side)
        self.target_from_model = "target_length" not in settings
        wrap_while_alive(self, _wrappers(importlib.util.find_spec("trl") is not None))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, which also needs its trainer: a copied or unpickled collator is not constructed."""
        super().__setstate__(state)
        # A data loader's worker must not import TRL.
        wrap_while_alive(self, _wrappers("trl" in sys.modules))

    @property
    def tokenizer(self) -> Any:
        """The given tokenizer, or that of the wrapped collator: functions and TRL's own collators have none."""
        return self._tokenizer or getattr(self.collate, "tokenizer", None) or getattr(self._own, "tokenizer", None)


# What `_PadLabels` pads, and what it leaves out because `PositionCollator` writes it or no model reads it.
_PADDED = {"input_ids", "labels", "token_type_ids", "attention_mask", "special_tokens_mask", "seq_lengths"}


class _PadLabels:
    """Pads `input_ids`, `labels` and `token_type_ids`. In rows without labels every token is in the loss.

    Attributes:
        multiple: the padded length is a multiple of it, as rows that are split over devices need; TRL's
            `pad_to_multiple_of`.
    """

    # PositionCollator then reads each list of a row once, for both.
    reads_arrays = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.multiple = 1

    def __call__(self, features: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        for name in features[0].keys() - _PADDED:
            # Text and single numbers describe a row. An array is an input, such as pixels or weights of the loss.
            if _is_array(features[0][name]):
                raise PoSEError(
                    f"rows have the column {name}, an array, which PoSECollator would leave out of the batch. Remove "
                    "it, or wrap a collator that stacks it: PoSECollator(tokenizer, collate=…)"
                )
        ids = [int_array(feature["input_ids"]) for feature in features]
        labels = [int_array(feature.get("labels", own)) for feature, own in zip(features, ids, strict=True)]
        columns = {"input_ids": (ids, self.tokenizer.pad_token_id), "labels": (labels, IGNORED_LABEL)}
        if "token_type_ids" in features[0]:
            columns["token_type_ids"] = [int_array(feature["token_type_ids"]) for feature in features], 0
        return {key: self._stacked(rows, filler) for key, (rows, filler) in columns.items()}

    def _stacked(self, rows: list[np.ndarray], filler: int) -> torch.Tensor:
        width = -(-max(map(len, rows)) // self.multiple) * self.multiple
        stacked = np.full((len(rows), width), filler, dtype=np.int64)
        for line, row in zip(stacked, rows, strict=True):
            begin = width - len(row) if self.tokenizer.padding_side == "left" else 0
            line[begin : begin + len(row)] = row
        return torch.from_numpy(stacked)


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor or holds numbers in one or more dimensions."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths
        return False
    return found.ndim > 0 and found.dtype.kind in "biuf"


def _wrappers(with_trl: bool) -> dict[tuple[type, str], Around]:
    """A trainer takes no hint but the collator itself, so the constructors of trainers are wrapped.

    `train` is wrapped for a collator that is set later: `trainer.data_collator = PoSECollator(…)`.
    """
    wrappers: dict[tuple[type, str], Around] = {(Trainer, "__init__"): _bind_after, (Trainer, "train"): _bind_before}
    if with_trl:
        from trl import SFTTrainer

        wrappers[SFTTrainer, "__init__"] = _bind_around
    return wrappers


def _bind_after(construct: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a trainer; bind it if its collator is a PoSECollator."""
    if any(isinstance(each, PoSECollator) for each in (*args, *kwargs.values())):
        _require_supervised(trainer)
    construct(trainer, *args, **kwargs)
    if isinstance(trainer.data_collator, PoSECollator):
        _bind(trainer)
    else:
        _require_in_sight(trainer.data_collator)


def _bind_before(train: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Train; bind the trainer first if it has got a PoSECollator since it was constructed."""
    if not isinstance(trainer.data_collator, PoSECollator) or getattr(trainer, "pose_callback", None) is not None:
        _require_in_sight(trainer.data_collator)
        return train(trainer, *args, **kwargs)
    _require_supervised(trainer)
    _bind(trainer)
    # Through its new class, whose `train` does more.
    return trainer.train(*args, **kwargs)


def _bind(trainer: Any) -> None:
    collate = trainer.data_collator.collate
    # Some collators put a batch into one row by themselves. Rows may also have been packed before the trainer was made,
    # e.g. by `trl.pack_dataset`.
    flat = isinstance(collate, DataCollatorWithFlattening) or getattr(collate, "padding_free", False)
    packed = _packs(trainer.args) or flat or is_packed(trainer.train_dataset)
    bind(trainer, trainer.data_collator, pack=Packing.SEQ_LENGTHS if packed else None)


def _bind_around(construct: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Construct an SFTTrainer; with a PoSECollator, check the rows' length and extend a model given by name."""
    from trl import SFTTrainer

    given = inspect.signature(SFTTrainer.__init__).bind(trainer, *args, **kwargs)
    collator = given.arguments.get("data_collator")
    config = given.arguments.get("args")
    if not isinstance(collator, PoSECollator):
        _require_in_sight(collator)
        construct(trainer, *args, **kwargs)
        return
    # Both before the trainer tokenises the data, which may take hours.
    _require_supervised(trainer)
    if config is not None:
        check_row_length(config, collator.settings)
    with extended_by_name(given.arguments.get("model"), config, collator.settings, collator.target_from_model):
        _construct(construct, given, collator)
    if config is None:
        check_row_length(trainer.args, collator.settings)


def _construct(construct: Any, given: inspect.BoundArguments, collator: PoSECollator) -> None:
    """Construct an SFTTrainer with a PoSECollator; with padding-free rows, wrap the collator that it makes.

    TRL refuses a foreign collator with padding-free rows. So it makes its own first, which ours then wraps.
    """
    config = given.arguments.get("args")
    if not getattr(config, "padding_free", False) and not _packs(config):
        # An earlier trainer may have had it wrap TRL's.
        collator.collate = collator._own
        if isinstance(collator._own, _PadLabels):
            multiple = getattr(config, "pad_to_multiple_of", None)
            # Newer versions also know "auto", for devices that are not GPUs.
            collator._own.multiple = multiple if isinstance(multiple, int) else 1
        construct(*given.args, **given.kwargs)
        return
    if not isinstance(collator._own, _PadLabels):
        raise PoSEError(
            f"padding_free and packing_strategy={getattr(config, 'packing_strategy', None)!r} need TRL's own collator, "
            "but PoSECollator was given another one to wrap. Remove collate=, or use packing_strategy='wrapped'"
        )
    given.arguments["data_collator"] = None
    construct(*given.args, **given.kwargs)
    trainer = given.args[0]
    collator.collate = trainer.data_collator
    trainer.data_collator = collator
    bind(trainer, collator, pack=Packing.SEQ_LENGTHS)


def _require_supervised(trainer: Any) -> None:
    fix = "Extend the window with one of them, then give the saved model to this trainer without PoSECollator"
    require_supervised(type(trainer), "PoSECollator", fix)


def _require_in_sight(collate: Any) -> None:
    """Raise PoSEError if a trainer was given a function or an object that calls a PoSECollator: none could be bound."""
    if not isinstance(collate, PoSECollator) and any(isinstance(each, PoSECollator) for each in _called_by(collate)):
        raise PoSEError(
            f"data_collator={shown(collate)} hides a PoSECollator, so the trainer would evaluate on skipped positions, "
            "draw the same ones in each epoch, and save without the extension. Give it the PoSECollator itself, with "
            "your code inside: data_collator=PoSECollator(tokenizer, collate=yours)"
        )


def _called_by(thing: Any, deep: int = 3) -> Iterator[Any]:
    """Yield what a function, a method or an object may call, down to some depth."""
    parts: list[Any] = []
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif inspect.ismethod(thing):
        parts = [thing.__self__]
    elif inspect.isfunction(thing):
        with suppress(ValueError):  # a name without a value yet
            names = inspect.getclosurevars(thing)
            parts = [*names.nonlocals.values(), *names.globals.values()]
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    for part in parts:
        if callable(part) and not isinstance(part, type):
            yield part
            if deep:
                yield from _called_by(part, deep - 1)


def _packs(args: Any) -> bool:
    """Return whether a run packs rows. TRL's "wrapped" rows name no borders, so each is one document."""
    return bool(getattr(args, "packing", False)) and getattr(args, "packing_strategy", "") != "wrapped"
