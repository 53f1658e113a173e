"""What a trainer's saving leaves out: the probe, the config beside shards, our part of the card."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pose_plugin.checkpoints.probe import take_probe
from pose_plugin.config import PoSESettings
from pose_plugin.export.card import write_card
from pose_plugin.utils.distributed import outside_training
from pose_plugin.utils.files import read_json, write_json
from pose_plugin.utils.log import log


def probe_of(trainer: Any, settings: PoSESettings) -> dict[str, Any] | None:
    """What the model answers now, for `pose-plugin check`; None, with a warning, where it cannot be asked.

    On every rank, as FSDP and ZeRO-3 gather weights in the forward.
    """
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
        # The weights are saved already, and a run is worth more than its proof.
        log.warning("no probe of the trained model could be taken, so `pose-plugin check` cannot compare: %s", error)
        return None


def weights_are_divided(trainer: Any) -> bool:
    """Whether no rank holds the whole model (FSDP, ZeRO-3), so that every rank takes part in each save."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


def known_limit(trainer: Any, target_length: int) -> int | None:
    """The live tokenizer's maximum, which its saved file has too; None where it does not take the target.

    Axolotl and many a script save the tokenizer on every rank, and nothing waits for them: rank 0 might read, or write
    over, half of a file. What is known needs neither.
    """
    longest = getattr(trainer.processing_class, "model_max_length", None)
    return int(longest) if longest is not None and longest >= target_length else None


def complete_card(folder: str | Path, tokenizer_maximum: int | None = None) -> None:
    """Puts our part into README.md; a card is no reason to fail after the training.

    Another process may be writing there: what cannot be read at this moment is read once more.

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


def with_our_card(trainer: Trainer, target_length: int) -> None:
    """Frameworks write README.md anew at the end, at checkpoints and at uploads.

    One that was there before the run may hold somebody's words, so it stays; our part is put into it.
    """
    create = trainer.create_model_card
    if trainer.is_world_process_zero() and _kept(trainer).exists():
        # An earlier run was killed before it was put back.
        os.replace(_kept(trainer), _card_of(trainer))
    before = _card_of(trainer).exists()
    if before and trainer.is_world_process_zero():
        log.info("%s is there already: its text stays, and our part is put into it", _card_of(trainer))

    @functools.wraps(create)
    def create_model_card(*args: Any, **kwargs: Any) -> Any:
        if not trainer.is_world_process_zero():
            return create(*args, **kwargs)
        card = _card_of(trainer)
        # A copy on the disk: a kill before it is put back shall not cost the words.
        kept = _kept(trainer) if before and card.exists() else None
        if kept is not None:
            part = kept.with_suffix(".part")
            shutil.copy2(card, part)
            os.replace(part, kept)
        try:
            return create(*args, **kwargs)
        finally:
            if kept is not None:
                os.replace(kept, card)
            complete_card(card.parent, known_limit(trainer, target_length))

    trainer.create_model_card = create_model_card  # type: ignore[method-assign]


def _card_of(trainer: Trainer) -> Path:
    return Path(trainer.args.output_dir or ".") / "README.md"


def _kept(trainer: Trainer) -> Path:
    return _card_of(trainer).with_name("_README.md.kept")


def config_beside_shards(config: Any, folder: Path) -> None:
    """With SHARDED_STATE_DICT nothing but shards is saved, and whoever merges them would take the base's config."""
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        return
    config.save_pretrained(folder)
    if not folder.name.startswith(PREFIX_CHECKPOINT_DIR):
        log.warning(
            "%s holds the extended config, but no weights, since fsdp_state_dict_type is SHARDED_STATE_DICT. Merge "
            "those of a checkpoint into it: accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 %s. "
            "FULL_STATE_DICT saves them whole, and adapters need it",
            folder,
            folder,
        )


def resumable(file: Path) -> None:
    """Takes the older form of the rope out of a checkpoint; the final folder keeps it.

    A resume reads the file as a config of no model type. transformers 5 converts rope_scaling in such a config too,
    and dies for want of max_position_embeddings.
    """
    if not file.exists():
        return
    values = read_json(file)
    if values.get("rope_parameters") and values.pop("rope_scaling", None):
        write_json(file, values)
