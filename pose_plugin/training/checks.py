"""What must hold of the trainer and its model before the first step."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from pose_plugin.checkpoints import read_record
from pose_plugin.config import PoSESettings
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log


def require_whole_rows(trainer: Trainer) -> None:
    """Checks that no row is split over devices.

    Raises:
        PoSEError: context or sequence parallelism is on. Its ring of devices takes neither the mask nor the rule that
            keep the chunks of a row together.
    """
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for key in ("cp_size", "sp_size"):
        size = getattr(parallel, key, None) or 1
        if size > 1:
            raise PoSEError(
                f"{key}={size} splits each row over {size} devices, and chunks on different ones would not be kept "
                f"together. Set {key}: 1: PoSE rows are short, and data parallelism or ZeRO-3/FSDP uses the devices"
            )


def require_window(config: Any, target_length: int) -> None:
    """Checks that a model was built for the target.

    Raises:
        PoSEError: its maximum is below the target, or it has none (no rotary positions).
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most is None or most < target_length:
        raise PoSEError(
            f"the model ({text.model_type}) has max_position_embeddings={most}, but "
            f"target_length={target_length}. Build it from extend_context(config, "
            f"target_length={target_length}, rope='yarn'); rope='none' keeps the frequencies as they are"
        )


def require_same_rope(config: Any, settings: PoSESettings) -> None:
    """Checks a `rope` that was named in the settings against what the model was built with.

    Raises:
        PoSEError: they differ; the settings alone change no model.
    """
    built = (getattr(config.get_text_config(), "pose_plugin", None) or {}).get("rope")
    asked = settings.rope.type
    if "rope" in settings.model_fields_set and built and asked not in (built, "auto", "none"):
        raise PoSEError(
            f"rope={asked}, but the model was built with rope={built}: the collator changes no frequencies. Build the "
            f"model from extend_context(config, target_length={settings.target_length}, rope={asked!r}), or leave rope "
            "out here"
        )


def warn_of_other_settings(checkpoint: str, settings: PoSESettings) -> None:
    """Names what differs between the settings of a checkpoint and those of the run that resumes it."""
    before = read_record(checkpoint)
    now = settings.model_dump(mode="json")
    # The rope of a checkpoint is the model's, which `require_same_rope` looks after where the settings name one.
    names = [key for key in now if key not in ("rope", "self_test") and before.get(key, now[key]) != now[key]]
    if names:
        log.warning(
            "resuming %s with other settings than it was trained with: %s",
            checkpoint,
            ", ".join(f"{key}={before[key]} → {now[key]}" for key in names),
        )
