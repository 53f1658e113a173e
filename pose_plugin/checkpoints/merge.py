"""Complete a merged model: its weights are right, but everything around them was copied from the base."""

from __future__ import annotations

import shutil
from pathlib import Path

from pose_plugin.checkpoints.adapter import is_adapter
from pose_plugin.checkpoints.folder import RECORD, for_older_readers, raise_limit, read_record, text_part
from pose_plugin.checkpoints.probe import read_probe, write_probe
from pose_plugin.rope.read import RECORD_KEY
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json, write_json

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
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt", "*.model")


def complete_merged(folder: str | Path, adapter: str | Path) -> None:
    """Give a merged model the config, tokenizer limit, record and probe of its adapter's folder.

    Only the keys of the rope and the maximum change; all others stay as the merge wrote them.

    Args:
        folder: of the merged model (Axolotl's merge-lora, PEFT's merge_and_unload and save_pretrained).
        adapter: the folder that the adapter was saved in.

    Raises:
        PoSEError: one of the two is something else.
    """
    path, source = Path(folder), Path(adapter)
    record = read_record(source)
    wanted = text_part(read_json(source / "config.json")) if (source / "config.json").is_file() else None
    if "target_length" not in record or wanted is None:
        raise PoSEError(f"{source} has no {RECORD} or no config.json with rope_parameters; name the adapter's folder")
    if is_adapter(path) or not (path / "config.json").is_file():
        raise PoSEError(f"{path} does not hold a merged model (a config.json and no adapter_config.json)")
    values = read_json(path / "config.json")
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    for key in _ROPE_KEYS:
        text.pop(key, None)
        if key in wanted:
            text[key] = wanted[key]
    # Some kinds cannot be read if the base leaves it null.
    if text.get("head_dim", 0) is None and wanted.get("head_dim"):
        text["head_dim"] = wanted["head_dim"]
    write_json(path / "config.json", values)
    for_older_readers(path / "config.json")
    if not (path / "tokenizer_config.json").is_file():
        for pattern in _TOKENIZER:
            for file in source.glob(pattern):
                shutil.copy2(file, path / file.name)
    raise_limit(path, int(record["target_length"]))
    write_json(path / RECORD, record | {"merged": True})
    write_probe(path, read_probe(source))
