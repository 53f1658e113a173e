"""TRL, and any other transformers `Trainer`: `SFTTrainer(…, data_collator=PoSECollator(tokenizer, …))`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import weakref
from typing import Any

from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer

from pose_plugin.collator import Collate, Packing, PositionCollator
from pose_plugin.config import parse_settings
from pose_plugin.training.trainer import bind
from pose_plugin.utils.errors import PoSEError


class PoSECollator(PositionCollator):
    """A data collator that trains long distances in short windows.

        SFTTrainer(model, args=args, train_dataset=dataset, data_collator=PoSECollator(tokenizer, target_length=32768))

    Give it to any transformers `Trainer`; it then learns the epoch from it, and leaves evaluation plain. The model
    must be built from `extend_context(config, target_length=…)`. In a training loop of your own, call
    `set_epoch` at each epoch, use `collator.plain()` for evaluation, and `self_test(model, collator)` once.

    Args:
        tokenizer: pads the rows; needs a pad token. May be left out where `collate` is given.
        collate: a collator to wrap (TRL's, Hugging Face's, your own); default pads `input_ids`, `labels` and masks.
        settings: the fields of `PoSESettings`; `target_length` is required.

    Raises:
        PoSEError: a setting that cannot work, or neither tokenizer nor collator.
    """

    def __init__(self, tokenizer: Any = None, collate: Collate | None = None, **settings: Any) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "pad") and callable(tokenizer) and collate is None:
            tokenizer, collate = None, tokenizer
        for name, value, verb in (("tokenizer", tokenizer, "pad"), ("collate", collate, "__call__")):
            if value is not None and not hasattr(value, verb):
                raise PoSEError(
                    f"PoSECollator: {name}={value!r} is no {name}. The first argument is a tokenizer or a collator, "
                    "settings are keywords: PoSECollator(tokenizer, target_length=32768)"
                )
        if collate is None:
            if tokenizer is None:
                raise PoSEError("PoSECollator needs a tokenizer, or collate=, the collator to wrap")
            if tokenizer.pad_token is None:
                raise PoSEError(
                    "PoSECollator: the tokenizer has no pad token, so rows of unlike lengths cannot be "
                    "stacked. Set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
                )
            collate = _PadLabels(tokenizer)
        # Which collator is wrapped when TRL does not need its own.
        self._own = collate
        side = getattr(tokenizer or getattr(collate, "tokenizer", None), "padding_side", "right")
        super().__init__(collate, parse_settings(settings, where="PoSECollator"), padding_side=side)
        _Watch.add(self)

    @property
    def tokenizer(self) -> Any:
        """The inner collator's; TRL's own collators have none."""
        return getattr(self.collate, "tokenizer", None) or getattr(self._own, "tokenizer", None)


class _PadLabels:
    """Pads `input_ids`, masks and `labels`; rows without labels are taken whole, as in language modelling."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pad = DataCollatorForSeq2Seq(tokenizer)

    def __call__(self, features: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        rows = []
        for feature in features:
            row = {key: feature[key] for key in ("input_ids", "labels", "token_type_ids") if key in feature}
            row.setdefault("labels", list(row["input_ids"]))
            rows.append(row)
        return self._pad(rows, *args, **kwargs)


class _Watch:
    """While a `PoSECollator` lives, a trainer that is made with it is bound to it.

    A trainer tells its collator neither the epoch nor whether a batch is for evaluation, and takes no other hint than
    the collator itself; so its constructor is watched, and left as it was when the last collator is gone.
    """

    # Counted, as a WeakSet still holds a collator while its finalizer runs.
    _alive = 0
    _undo: list[tuple[type, Any]] = []  # noqa: RUF012 - one list for the process, as there is one Trainer class

    @classmethod
    def add(cls, collator: PoSECollator) -> None:
        cls._alive += 1
        weakref.finalize(collator, cls._release).atexit = False
        if not cls._undo:
            cls._patch(Trainer, _after_trainer)
            sft_trainer = _sft_trainer()
            if sft_trainer is not None:
                cls._patch(sft_trainer, _around_sft_trainer)

    @classmethod
    def _patch(cls, owner: type, around: Any) -> None:
        original = owner.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            around(trainer, original, *args, **kwargs)

        cls._undo.append((owner, original))
        owner.__init__ = init  # type: ignore[misc]

    @classmethod
    def _release(cls) -> None:
        cls._alive -= 1
        if cls._alive == 0:
            while cls._undo:
                owner, original = cls._undo.pop()
                owner.__init__ = original  # type: ignore[misc]


def _sft_trainer() -> type | None:
    if importlib.util.find_spec("trl") is None:
        return None
    from trl import SFTTrainer

    return SFTTrainer


def _after_trainer(trainer: Any, original: Any, /, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    if isinstance(trainer.data_collator, PoSECollator):
        pack = _packing(trainer.args) or _flattened(trainer.data_collator.collate) or _packed_before(trainer)
        bind(trainer, trainer.data_collator, pack=pack)


def _around_sft_trainer(trainer: Any, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """TRL refuses a foreign collator with padding-free rows, so it first makes its own, which is then wrapped."""
    given = inspect.signature(original).bind(trainer, *args, **kwargs)
    collator = given.arguments.get("data_collator")
    config = given.arguments.get("args")
    if not isinstance(collator, PoSECollator) or not _padding_free(config):
        if isinstance(collator, PoSECollator):
            collator.collate = collator._own
        original(trainer, *args, **kwargs)
        return
    if not isinstance(collator._own, _PadLabels):
        raise PoSEError(
            f"padding_free and packing_strategy={getattr(config, 'packing_strategy', None)!r} need TRL's "
            f"own collator, but PoSECollator was given another one to wrap. Leave collate= out, or use "
            f"packing_strategy='wrapped'"
        )
    given.arguments["data_collator"] = None
    original(*given.args, **given.kwargs)
    collator.collate = trainer.data_collator
    trainer.data_collator = collator
    bind(trainer, collator, pack=_packing(config) or Packing.SEQ_LENGTHS)


def _packing(args: Any) -> Packing | None:
    """How rows of this run are packed; TRL's "wrapped" rows hold no borders and are one document each."""
    packed = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") != "wrapped"
    return Packing.SEQ_LENGTHS if packed else None


def _flattened(collate: Any) -> Packing | None:
    """Some collators put a batch into one row without being asked by the trainer."""
    flat = isinstance(collate, DataCollatorWithFlattening) or getattr(collate, "padding_free", False)
    return Packing.SEQ_LENGTHS if flat else None


def _packed_before(trainer: Any) -> Packing | None:
    """Whether the data set was packed before the trainer was made, by `trl.pack_dataset`.

    Raises:
        PoSEError: the trainer would drop the column that says where documents end.
    """
    if "seq_lengths" not in (getattr(trainer.train_dataset, "column_names", None) or ()):
        return None
    trainer._set_signature_columns_if_needed()
    if trainer.args.remove_unused_columns and "seq_lengths" not in trainer._signature_columns:
        raise PoSEError(
            "train_dataset has the column seq_lengths, so its rows are packed, but the trainer drops it and would "
            "train each row as one document. Set remove_unused_columns=False, or give single documents"
        )
    return Packing.SEQ_LENGTHS


def _padding_free(args: Any) -> bool:
    return bool(getattr(args, "padding_free", False)) or _packing(args) is not None
