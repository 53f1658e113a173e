"""The saved folder: what it must hold so that it reloads, anywhere, to the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.rope import legacy_copies

RECORD = "pose.json"


def complete_folder(folder: str | Path, config: Any, settings: PoSESettings, tokenizer: bool = True) -> None:
    """Writes beside saved weights what frameworks leave out.

    transformers 5 writes the rope in its own form only; older readers (transformers 4, llama.cpp's converter, older
    vLLM) would see no extension, so the form they know is put beside it.
    An adapter alone does not carry the frequencies it was trained with: the extended config is put beside it.
    The tokenizer learns the new maximum, and `pose.json` records what was trained.

    Args:
        folder: a saved model or adapter; left alone where it holds neither.
        config: the config of the (base) model that was trained.
        settings: what was trained.
        tokenizer: False leaves the tokenizer's files alone.
    """
    path = Path(folder)
    adapter = (path / "adapter_config.json").exists()
    if not adapter and not (path / "config.json").exists():
        return
    if adapter:
        config.save_pretrained(path)
        _without_quantization(path / "config.json")
    _for_older_readers(path / "config.json")
    file = path / "tokenizer_config.json"
    if tokenizer and file.exists():
        values = json.loads(file.read_text(encoding="utf-8"))
        if int(values.get("model_max_length", 0)) < settings.target_length:
            values["model_max_length"] = settings.target_length
            _write(file, values)
    record = settings.model_dump(mode="json")
    text = config.get_text_config()
    built = (getattr(text, "pose_plugin", None) or {}).get("rope")
    if built is not None and built != settings.rope.type:
        # Without the door of Axolotl the model is built apart from these settings, and it is the model that counts.
        record["rope"] = {"type": built}
        if built == "base" and "rope_theta" in text.rope_parameters:
            record["rope"]["theta"] = text.rope_parameters["rope_theta"]
    _write(path / RECORD, record)


def read_record(folder: str | Path) -> dict[str, Any]:
    """What `complete_folder` recorded in a folder; empty where it did not."""
    file = Path(folder) / RECORD
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _without_quantization(file: Path) -> None:
    """How the base was loaded for training is not how it must be loaded: a 4-bit base may serve in bf16."""
    values = json.loads(file.read_text(encoding="utf-8"))
    if values.pop("quantization_config", None) is not None:
        _write(file, values)


def _for_older_readers(file: Path) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    text = values.get("text_config") if "rope_parameters" not in values else values
    if isinstance(text, dict) and text.get("rope_parameters"):
        text.update(legacy_copies(text["rope_parameters"], text["model_type"]))
        _write(file, values)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
