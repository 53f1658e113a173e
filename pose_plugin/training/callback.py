"""What a run with PoSE positions does at its start, at each epoch, at each save and at its end."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pose_plugin.attention import RestartBoundaries, require_packing_support
from pose_plugin.checkpoints import complete_folder
from pose_plugin.checkpoints.probe import PROBE
from pose_plugin.checkpoints.record import model_facts, run_facts
from pose_plugin.checkpoints.saved import NO_LIMIT, RECORD
from pose_plugin.collator import PositionCollator
from pose_plugin.features import Packing
from pose_plugin.positions import make_sampler, sketch
from pose_plugin.rope import base_findings, restore_rope, verify_rope
from pose_plugin.rope.read import text_config
from pose_plugin.selftest import self_test
from pose_plugin.training import checks, saving
from pose_plugin.training.data_report import look_at_rows
from pose_plugin.training.history import History
from pose_plugin.training.launch import let_cpu_ranks_gather, report_launch
from pose_plugin.utils.distributed import together
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import staged
from pose_plugin.utils.findings import report
from pose_plugin.utils.log import log


class PoSECallback(TrainerCallback):
    """Checks the run before its first step, passes the epoch to the collator, and completes saved folders.

    Attributes:
        card: README.md of the run.
        boundaries: the rule by which transformers finds packed documents, installed while a packed run trains.
        answered: the model's answers to fixed questions when it was last saved (see `take_probe`).
        data: names of the training data, for the record; set by frameworks that know them.
        history: what the weights have seen so far, see `History`.
    """

    def __init__(self, trainer: Trainer, collator: PositionCollator, pack: Packing | None = None) -> None:
        self.trainer, self.collator, self.pack = trainer, collator, pack
        self.card = saving.ModelCard(trainer, collator.settings.target_length)
        self.boundaries = RestartBoundaries()
        self.answered: dict[str, Any] | None = None
        self.data: list[str] | None = None
        self.history = History(collator)
        self._next_epoch = 0

    # Saving.

    def saved(self, folder: str | Path) -> None:
        """Complete a folder that the trainer has just saved. Call it on every rank."""
        # Every rank asks the model, as the weights may be spread over the ranks.
        self.answered = saving.probe_of(self.trainer, self.collator.settings)
        # If all ranks save, as each holds a part of the weights, they also leave together: Axolotl then writes into the
        # folder on every rank, while rank 0 may still be completing it.
        with together() if saving.weights_are_divided(self.trainer) else nullcontext():
            if self.trainer.args.should_save:
                self.complete(folder)

    def complete(self, folder: str | Path) -> None:
        """Write what frameworks leave out of a saved folder. Call it on one rank only."""
        trainer, settings = self.trainer, self.collator.settings
        model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        facts = {**model_facts(model), **run_facts(trainer, self.history.drawn(), self.data)}
        facts["trained"]["steps"] -= self.history.idle_steps
        facts["trained"].update(self.history.of_loaded_weights)
        if trainer.is_fsdp_enabled:
            saving.save_config_with_shards(model.config, Path(folder))
        limit = saving.known_limit(trainer, settings.target_length)
        stored = bool(getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False))
        complete_folder(
            folder, model.config, settings, limit is None, facts=facts, probe=self.answered, stored_quantised=stored
        )
        if Path(folder).name.startswith(PREFIX_CHECKPOINT_DIR):
            saving.resumable(Path(folder) / "config.json")
        else:
            saving.complete_card(folder, limit)

    def before_push(self, checkpoint: str | Path) -> None:
        """Copy the record of a checkpoint into the output folder, which is what the trainer uploads next."""
        if self.trainer.is_world_process_zero():
            with staged(Path(self.trainer.args.output_dir or ".")) as stage:
                for name in (PROBE, RECORD):
                    if (Path(checkpoint) / name).is_file():
                        stage.copy(Path(checkpoint) / name, name)

    # Training.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: Any = kwargs.get("model") or self.trainer.model
        settings = self.collator.settings
        # Here, as `auto_find_batch_size` begins again after each attempt that ran out of memory.
        self.history.begin(again=_reads_again(self.trainer, state))
        # A resumed run continues in the epoch in which it was stopped.
        self._next_epoch = int((state.epoch or 0) + 1e-6)
        report_launch(self.trainer)
        let_cpu_ranks_gather(self.trainer)
        with together():
            self._check(model)
            rows = look_at_rows(self.trainer.train_dataset, self.collator, self._columns())
        if state.is_world_process_zero:
            for warning in rows.warnings(settings) if rows is not None else ():
                log.warning(warning)
            report(base_findings(model.config, settings.target_length), "rope: ", least="warning")
            self._describe()
        if settings.self_test and make_sampler(settings).skips:
            self._self_test(args)
            with together():
                # Again, as FSDP 1 casts buffers in its first forward, which was that of the self-test.
                self._verify_frequencies(model)

    def _check(self, model: Any) -> None:
        settings = self.collator.settings
        if self.trainer.data_collator is not self.collator:
            raise PoSEError(
                f"trainer.data_collator was replaced by another one ({type(self.trainer.data_collator).__name__}), "
                "whose positions this run would not check, count or record. Pass the new one to the trainer's "
                "constructor as data_collator"
            )
        checks.require_rows_fit(checks.parallel_sizes(self.trainer, "cp_size", "sp_size"), settings)
        if make_sampler(settings).skips:
            checks.require_positions_pass(self.trainer.model)
        if checks.is_unsloth(model):
            checks.require_unsloth_fits(model, settings)
        self._verify_frequencies(model)
        checks.require_window(model.config, settings.target_length)
        checks.require_same_rope(model.config, settings)
        if self.pack is not None:
            require_packing_support(model)
            self.boundaries.install()
            # With a cache, transformers does not look for documents, so packed ones would see each other.
            model.config.get_text_config().use_cache = False

    def _columns(self) -> list[str] | None:
        """Return the columns that the trainer leaves to the collator; None if it leaves all."""
        trainer: Any = self.trainer
        if not trainer.args.remove_unused_columns:
            return None
        trainer._set_signature_columns_if_needed()
        columns: list[str] = trainer._signature_columns
        return columns

    def _verify_frequencies(self, model: Any) -> None:
        restored = restore_rope(model, only_coarse=True)
        if restored and self.trainer.is_world_process_zero():
            log.info(
                "%s had been cast to bf16 or fp16, as DeepSpeed and FSDP 1 do with a whole model; restored in float32",
                ", ".join(restored),
            )
        verify_rope(model)

    def _self_test(self, args: Any) -> None:
        rows = 2 if args.per_device_train_batch_size > 1 else 1
        try:
            passed = self_test(self.trainer.model_wrapped, self.collator, pack=self.pack, rows=rows)
        except PoSEError:
            self.boundaries.undo()
            raise
        if self.trainer.is_world_process_zero():
            log.info("self-test passed: %s", passed)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.set_epoch(self._next_epoch)
        self._next_epoch += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rates = [group["lr"] for group in getattr(kwargs.get("optimizer"), "param_groups", ())]
        if rates and not any(rates) and state.global_step >= state.max_steps:
            self.history.idle_steps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.boundaries.undo()
        self._raise_tokenizer_limit()
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.history.loaded(state.best_model_checkpoint, state.best_global_step)
        # Now, while all ranks are alive: Axolotl saves once more after the other ranks have ended.
        self.answered = saving.probe_of(self.trainer, self.collator.settings)
        if state.is_world_process_zero and not state.global_step:
            log.warning(
                "NOTHING WAS TRAINED: the run ended after steps=0, and the saved weights are the base's. Check "
                "max_steps and num_train_epochs, and that the rows fill at least one batch of %d rows per process",
                self.trainer._train_batch_size,
            )
        self._report_what_was_trained()

    def _raise_tokenizer_limit(self) -> None:
        """Let the tokenizer be saved with the new window, also by code that does not ask the trainer.

        Not before the end: rows that are tokenised or padded while training runs may be cut to the old limit.
        """
        tokenizer, target = self.trainer.processing_class, self.collator.settings.target_length
        limit = getattr(tokenizer, "model_max_length", target)
        if limit < target or limit >= NO_LIMIT:
            model: Any = self.trainer.model
            # The window may be longer than the target, and engines take the smaller of the two.
            tokenizer.model_max_length = text_config(model.config).max_position_embeddings  # type: ignore[union-attr]

    # What the log reports.

    def _describe(self) -> None:
        settings = self.collator.settings
        log.info("settings: %s", settings.model_dump(exclude_defaults=True))
        frozen = checks.warning_of_frozen_parts(self.trainer.model, settings.target_length)
        for warning in (frozen, checks.warning_of_tied_embeddings(self.trainer.model)):
            if warning:
                log.warning(warning)
        sampler = make_sampler(settings)
        if warning := checks.warning_of_no_jumps(settings):
            log.warning(warning)
        elif settings.train_length is not None and sampler.skips:
            about = " (with borders as often as usual)" if sampler.border_finder is not None else ""
            chances = sketch(settings)
            log.info("chance that one row of %d tokens trains a distance%s\n%s", settings.train_length, about, chances)

    def _report_what_was_trained(self) -> None:
        settings, trained = self.collator.settings, self.history.drawn()
        if not trained["documents"]:
            # Of a stream, accelerate gives the other ranks what the collator of rank 0 made.
            if self.trainer.state.global_step and self.trainer.state.is_world_process_zero:
                log.warning(
                    "documents=0: no row passed through PoSECollator, so plain positions were trained. Return a data "
                    "loader with collate_fn=trainer.data_collator from get_train_dataloader"
                )
            return
        log.info(
            "this process drew %(documents)d documents (prefetched ones included), %(skipped)d of them with a jump, "
            "%(tokens)d tokens, farthest position %(farthest)d",
            trained,
        )
        if trained.get("uncut") or trained.get("anywhere"):
            log.warning(
                "sampler=%s: of %d documents, %d had no border inside their window and were trained without a jump; %d "
                "had no border at all and were split at random, like plain text",
                settings.sampler,
                trained["documents"],
                trained["uncut"],
                trained["anywhere"],
            )
        if not trained["skipped"] and make_sampler(settings).skips:
            log.warning(
                "no document had a jump, so nothing beyond %d tokens was trained. Check chunks, train_length, "
                "unskipped_ratio and the length of the samples",
                trained["farthest"] + 1,
            )


def _reads_again(trainer: Any, state: Any) -> bool:
    """Return whether a resumed run reads all of its earlier rows again, as it does with a stream of unknown length."""
    data = trainer.train_dataset
    stream = isinstance(data, IterableDataset) and not hasattr(data, "__len__")
    return stream and not trainer.args.ignore_data_skip and state.global_step < state.max_steps
