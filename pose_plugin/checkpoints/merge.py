"""A merged model: the weights are right, and what surrounds them was copied from the base."""

from __future__ import annotations

import shutil
from pathlib import Path

from pose_plugin.checkpoints.adapter import is_adapter
from pose_plugin.checkpoints.folder import RECORD, for_older_readers, read_record, text_part
from pose_plugin.checkpoints.probe import PROBE, read_probe, write_probe
from pose_plugin.rope.read import RECORD_KEY
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json, write_json

# What a config.json says about positions, in all spellings.
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
    """Gives a merged model what its adapter's folder knows: config, tokenizer and its limit, record, probe and
    card.

    Only the keys of the rope and the maximum are touched; all others stay as the merge has written them.

    Args:
        folder: of the merged model (Axolotl's merge-lora, PEFT's merge_and_unload and save_pretrained).
        adapter: the folder that the adapter was saved in.

    Raises:
        PoSEError: one of the two is not what it should be.
    """
    path, source = Path(folder), Path(adapter)
    record = read_record(source)
    if "target_length" not in record or not (source / "config.json").is_file():
        raise PoSEError(f"{source} has no {RECORD} and config.json, so it does not know what was trained")
    if is_adapter(path) or not (path / "config.json").is_file():
        raise PoSEError(f"{path} holds no merged model (a config.json, and no adapter_config.json)")
    wanted = text_part(read_json(source / "config.json"))
    values = read_json(path / "config.json")
    text = values if not isinstance(values.get("text_config"), dict) else values["text_config"]
    if wanted is None:
        raise PoSEError(f"{source}/config.json has no rope_parameters")
    for key in _ROPE_KEYS:
        text.pop(key, None)
        if key in wanted:
            text[key] = wanted[key]
    # Some kinds cannot be read where the base leaves it null.
    if text.get("head_dim", 0) is None and wanted.get("head_dim"):
        text["head_dim"] = wanted["head_dim"]
    write_json(path / "config.json", values)
    for_older_readers(path / "config.json")
    if not (path / "tokenizer_config.json").is_file():
        for pattern in _TOKENIZER:
            for file in source.glob(pattern):
                shutil.copy2(file, path / file.name)
    _raise_limit(path / "tokenizer_config.json", int(record["target_length"]))
    write_json(path / RECORD, record | {"merged": True})
    probe = read_probe(source)
    if probe is not None:
        write_probe(path, probe)
    else:
        (path / PROBE).unlink(missing_ok=True)


def _raise_limit(file: Path, target_length: int) -> None:
    if not file.is_file():
        return
    values = read_json(file)
    if int(values.get("model_max_length", 0)) < target_length:
        values["model_max_length"] = target_length
        write_json(file, values)
