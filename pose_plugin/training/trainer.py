"""What PoSE needs from a transformers `Trainer`, whoever made it (Axolotl, TRL or the user)."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from pose_plugin.attention import RestartBoundaries, needs_one_row, require_packing_support
from pose_plugin.checkpoints import complete_folder
from pose_plugin.checkpoints.record import model_facts, run_facts
from pose_plugin.collator import Packing, PositionCollator
from pose_plugin.positions import coverage, make_sampler, many_chunks, simulable
from pose_plugin.rope import restore_rope, verify_rope
from pose_plugin.selftest import self_test
from pose_plugin.training.checks import (
    is_unsloth,
    require_same_rope,
    require_unsloth_fits,
    require_whole_rows,
    require_window,
    warn_of_other_settings,
    warning_of_frozen_parts,
)
from pose_plugin.training.data_report import look_at_rows
from pose_plugin.training.precision import keep_small_steps
from pose_plugin.training.saving import (
    complete_card,
    config_beside_shards,
    known_limit,
    probe_of,
    resumable,
    weights_are_divided,
    with_our_card,
)
from pose_plugin.utils.distributed import together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log, show_log


def bind(trainer: Trainer, collator: PositionCollator, pack: Packing | None = None) -> PoSECallback:
    """Lets a trainer and its collator know of each other.

    The collator learns the epoch; evaluation gets plain positions; the run is checked before its first step;
    what is saved holds the extended config; whole modules beside an adapter are trained in float32.

    Args:
        trainer: with `trainer.data_collator` set.
        collator: the one that draws the training positions.
        pack: how rows are packed, see `self_test`.
    """
    show_log()
    keep_small_steps(trainer)
    collator.packs = pack is not None
    # Evaluation may pack too, with a collator of its own.
    for each in (collator, getattr(trainer, "eval_data_collator", None)):
        if isinstance(each, PositionCollator):
            each.one_row = needs_one_row(trainer.model)
    callback = PoSECallback(trainer, collator, pack)
    trainer.add_callback(callback)
    if collator.settings.evaluate is not None:
        # Imported here: most runs need nothing of it.
        from pose_plugin.evaluation.block import from_settings

        # Behind ours, so that the self-test comes before the first measurement.
        trainer.add_callback(from_settings(collator.settings))
    _around_training(trainer, callback)
    for name in ("get_eval_dataloader", "get_test_dataloader"):
        _with_plain_positions(trainer, name, collator)
    save_model = trainer.save_model

    @functools.wraps(save_model)
    def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        save_model(output_dir, *args, **kwargs)
        # Every rank takes part, as the weights may be spread over them.
        callback.answered = probe_of(trainer, collator.settings)
        # Axolotl goes on to write into the folder on every rank, while one is still completing it. Where all ranks save
        # for sure, as each holds a part of the weights, they leave together.
        with together() if weights_are_divided(trainer) else nullcontext():
            if trainer.args.should_save:
                callback.complete(output_dir or trainer.args.output_dir or ".")

    trainer.save_model = save  # type: ignore[method-assign]
    with_our_card(trainer, collator.settings.target_length)
    return callback


class PoSECallback(TrainerCallback):
    """Checks the run before its first step and tells the collator the epoch."""

    def __init__(self, trainer: Trainer, collator: PositionCollator, pack: Packing | None = None) -> None:
        self.trainer, self.collator, self.pack = trainer, collator, pack
        self.boundaries = RestartBoundaries()
        self.answered: dict[str, Any] | None = None
        self.data: list[str] | None = None
        self._next_epoch = 0

    def complete(self, folder: str | Path) -> None:
        """Writes what frameworks leave out of a saved folder. On one rank only."""
        trainer, settings = self.trainer, self.collator.settings
        model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        facts = {**model_facts(model), **run_facts(trainer, self.collator.trained(), self.data)}
        if trainer.is_fsdp_enabled:
            config_beside_shards(model.config, Path(folder))
        limit = known_limit(trainer, settings.target_length)
        complete_folder(folder, model.config, settings, limit is None, facts=facts, probe=self.answered)
        if Path(folder).name.startswith(PREFIX_CHECKPOINT_DIR):
            resumable(Path(folder) / "config.json")
        else:
            complete_card(folder, limit)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: Any = kwargs.get("model") or self.trainer.model
        settings = self.collator.settings
        # After a resume the trainer goes on in the epoch in which it was stopped.
        self._next_epoch = int((state.epoch or 0) + 1e-6)
        with together():
            self._check(model)
            report = look_at_rows(self.trainer.train_dataset, self.collator)
        if report is not None and state.is_world_process_zero:
            for warning in report.warnings(settings):
                log.warning(warning)
        tokenizer = self.trainer.processing_class
        if getattr(tokenizer, "model_max_length", settings.target_length) < settings.target_length:
            tokenizer.model_max_length = settings.target_length  # type: ignore[union-attr]
        if state.is_world_process_zero:
            self._describe()
        if settings.self_test and make_sampler(settings).skips:
            self._self_test(args)
            with together():
                # FSDP 1 casts buffers in the first forward.
                self._frequencies(model)

    def _frequencies(self, model: Any) -> None:
        restored = restore_rope(model, only_coarse=True)
        if restored and self.trainer.is_world_process_zero():
            log.info(
                "%s were cast to bf16 or fp16, as DeepSpeed and FSDP 1 do with a whole model; they are float32 again",
                ", ".join(restored),
            )
        verify_rope(model)

    def _check(self, model: Any) -> None:
        settings = self.collator.settings
        require_whole_rows(self.trainer)
        if is_unsloth(model):
            require_unsloth_fits(model, settings)
        self._frequencies(model)
        require_window(model.config, settings.target_length)
        require_same_rope(model.config, settings)
        if self.pack is not None:
            require_packing_support(model)
            self.boundaries.install()
            # With a cache, transformers looks for no documents at all and packed ones would mix.
            model.config.get_text_config().use_cache = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.set_epoch(self._next_epoch)
        self._next_epoch += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.boundaries.undo()
        # Now, while all ranks are here: Axolotl saves once more when they are gone.
        self.answered = probe_of(self.trainer, self.collator.settings)
        trained = self.collator.trained()
        if trained["documents"]:
            log.info(
                "this process drew %(documents)d documents (those fetched ahead included), %(skipped)d of them with a "
                "jump, %(tokens)d tokens, farthest position %(farthest)d",
                trained,
            )
            if trained.get("uncut") or trained.get("anywhere"):
                log.warning(
                    "sampler=%s: of %d documents %d have no border inside their window and stayed plain, and %d show "
                    "none at all and were cut anywhere, as raw text is",
                    self.collator.settings.sampler,
                    trained["documents"],
                    trained["uncut"],
                    trained["anywhere"],
                )
            if not trained["skipped"] and make_sampler(self.collator.settings).skips:
                log.warning(
                    "no document had a jump, so nothing beyond %d tokens was trained. Look at chunks, train_length, "
                    "unskipped_ratio and the length of the samples",
                    trained["farthest"] + 1,
                )

    def _describe(self) -> None:
        settings = self.collator.settings
        log.info("settings: %s", settings.model_dump(exclude_defaults=True))
        frozen = warning_of_frozen_parts(self.trainer.model, settings.target_length)
        if frozen:
            log.warning(frozen)
        sampler = make_sampler(settings)
        one_chunk = settings.chunks == 1 and "chunks" in sampler.options()
        if one_chunk or settings.unskipped_ratio == 1 or settings.train_length == 1:
            log.warning(
                "with chunks=%d, unskipped_ratio=%g, train_length=%s no document can have a jump: this run trains "
                "plain positions. Use chunks: 2",
                settings.chunks,
                settings.unskipped_ratio,
                settings.train_length,
            )
        elif settings.train_length is not None and sampler.skips and simulable(settings):
            # With many chunks, simulating a row takes time in proportion to the target.
            draws = max(10, min(100, 2**24 // settings.target_length)) if many_chunks(settings) else 500
            chances = coverage(settings, draws=draws)
            about = " (with borders as often as usual)" if sampler.border_finder is not None else ""
            log.info("chance that one row of %d trains a distance%s\n%s", settings.train_length, about, chances.table())

    def _self_test(self, args: Any) -> None:
        rows = 2 if args.per_device_train_batch_size > 1 else 1
        try:
            report = self_test(self.trainer.model_wrapped, self.collator, pack=self.pack, rows=rows)
        except PoSEError:
            self.boundaries.undo()
            raise
        if self.trainer.is_world_process_zero():
            log.info("self-test passed: %s", report)


def _around_training(trainer: Trainer, callback: PoSECallback) -> None:
    """Looks at what is resumed; and a run that ends in an exception does not call `on_train_end`."""
    train = trainer.train

    @functools.wraps(train)
    def train_and_undo(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(trainer.args.output_dir)) or True
        if isinstance(resume_from_checkpoint, str):
            warn_of_other_settings(resume_from_checkpoint, callback.collator.settings)
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        finally:
            callback.boundaries.undo()

    trainer.train = train_and_undo  # type: ignore[method-assign]


def _with_plain_positions(trainer: Trainer, name: str, collator: PositionCollator) -> None:
    make = getattr(trainer, name)

    @functools.wraps(make)
    def make_plain(*args: Any, **kwargs: Any) -> Any:
        if trainer.data_collator is not collator:
            return make(*args, **kwargs)
        trainer.data_collator = collator.plain()
        try:
            return make(*args, **kwargs)
        finally:
            trainer.data_collator = collator

    setattr(trainer, name, make_plain)
