"""What must hold of a trainer, its model and its settings before the first step.

Everything here would otherwise go wrong silently. Nothing heavy is imported, as `pose-plugin plan` reads this too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pose_plugin.checkpoints import read_record
from pose_plugin.checkpoints.merge import trains_embeddings_apart
from pose_plugin.config import PoSESettings
from pose_plugin.positions import make_sampler
from pose_plugin.rope.read import RECORD_KEY, far_rope, lookup, original_length, text_config
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.log import log
from pose_plugin.utils.models import embeddings_and_norms, last_names

# LongLoRA (arXiv 2309.12307) stretched Llama 2 by 8: LoRA alone stayed behind full training at every rank, LoRA with
# trained embeddings and norms did not.
LARGE_STRETCH = 8.0


def refuse_settings(value_of: Callable[[str], Any], refused: Mapping[str, str], method: str) -> None:
    """Raise for the first setting of a table that is on.

    Args:
        value_of: gives the value of a setting by its name, None if it is not set.
        refused: for each setting, why it cannot be used and what to do.
        method: what it cannot be combined with.

    Raises:
        PoSEError: naming the setting, its value, the reason and the fix.
    """
    for key, why in refused.items():
        if value := value_of(key):
            raise PoSEError(f"{key}={value!r} cannot be combined with {method}: {why}")


def divided(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that split rows or projections over devices; None, 0 and 1 leave them whole."""
    return {key: size for key, size in sizes.items() if size not in (None, 0, 1)}


def require_supervised(trainer_class: type, method: str, fix: str) -> None:
    """Check that a trainer reads rows of text: DPOTrainer, RewardTrainer, GRPOTrainer and others of TRL do not.

    Args:
        trainer_class: the trainer's, which may be a subclass of TRL's or Unsloth's copy of it.
        method: what it cannot be combined with.
        fix: what to do.

    Raises:
        PoSEError: naming the trainer's class.
    """
    for each in trainer_class.__mro__:
        name = each.__name__.lstrip("_")
        if each.__module__.split(".")[0] == "trl" or name.startswith("Unsloth"):
            # The first of them decides: GKDTrainer is built on SFTTrainer, but reads prompts.
            if name.removeprefix("Unsloth") in ("SFTTrainer", "BaseTrainer", "Trainer"):
                return
            raise PoSEError(
                f"{trainer_class.__name__} cannot be combined with {method}: its batches hold prompts or pairs of "
                f"answers instead of one text per row. SFTTrainer and transformers' Trainer work. {fix}"
            )


def require_undivided(sizes: Mapping[str, Any], otherwise: str = "") -> None:
    """Check that rows and projections are not split over devices (context, sequence and tensor parallelism).

    Chunks of a row on different devices would not be kept together: neither the mask nor the rule that finds documents
    reaches the other devices. Beacons also need whole projections.

    Args:
        sizes: for each setting, the number of devices.
        otherwise: another fix, for the message.

    Raises:
        PoSEError: a size is above 1.
    """
    for key, size in divided(sizes).items():
        raise PoSEError(
            f"{key}={size} splits rows or projections over devices, so the parts of a document could not attend "
            f"to each other. Set {key}: 1 and use data parallelism or DeepSpeed ZeRO{otherwise}"
        )


def require_rows_fit(sizes: Mapping[str, Any], settings: PoSESettings) -> None:
    """Check context and sequence parallelism against the settings: only plain positions can be split over devices.

    Raises:
        PoSEError: a sampler that skips positions, or an `evaluate:` block, with rows that are split.
    """
    if make_sampler(settings).skips:
        require_undivided(sizes, ". `sampler: none` trains split rows, with plain positions over their whole length")
    for key, size in divided(sizes).items():
        if settings.evaluate is not None:
            raise PoSEError(
                f"{key}={size} splits rows over devices inside a training step only, so an `evaluate:` block would ask "
                "each device for a part of the text. Remove evaluate, and run `pose-plugin evaluate` afterwards"
            )


def require_positions_pass(model: Any) -> None:
    """Check that PEFT gives the model its position_ids: next to prompts that are trained, it leaves them out.

    Raises:
        PoSEError: naming the adapter's type.
    """
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise PoSEError(
                f"peft_type={getattr(adapter.peft_type, 'value', adapter.peft_type)} trains a prompt, and PEFT then "
                "drops position_ids, so no skipped position would reach the model. Use LoRA or train all weights"
            )


def parallel_sizes(trainer: Any, *keys: str) -> dict[str, Any]:
    """Return settings of accelerate's `ParallelismConfig` by name, for `require_undivided`."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return {key: getattr(config, key, None) for key in keys}


def require_window(config: Any, target_length: int) -> None:
    """Check that a model was built for the target.

    Raises:
        PoSEError: its maximum is below the target, or it has none (no rotary positions).
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None or longest < target_length:
        raise PoSEError(
            f"the model ({text.model_type}) has max_position_embeddings={longest}, below target_length="
            f"{target_length}. Build it from extend_context(config, target_length={target_length}, rope='yarn'); "
            "rope='none' keeps the frequencies"
        )


def check_row_length(args: Any, settings: PoSESettings) -> None:
    """Compare the length to which TRL cuts rows with the trained window; log if text would be dropped.

    Args:
        args: TRL's SFTConfig.
        settings: of the collator.

    Raises:
        PoSEError: no row can be as long as the window.
    """
    longest, window = getattr(args, "max_length", None), settings.train_length
    prepared = (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if longest is None or window is None or prepared:
        return
    if longest < window:
        raise PoSEError(
            f"SFTConfig.max_length={longest} cuts rows below train_length={window}, so no row would be as long as the "
            f"trained window. Set max_length={window}, or train_length={longest}"
        )
    if longest > window and settings.content == "contiguous":
        log.warning(
            "rows have up to SFTConfig.max_length=%d tokens, but content=contiguous reads the first train_length=%d of "
            "each document and drops the rest. Set max_length=%d, or content: window, which reads any part",
            longest,
            window,
            window,
        )


def warning_of_no_jumps(settings: PoSESettings) -> str | None:
    """Return a sentence if a sampler that skips positions cannot do so with these settings, else None."""
    sampler, window = make_sampler(settings), settings.train_length
    one_chunk = settings.chunks == 1 and "chunks" in sampler.options()
    no_room = window is not None and (window == 1 or window >= settings.target_length + settings.target_margin)
    if not sampler.skips or not (one_chunk or no_room or settings.unskipped_ratio == 1):
        return None
    if no_room:
        fix = "Lengthen train_length" if window == 1 else "Shorten train_length"
    else:
        fix = "Use chunks: 2" if one_chunk else "Lower unskipped_ratio"
    return (
        f"with chunks={settings.chunks}, unskipped_ratio={settings.unskipped_ratio:g}, target_length="
        f"{settings.target_length}, train_length={window} no document can have a jump: this run trains plain "
        f"positions. {fix}, or set sampler: none"
    )


def require_same_rope(config: Any, settings: PoSESettings) -> None:
    """Check a `rope` that the settings name against the one that the model was built with.

    Raises:
        PoSEError: they differ; a collator's settings change no model.
    """
    asked = settings.rope
    if "rope" not in settings.model_fields_set or asked.type == "none":
        return
    record = lookup(text_config(config), RECORD_KEY) or {}
    live = {**_live_rope(config), "original_length": record.get("original_length")}
    # A model that was built by hand has no record.
    built, wanted = record.get("rope") or live.get("rope_type"), KINDS[asked.type].record or asked.type
    by_hand = not record and asked.type == "base" and built == "default"
    differ = [] if wanted == built or by_hand else [("", asked.type, built)]
    for name in sorted(asked.model_fields_set - {"type"}):
        value, found = getattr(asked, name), live.get("rope_theta" if name == "theta" else name)
        # Some kinds are written in a form that does not name each setting, e.g. as a list.
        if value is not None and found is not None and not math.isclose(value, found, rel_tol=1e-6):
            differ.append((f".{name}", value, found))
    if differ:
        name, value, found = differ[0]
        raise PoSEError(
            f"rope{name}={value}, but the model was built with rope{name}={found}, and the collator changes no "
            f"frequencies. Build the model from extend_context(config, target_length={settings.target_length}, rope="
            f"{asked.model_dump(exclude_unset=True)}), or remove rope from the collator"
        )


def _live_rope(config: Any) -> dict[str, Any]:
    return far_rope(lookup(text_config(config), "rope_parameters"))


def warn_of_other_settings(checkpoint: str, settings: PoSESettings, config: Any) -> None:
    """Log which settings differ between a checkpoint and the run that resumes it.

    Args:
        checkpoint: its folder.
        settings: of the run.
        config: of the run's model.
    """
    before = read_record(checkpoint)
    now = settings.model_dump(mode="json")
    # The rope is the model's, which the settings need not name.
    names = [key for key in now if key not in ("rope", "self_test") and before.get(key, now[key]) != now[key]]
    changes = [f"{key}={before[key]} → {now[key]}" for key in names]
    old, new = far_rope((before.get("model") or {}).get("rope_parameters")), _live_rope(config)
    # A checkpoint has the weights only: its frequencies are not loaded.
    for key in sorted(old.keys() | new.keys()) if old else ():
        if old.get(key) != new.get(key):
            changes.append(f"rope_parameters.{key}={shown(old.get(key))} → {shown(new.get(key))}")
    if changes:
        log.warning("resuming %s with other settings than it was trained with: %s", checkpoint, ", ".join(changes))


# Frozen weights: under an adapter, or by a setting such as Axolotl's unfrozen_parameters.


def frozen_parts(model: Any) -> list[str]:
    """Return which of "embeddings" and "norms" are frozen."""
    found = []
    for part, paths in embeddings_and_norms(model).items():
        weights = [weight for path in paths for weight in model.get_submodule(path).parameters()]
        if weights and not any(each.requires_grad for each in weights):
            found.append(part)
    return found


def warning_of_frozen_parts(model: Any, target_length: int) -> str | None:
    """Return a sentence for the log if a large stretch leaves embeddings or norms frozen, else None.

    Embeddings that are also the output head are not asked for under an adapter, see `warning_of_tied_embeddings`.
    """
    original = original_length(model.config)
    adapter = bool(getattr(model, "peft_config", None))
    tied = adapter and bool(lookup(text_config(model.config), "tie_word_embeddings"))
    frozen = [part for part in frozen_parts(model) if not (tied and part == "embeddings")]
    if not original or not frozen or target_length / original < LARGE_STRETCH:
        return None
    modules = embeddings_and_norms(model)
    names = ", ".join(name for part in frozen for name in last_names(modules[part]))
    fix = (
        f"Add modules_to_save=[{names}] (Axolotl: lora_modules_to_save)"
        if adapter
        else f"Train them too: {names} (Axolotl: add their names to unfrozen_parameters)"
    )
    return (
        f"{'the adapter' if adapter else 'this run'} leaves {' and '.join(frozen)} frozen, and {original} → "
        f"{target_length} tokens is a stretch by {target_length / original:g}: LongLoRA (arXiv 2309.12307) needed them "
        f"trained at 8. {fix}"
    )


def warning_of_tied_embeddings(model: Any) -> str | None:
    """Return a sentence for the log if an adapter trains one of two tied embeddings apart from the other, else None."""
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        trained = trains_embeddings_apart(vars(adapter))
        if trained and lookup(text_config(model.config), "tie_word_embeddings"):
            return (
                f"modules_to_save trains {', '.join(trained)}, which this base ties to its other embedding "
                "(tie_word_embeddings=true); only one of them is trained. Merge with merge_method: legacy (Axolotl) or "
                "load_extended(adapter).merge_and_unload(): Axolotl's default method ties them again. PEFT's "
                "ensure_weight_tying=True trains both as one"
            )
    return None


# Unsloth. Its fused RoPE reads a table of cos and sin without checking where the table ends, it replaces our scaling if
# rows are longer than the model's maximum, and it cuts rows that are longer than `max_seq_length`.


def is_unsloth(model: Any) -> bool:
    """Return whether Unsloth loaded a model: it stores the longest row on it."""
    return "unsloth" in sys.modules and _longest_row(model) is not None


def require_unsloth_fits(model: Any, settings: PoSESettings) -> None:
    """Check that Unsloth's table reaches the farthest position, that it keeps our scaling, and that rows stay whole.

    Raises:
        PoSEError: naming what to load instead.
    """
    config, longest = model.config.get_text_config(), _longest_row(model) or 0
    record = getattr(config, RECORD_KEY, None)
    load = "FastLanguageModel.from_pretrained(extended_base(base, folder, target_length=…), max_seq_length=…)"
    if not record:
        raise PoSEError(
            f"max_seq_length={longest}, but Unsloth loaded a base that was not extended: it uses its own linear "
            f"scaling, or none. Load {load} (from pose_plugin.frameworks.unsloth import extended_base)"
        )
    if longest > record["target_length"]:
        raise PoSEError(
            f"max_seq_length={longest} is above target_length={record['target_length']} of the extended base, so "
            f"Unsloth replaces rope={record['rope']} by its own linear scaling. Load with "
            f"max_seq_length={settings.train_length or record['original_length']}, the trained window"
        )
    if settings.train_length is not None and longest < settings.train_length:
        raise PoSEError(
            f"max_seq_length={longest} is below train_length={settings.train_length}, and Unsloth cuts longer rows. "
            f"Load with max_seq_length={settings.train_length}"
        )
    farthest = settings.target_length + settings.target_margin
    if farthest > config.max_position_embeddings:
        raise PoSEError(
            f"target_length={settings.target_length} with target_margin={settings.target_margin} reaches position "
            f"{farthest - 1}, past Unsloth's table of cos and sin, which ends at max_position_embeddings="
            f"{config.max_position_embeddings}. Set target_margin: 0, or load from "
            f"extended_base(…, target_length={farthest})"
        )


def _longest_row(model: Any) -> int | None:
    # PEFT and accelerate wrap the module that has the attribute.
    return next(
        (m.max_seq_length for m in model.modules() if isinstance(getattr(m, "max_seq_length", None), int)), None
    )
