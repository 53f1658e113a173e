"""What a trainer leaves out when it saves: the probe, the config next to shards, our section of the model card."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pose_plugin.checkpoints.probe import take_probe
from pose_plugin.checkpoints.saved import NO_LIMIT
from pose_plugin.config import PoSESettings
from pose_plugin.export.card import write_card
from pose_plugin.training.checks import divided, parallel_sizes
from pose_plugin.utils.distributed import outside_training
from pose_plugin.utils.files import atomic_file, read_json, write_json
from pose_plugin.utils.log import log


def probe_of(trainer: Any, settings: PoSESettings) -> dict[str, Any] | None:
    """Return what the model answers now, for `pose-plugin check`; None, with a warning, if it cannot be asked.

    Call it on every rank, as FSDP and ZeRO-3 gather weights in the forward.
    """
    if divided(parallel_sizes(trainer, "cp_size", "sp_size")):
        # Ulysses and Axolotl's ring attention take the input of any forward for a part of a row.
        log.info("rows are split over devices, so no probe is taken; `pose-plugin check` compares frequencies only")
        return None
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    spread = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
    try:
        with outside_training(trainer.model_wrapped):
            return take_probe(
                model,
                settings.target_length,
                compute=mixed,
                forward=trainer.model_wrapped if spread else None,
                device=trainer.args.device if spread else None,
            )
    except Exception as error:
        # The weights are saved; do not fail the run because the probe failed.
        log.warning("the probe of the trained model failed, so `pose-plugin check` cannot compare with it: %s", error)
        return None


def weights_are_divided(trainer: Any) -> bool:
    """Return whether no rank holds the whole model (FSDP, ZeRO-3); every rank then takes part in each save."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


@contextmanager
def on_each_machine(trainer: Any) -> Iterator[None]:
    """Let `save_on_each_node` save a whole model inside the block.

    transformers 5 writes weights and config on rank 0 only, and the folders of other machines silently get neither.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not trainer.args.save_on_each_node or not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    if weights_are_divided(trainer):
        log.warning("save_on_each_node=True has no effect: with FSDP and ZeRO-3, only rank 0 has whole weights to save")
        yield
        return
    # The trainer calls it on the first rank of each machine only.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def known_limit(trainer: Any, target_length: int) -> int | None:
    """Return the maximum length of the live tokenizer, which its saved file has too; None if below the target.

    Axolotl and many scripts save the tokenizer on every rank without waiting, so rank 0 might read or overwrite a file
    that another rank is writing. The live tokenizer needs neither.
    """
    longest = getattr(trainer.processing_class, "model_max_length", None)
    return int(longest) if longest is not None and target_length <= longest < NO_LIMIT else None


def complete_card(folder: str | Path, tokenizer_maximum: int | None = None) -> None:
    """Put our section into README.md; log a warning if that fails, as the training itself has succeeded.

    Another process may be writing into the folder, so files that cannot be read are read again after a pause.

    Args:
        folder: the saved model.
        tokenizer_maximum: see `known_limit`.
    """
    for wait in (0.5, 1.0, 2.0, None):
        try:
            write_card(folder, tokenizer_maximum=tokenizer_maximum)
            return
        except Exception as error:
            if wait is None:
                log.warning("no model card for %s: %s. `pose-plugin card` writes it", folder, error)
            else:
                time.sleep(wait)


class ModelCard:
    """README.md of a run. Text that was there before the run stays, and our section is put into it.

    Frameworks write the file at the end, at checkpoints and at uploads, each time from nothing.
    """

    def __init__(self, trainer: Any, target_length: int) -> None:
        self.trainer, self.target_length = trainer, target_length
        self._writes = trainer.is_world_process_zero()
        if self._writes and self._copy.exists():
            # An earlier run was killed before it put the text back.
            os.replace(self._copy, self.path)
        self._keeps = self.path.exists()
        if self._keeps and self._writes:
            log.info("%s exists already: its text stays, and our section is put into it", self.path)

    @property
    def path(self) -> Path:
        return Path(self.trainer.args.output_dir or ".") / "README.md"

    @property
    def _copy(self) -> Path:
        return self.path.with_name("_README.md.kept")

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Let the framework write its card inside; then put the earlier text back and add our section."""
        if not self._writes:
            yield
            return
        copied = self._keeps and self.path.exists()
        if copied:
            # On the disk, so that the text is not lost if the process is killed.
            with atomic_file(self._copy) as part:
                shutil.copy2(self.path, part)
        try:
            yield
        finally:
            if copied:
                os.replace(self._copy, self.path)
            complete_card(self.path.parent, known_limit(self.trainer, self.target_length))


def save_config_with_shards(config: Any, folder: Path) -> None:
    """Save the config next to shards: SHARDED_STATE_DICT saves none, and merged shards would get the base's."""
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        return
    config.save_pretrained(folder)
    if not folder.name.startswith(PREFIX_CHECKPOINT_DIR):
        log.warning(
            "%s has the extended config but no weights, because of fsdp_state_dict_type: SHARDED_STATE_DICT. Merge the "
            "weights of a checkpoint into it: accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 %s. "
            "FULL_STATE_DICT saves whole weights, which adapters need",
            folder,
            folder,
        )


def resumable(file: Path) -> None:
    """Remove the transformers 4 form of the rope from a checkpoint; the final folder keeps it.

    A resume reads config.json as a config without a model type. transformers 5 converts rope_scaling in that one too,
    and fails because it has no max_position_embeddings.
    """
    if not file.exists():
        return
    values = read_json(file)
    if values.get("rope_parameters") and values.pop("rope_scaling", None):
        write_json(file, values)
