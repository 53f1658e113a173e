"""What must hold of the trainer and its model before the first step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pose_plugin.checkpoints import read_record
from pose_plugin.config import PoSESettings
from pose_plugin.rope.read import RECORD_KEY, lookup, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

if TYPE_CHECKING:
    from transformers import Trainer

# LongLoRA (arXiv 2309.12307) stretched Llama 2 eight times: no rank of LoRA alone came near to full training, LoRA with
# embeddings and norms did.
LARGE = 8.0


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


def frozen_parts(model: Any) -> list[str]:
    """What an adapter trains none of: "embeddings", "norms". Empty for a model without an adapter."""
    if not getattr(model, "peft_config", None):
        return []
    embeddings = model.get_input_embeddings()
    trained = any(parameter.requires_grad for parameter in embeddings.parameters())
    norms = [
        parameter
        for name, module in model.named_modules()
        # Of all families: LlamaRMSNorm, LayerNorm, Gemma3RMSNorm, …
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    ]
    found = [] if trained else ["embeddings"]
    return found if any(parameter.requires_grad for parameter in norms) or not norms else [*found, "norms"]


def warning_of_frozen_parts(model: Any, target_length: int) -> str | None:
    """A sentence for the log where the stretch is large, else None."""
    text = text_config(model.config)
    original = (lookup(text, RECORD_KEY) or {}).get("original_length")
    frozen = frozen_parts(model)
    if not original or not frozen or target_length / original < LARGE:
        return None
    norms = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and next(module.parameters(recurse=False), None) is not None
        }
    )
    embedding = next(
        (
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if module is model.get_input_embeddings() and name
        ),
        "embed_tokens",
    )
    names = ", ".join([embedding] * ("embeddings" in frozen) + norms * ("norms" in frozen))
    return (
        f"the adapter leaves {' and '.join(frozen)} frozen, and {original} → {target_length} tokens is a stretch by "
        f"{target_length / original:g}: LongLoRA (arXiv 2309.12307) needed them trained at 8. Add "
        f"modules_to_save=[{names}] (Axolotl: lora_modules_to_save)"
    )


def is_unsloth(model: Any) -> bool:
    """Whether Unsloth loaded a model: it then carries the longest row it takes."""
    return "unsloth" in sys.modules and _longest_row(model) is not None


def require_unsloth_fits(model: Any, settings: PoSESettings) -> None:
    """Checks that Unsloth's table reaches the farthest position, its scaling is not in ours' place, rows stay whole.

    Raises:
        PoSEError: naming what to load instead.
    """
    config, longest = model.config.get_text_config(), _longest_row(model) or 0
    record = getattr(config, RECORD_KEY, None)
    load = "FastLanguageModel.from_pretrained(extended_base(base, folder, target_length=…), max_seq_length=…)"
    if not record:
        raise PoSEError(
            f"Unsloth loaded a base that was not extended: with max_seq_length={longest} it stretches the positions by "
            f"a linear scaling of its own, or not at all. Load it by {load} "
            "(from pose_plugin.frameworks.unsloth import extended_base)"
        )
    if longest > record["target_length"]:
        raise PoSEError(
            f"max_seq_length={longest} is beyond target_length={record['target_length']}, for which the base was "
            f"extended: Unsloth then puts its own linear scaling in the place of rope={record['rope']}. Load with "
            f"max_seq_length={settings.train_length or record['original_length']}, the trained window"
        )
    if settings.train_length is not None and longest < settings.train_length:
        raise PoSEError(
            f"max_seq_length={longest} is shorter than train_length={settings.train_length}: Unsloth cuts what is "
            f"longer. Load with max_seq_length={settings.train_length}"
        )
    farthest = settings.target_length + settings.target_margin
    if farthest > config.max_position_embeddings:
        raise PoSEError(
            f"target_length={settings.target_length} with target_margin={settings.target_margin} reaches position "
            f"{farthest - 1}, but Unsloth's table of cos and sin ends at max_position_embeddings="
            f"{config.max_position_embeddings} and is read beyond its end. Set target_margin: 0, or load from "
            f"extended_base(…, target_length={farthest})"
        )


def _longest_row(model: Any) -> int | None:
    # PEFT and accelerate wrap the model that carries it.
    return next(
        (m.max_seq_length for m in model.modules() if isinstance(getattr(m, "max_seq_length", None), int)), None
    )
