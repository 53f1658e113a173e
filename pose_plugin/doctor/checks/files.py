"""Checks of the other files: damage, smaller windows that they state, adapters and their bases, and pose.json."""

from __future__ import annotations

from collections.abc import Iterator

from pose_plugin.checkpoints.lengths import GENERATION, TOKENIZER
from pose_plugin.checkpoints.saved import ADAPTER, NO_LIMIT, RECORD
from pose_plugin.doctor.checks.rope import trained_window
from pose_plugin.doctor.folder import CONFIG, REMOVED, Folder, Problem, problem, whole
from pose_plugin.rope.read import LENGTH_KEYS


def damaged_files(folder: Folder) -> Iterator[Problem]:
    for name, reason in folder.damaged.items():
        happens = f"no reader can load it ({reason})"
        yield problem("damaged file", name, "", happens, "Save or download it again", "error")
    if CONFIG not in (*folder.files, *folder.damaged) and not folder.is_adapter:
        yield problem(
            "no config",
            "config.json",
            None,
            "without it and adapter_config.json no reader knows what the folder holds",
            "Name the folder that has config.json or adapter_config.json",
            "error",
        )


def other_windows(folder: Folder) -> Iterator[Problem]:
    """Other keys of config.json state a smaller window."""
    for key in LENGTH_KEYS:
        value = whole(folder.text.get(key))
        if value and folder.maximum and value < folder.maximum and folder.kind in ("default", "yarn"):
            yield problem(
                "second window",
                key,
                value,
                f"engines take the smaller of it and max_position_embeddings={folder.maximum}",
                f"Write {folder.maximum}, or remove it",
                "warning",
                {CONFIG: {folder.place(key): folder.maximum}},
            )


def tokenizer_limit(folder: Folder) -> Iterator[Problem]:
    """The tokenizer's limit is below the window."""
    limit = whole(folder.files.get(TOKENIZER, {}).get("model_max_length"))
    if limit and folder.maximum and limit < min(folder.maximum, NO_LIMIT) and CONFIG in folder.files:
        yield problem(
            "tokenizer limit",
            "model_max_length",
            limit,
            f"tokenizers warn or cut at {limit} tokens, and some engines take it as the window, which is "
            f"{folder.maximum}",
            f"Write {folder.maximum} into tokenizer_config.json",
            "warning",
            {TOKENIZER: {("model_max_length",): folder.maximum}} if _maximum_is_sure(folder) else {},
        )


def _maximum_is_sure(folder: Folder) -> bool:
    """Return whether the maximum is the trained window. Without a witness, the tokenizer may be right instead."""
    if trained_window(folder):
        return False
    return RECORD in folder.files or folder.base is not None or folder.reached == folder.maximum


def generation_limit(folder: Folder) -> Iterator[Problem]:
    """generation_config.json ends generation inside the window."""
    limit = whole(folder.files.get(GENERATION, {}).get("max_length"))
    # 20 is the default of transformers, which it treats as not set.
    if limit and limit != 20 and folder.maximum and limit < folder.maximum:
        yield problem(
            "generation limit",
            "max_length",
            limit,
            f"generate() ends at {limit} tokens with the prompt, and raises for longer prompts; the window is "
            f"{folder.maximum}",
            "Remove it from generation_config.json, and pass max_new_tokens",
            "warning",
            {GENERATION: {("max_length",): REMOVED}},
        )


def adapter(folder: Folder) -> Iterator[Problem]:
    """What an adapter needs from its base, and what engines do not load."""
    values = folder.files.get(ADAPTER)
    if values is None:
        return
    if values.get("use_dora"):
        yield problem(
            "DoRA",
            "use_dora",
            True,
            "vLLM and SGLang do not serve DoRA adapters",
            "Merge it into its base before serving",
        )
    saved = values.get("modules_to_save") or []
    if (
        folder.base
        and folder.base.text.get("tie_word_embeddings")
        and "embed_tokens" in saved
        and "lm_head" not in saved
    ):
        yield problem(
            "tied embeddings trained",
            "modules_to_save",
            saved,
            "the base ties its embeddings to lm_head, so a merge must copy the trained embeddings to both; "
            "`axolotl merge-lora` by its default method does not",
            "Merge with merge_method: legacy, then compare the merged model with the adapter: pose-plugin check",
        )
    yield from _adapter_rope(folder)


def _adapter_rope(folder: Folder) -> Iterator[Problem]:
    base = folder.base
    limit = whole(folder.files.get(TOKENIZER, {}).get("model_max_length"))
    if CONFIG not in folder.files:
        if base and limit and base.maximum and base.maximum < limit < NO_LIMIT:
            yield problem(
                "adapter without its config",
                "config.json",
                None,
                f"the tokenizer was saved for {limit} tokens, and the base's config ends at {base.maximum}: loaded on "
                "it, the adapter runs with frequencies that it was not trained with",
                "Copy the config.json of the trained model into the adapter's folder, and load the base with it",
                "error",
            )
        else:
            named = folder.files[ADAPTER].get("base_model_name_or_path") or "its base"
            window = f", up to {base.maximum} tokens" if base and base.maximum else ""
            yield problem(
                "adapter without its config",
                "config.json",
                None,
                f"PEFT and engines run it with the rope of {named}{window}; the folder does not say whether it was "
                "trained with that",
                "If it was trained with another rope, copy the trained model's config.json here. Look at the base "
                f"too: pose-plugin doctor {named}",
                "info",
            )
        return
    if base and (base.rope != folder.rope or base.maximum != folder.maximum):
        key = next((k for k in ("rope_type", "factor", "rope_theta") if base.rope.get(k) != folder.rope.get(k)), None)
        yield problem(
            "base without the adapter's rope",
            key or "max_position_embeddings",
            folder.rope.get(key) if key else folder.maximum,
            f"the base's own config has {base.rope.get(key) if key else base.maximum}, and PEFT and engines load the "
            "base with that",
            "Load the base with the adapter's config.json (load_extended does), or pass the engine these overrides: "
            "pose-plugin export",
        )


def record(folder: Folder) -> Iterator[Problem]:
    """pose.json and config.json disagree, or nothing was trained."""
    values = folder.files.get(RECORD)
    if values is None or CONFIG not in folder.files:
        return
    target, margin = whole(values.get("target_length")), whole(values.get("target_margin")) or 0
    noted = folder.text.get("pose_plugin")
    # `rope: none` keeps a window that is longer than the target.
    built = (whole(noted.get("target_length")) if isinstance(noted, dict) else None) or folder.maximum
    if target and folder.maximum and built and (folder.maximum < target or not target <= built <= target + margin):
        yield problem(
            "record and config differ",
            "target_length",
            target,
            f"pose.json says that this window was trained, and config.json has {folder.maximum}",
            "Write the trained window into config.json",
            "error",
        )
    trained = values.get("trained")
    if isinstance(trained, dict) and trained.get("steps") == 0:
        yield problem(
            "nothing trained",
            "steps",
            0,
            "pose.json records no training step, so the weights are the base's",
            "Look at the log of the run for the reason, and train again",
        )
