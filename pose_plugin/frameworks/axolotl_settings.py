"""What a `pose:` block and the rest of an Axolotl YAML ask for together.

Nothing of Axolotl is imported, as `pose-plugin plan` reads this too: it refuses and warns as the run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.evaluation.settings import checked
from pose_plugin.training.checks import refuse_settings, require_rows_fit
from pose_plugin.utils.errors import PoSEError

_BUILT_IN = "it belongs to Axolotl's built-in use_pose. Remove it; use pose.target_length and pose.chunks"
_REWARDS = "reward trainers have their own collators"
_REFUSED = {
    "use_pose": _BUILT_IN,
    "pose_split_on_token_ids": _BUILT_IN,
    "pose_max_context_len": _BUILT_IN,
    "pose_num_chunks": _BUILT_IN,
    "pretraining_dataset": "streamed rows get Axolotl's own collator. Use `datasets:` with type: completion",
    "rl": "preference and RL trainers have their own collators. Extend the window by supervised training first",
    "reward_model": _REWARDS,
    "process_reward_model": _REWARDS,
    "processor_type": "multimodal rows have 3-D positions. Train the text model",
}


def settings_of(cfg: Any) -> PoSESettings:
    """Return the `pose:` block with what follows from the rest of the YAML.

    Raises:
        PoSEError: naming the key, its value and the fix.
    """
    block = plain(cfg.get("pose"))
    sequence_len = cfg.get("sequence_len")
    if isinstance(block, dict) and block.get("train_length") is None and sequence_len:
        content = block.get("content", "contiguous")
        if content in ("window", "skip", "aligned"):
            raise PoSEError(
                f"pose.content={content} takes a window out of longer documents, but without pose.train_length the "
                f"window is sequence_len={sequence_len}, a whole row. Set pose.train_length to the window and "
                "sequence_len to the length of the documents"
            )
        block = {**block, "train_length": int(sequence_len)}
    settings = checked(parse_settings(block))
    if settings.content != "contiguous" and sequence_len and settings.train_length == sequence_len:
        raise PoSEError(
            f"pose.content={settings.content} has no effect with pose.train_length=sequence_len={sequence_len}: no "
            "row is longer than the window. Raise sequence_len to the documents' length, or set content: contiguous"
        )
    return settings


def require_compatible(cfg: Any, settings: PoSESettings) -> None:
    """Raise for keys of the YAML that cannot be combined with a `pose:` block."""
    refuse_settings(cfg.get, _REFUSED, "`pose:`")
    require_rows_fit({key: cfg.get(key) for key in ("context_parallel_size", "sequence_parallel_degree")}, settings)
    if cfg.get("streaming") and cfg.get("sample_packing"):
        raise PoSEError(
            "streaming=True with sample_packing=True: rows that are packed while they are read do not say where "
            "documents end, so each row would be trained as one. Set sample_packing: false, or streaming: false"
        )
    window, row = settings.train_length, cfg.get("sequence_len")
    if window and row and window > row:
        raise PoSEError(
            f"pose.train_length={window} is longer than sequence_len={row}, the longest row. Lower it, or raise "
            "sequence_len"
        )


def likely_mistakes(cfg: Any, settings: PoSESettings) -> list[str]:
    """Return a sentence for each combination that runs, but does less than its user may expect."""
    window, row = settings.train_length, cfg.get("sequence_len")
    shorter = bool(window and row and window < row)
    judged_key, judged = evaluated_length(cfg) or ("", None)
    size, micro = cfg.get("batch_size"), cfg.get("micro_batch_size") or 1
    fsdp, saved = cfg.get("fsdp_config") or cfg.get("fsdp_version"), cfg.get("lora_modules_to_save")
    warnings = [
        (
            fsdp and cfg.get("adapter") and saved,
            f"lora_modules_to_save={saved} under FSDP2: Axolotl 0.19 and 0.21 raise a KeyError when they save, after "
            "the training. Use DeepSpeed ZeRO-3 (deepspeed: …/zero3.json), or remove lora_modules_to_save",
        ),
        (
            shorter and settings.content == "contiguous",
            f"pose.content=contiguous reads only the first pose.train_length={window} tokens of each row, and rows "
            f"have up to sequence_len={row}. content: window or skip reads all of it",
        ),
        (
            shorter and cfg.get("sample_packing"),
            f"sample_packing fills rows of sequence_len={row} with whole documents, and each is then cut to "
            f"pose.train_length={window}, so rows become shorter and differ in length. Set sample_packing: false",
        ),
        (
            size and size != micro and "gradient_accumulation_steps" not in cfg,
            f"batch_size={size} without gradient_accumulation_steps: Axolotl 0.19 and 0.21 accumulate no batches, but "
            f"make as few steps as if they did, so they read only {micro} of every {size} rows. Replace batch_size by "
            "gradient_accumulation_steps, the number of batches per step",
        ),
        (
            cfg.get("batch_flattening"),
            f"batch_flattening={cfg.get('batch_flattening')} has no effect with `pose:`, whose collator pads the rows "
            "of a batch. Use sample_packing: true",
        ),
        (
            judged and judged > settings.target_length,
            f"evaluation rows of up to {judged_key}={judged} tokens are longer than pose.target_length="
            f"{settings.target_length}. Use shorter rows in test_datasets, or raise the target",
        ),
    ]
    return [text for applies, text in warnings if applies]


def evaluated_length(cfg: Any) -> tuple[str, int | None] | None:
    """Return the key and the value of the longest evaluation row, None if the run does not evaluate."""
    if not (cfg.get("test_datasets") or cfg.get("val_set_size")):
        return None
    # Axolotl cuts rows that it splits off the training data to sequence_len.
    key = "eval_sequence_len" if cfg.get("test_datasets") and cfg.get("eval_sequence_len") else "sequence_len"
    return key, cfg.get(key)


def plain(value: Any) -> Any:
    """Return plain dicts and lists: a missing key of Axolotl's DictDefault is None, not a KeyError."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
