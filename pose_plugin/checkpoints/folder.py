"""Complete a saved folder, so that it reloads anywhere to the model that was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import is_adapter
from pose_plugin.checkpoints.probe import write_probe
from pose_plugin.config import PoSESettings
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json, write_json

RECORD = "pose.json"


def complete_folder(
    folder: str | Path,
    config: Any,
    settings: PoSESettings,
    tokenizer: bool = True,
    *,
    facts: Mapping[str, Any] | None = None,
    probe: Mapping[str, Any] | None = None,
) -> None:
    """Add to saved weights what frameworks leave out.

    - `config.json`: the rope also in the form of older readers (transformers 4, llama.cpp's converter, older vLLM),
      which would otherwise see no extension. An adapter gets the extended config of its base.
    - `tokenizer_config.json`: the new maximum.
    - `pose.json`: what was trained.
    - `pose_probe.json`: answers of the trained model, which `pose-plugin check` compares with a reload.

    Args:
        folder: a saved model or adapter; left alone if it holds neither.
        config: the config of the (base) model that was trained.
        settings: what was trained.
        tokenizer: False leaves the tokenizer's files alone.
        facts: more for the record, see record.py.
        probe: see `take_probe`; without one, the probe of an earlier save is removed.
    """
    path = Path(folder)
    adapter = is_adapter(path)
    if not adapter and not (path / "config.json").exists():
        return
    if adapter:
        config.save_pretrained(path)
        _without_quantization(path / "config.json")
    for_older_readers(path / "config.json")
    if tokenizer:
        raise_limit(path, settings.target_length)
    record = settings.model_dump(mode="json")
    text = config.get_text_config()
    built = (getattr(text, "pose_plugin", None) or {}).get("rope")
    if built is not None and built != settings.rope.type:
        # Outside Axolotl the user builds the model, perhaps with another rope than these settings: the model counts.
        record["rope"] = {"type": built}
        if built == "base" and "rope_theta" in text.rope_parameters:
            record["rope"]["theta"] = text.rope_parameters["rope_theta"]
    write_json(path / RECORD, record | dict(facts or {}))
    write_probe(path, probe)


def read_record(folder: str | Path) -> dict[str, Any]:
    """Return what `complete_folder` recorded in a folder; {} without a record.

    Raises:
        PoSEError: the record is damaged.
    """
    file = Path(folder) / RECORD
    if not file.exists():
        return {}
    record = read_json(file)
    target = record.get("target_length")
    if not isinstance(target, int) or target < 1:
        raise PoSEError(f"{file}: target_length={target!r} must be a number of tokens (≥ 1); save the folder again")
    return record


def raise_limit(folder: Path, target_length: int) -> None:
    """Raise the tokenizer's model_max_length to the target, if the folder has a tokenizer."""
    file = folder / "tokenizer_config.json"
    if file.is_file():
        values = read_json(file)
        if int(values.get("model_max_length", 0)) < target_length:
            write_json(file, values | {"model_max_length": target_length})


def for_older_readers(file: Path) -> None:
    """Add the form of the rope that transformers 4 knows to a config.json, at the top or in its text part."""
    values = read_json(file)
    text = text_part(values)
    if text is not None and text.get("rope_parameters"):
        text.update(legacy_copies(text["rope_parameters"], text["model_type"]))
        write_json(file, values)


def text_part(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a config.json that holds the rope."""
    text = values.get("text_config") if "rope_parameters" not in values else values
    return text if isinstance(text, dict) else None


def _without_quantization(file: Path) -> None:
    # A base that was loaded in 4 bits for training may serve in bf16.
    values = read_json(file)
    if values.pop("quantization_config", None) is not None:
        write_json(file, values)
