"""The saved folder: what it must hold so that it reloads, anywhere, to the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.rope import legacy_copies

RECORD = "pose.json"


def complete_folder(folder: str | Path, config: Any, settings: PoSESettings) -> None:
    """Writes beside saved weights what frameworks leave out.

    transformers 5 writes the rope in its own form only; older readers (transformers 4, llama.cpp's converter, older
    vLLM) would see no extension, so the form they know is put beside it.
    An adapter alone does not carry the frequencies it was trained with: the extended config is put beside it.
    The tokenizer learns the new maximum, and `pose.json` records what was trained.

    Args:
        folder: a saved model or adapter; left alone where it holds neither.
        config: the config of the (base) model that was trained.
        settings: what was trained.
    """
    path = Path(folder)
    adapter = (path / "adapter_config.json").exists()
    if not adapter and not (path / "config.json").exists():
        return
    if adapter:
        config.save_pretrained(path)
    _for_older_readers(path / "config.json")
    tokenizer = path / "tokenizer_config.json"
    if tokenizer.exists():
        values = json.loads(tokenizer.read_text(encoding="utf-8"))
        if int(values.get("model_max_length", 0)) < settings.target_length:
            values["model_max_length"] = settings.target_length
            _write(tokenizer, values)
    _write(path / RECORD, settings.model_dump(mode="json"))


def _for_older_readers(file: Path) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    text = values.get("text_config") if "rope_parameters" not in values else values
    if isinstance(text, dict) and text.get("rope_parameters"):
        text.update(legacy_copies(text["rope_parameters"], text["model_type"]))
        _write(file, values)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
