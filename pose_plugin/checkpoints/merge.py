"""Complete a merged model: its weights are right, but everything around them was copied from the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.folder import for_older_readers
from pose_plugin.checkpoints.lengths import raise_config, raise_limits
from pose_plugin.checkpoints.probe import read_probe, stage_probe
from pose_plugin.checkpoints.saved import RECORD, Saved, is_adapter, read_record, text_part
from pose_plugin.rope.read import RECORD_KEY
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.files import read_json, staged

# What a config.json holds about positions, in all spellings.
_ROPE_KEYS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rotary_emb_base",
    "rotary_pct",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "original_max_position_embeddings",
    "max_position_embeddings",
    RECORD_KEY,
)
# A merge changes none of these.
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt", "*.model")


# The names of input and output embeddings in common families.
_EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "lm_head", "embed_out"}


def trains_embeddings_apart(adapter: Mapping[str, Any]) -> list[str]:
    """Return the embeddings that an adapter trains as whole modules, each apart from the one it may be tied to.

    Args:
        adapter: the values of adapter_config.json, or of facts about an adapter.
    """
    if adapter.get("ensure_weight_tying"):
        return []
    return [name for name in adapter.get("modules_to_save") or [] if name.rsplit(".", 1)[-1] in _EMBEDDINGS]


def embeddings_came_apart(merged: Saved, reference: Saved) -> str | None:
    """Return why a merged model answers otherwise than its adapter, if it ties embeddings that were trained apart.

    Args:
        merged: the merged model.
        reference: the folder of its adapter, or its own if it has the adapter's record.
    """
    facts = reference.adapter or (reference.record.adapter if reference.record else None)
    if merged.adapter is not None or facts is None:
        return None
    trained = trains_embeddings_apart(facts.model_dump())
    if not trained or not is_tied(merged.path):
        return None
    return (
        f"the adapter trained {', '.join(trained)} of a base with tie_word_embeddings=true. Input and output "
        "embeddings differ since then, and this merged model ties them again. Merge with merge_method: legacy "
        "(Axolotl), or with pose_plugin.load_extended(adapter).merge_and_unload()"
    )


def is_tied(folder: str | Path) -> bool:
    """Return whether the model in a folder has one table for input and output embeddings."""
    from transformers import AutoConfig

    # Not read from the file: it leaves out what is the default of the model's class.
    config = AutoConfig.from_pretrained(folder)
    return bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings)


def complete_merged(folder: str | Path, adapter: str | Path) -> None:
    """Give a merged model the config, limits, record and probe of its adapter's folder; all files change together.

    Only the keys of the rope and the lengths change; all others stay as the merge wrote them.

    Args:
        folder: of the merged model (Axolotl's merge-lora, PEFT's merge_and_unload and save_pretrained).
        adapter: the folder that the adapter was saved in.

    Raises:
        PoSEError: one of the two is something else.
    """
    path, source = Path(folder), Saved(Path(adapter))
    record = read_record(adapter)
    if not record or source.config is None:
        raise PoSEError(f"{adapter} has no {RECORD} or no config.json with rope_parameters; name the adapter's folder")
    if is_adapter(path) or not (path / "config.json").is_file():
        raise PoSEError(f"{path} does not hold a merged model (a config.json and no adapter_config.json)")
    if why := embeddings_came_apart(Saved(path), source):
        raise PoSEError(f"{path} is not the trained model: {why}")
    wanted, values = source.text, read_json(path / "config.json")
    text = text_part(values)
    for key in _SHAPE:
        if None not in (text.get(key), wanted.get(key)) and text[key] != wanted[key]:
            raise PoSEError(
                f"{path} is not {adapter} merged: its config.json has {key}={shown(text[key])}, and the adapter's has "
                f"{shown(wanted[key])}"
            )
    for key in _ROPE_KEYS:
        text.pop(key, None)
        if key in wanted:
            text[key] = wanted[key]
    # Some kinds cannot be read if the base leaves it null.
    if text.get("head_dim", 0) is None and wanted.get("head_dim"):
        text["head_dim"] = wanted["head_dim"]
    for_older_readers(values)
    window = raise_config(text, int(record["target_length"]))
    with staged(path) as stage:
        stage.write_json("config.json", values)
        if not (path / "tokenizer_config.json").is_file():
            for pattern in _TOKENIZER:
                for file in sorted(source.path.glob(pattern)):
                    stage.copy(file, file.name)
        raise_limits(stage, window)
        stage_probe(stage, read_probe(adapter))
        stage.write_json(RECORD, record | {"merged": True})
