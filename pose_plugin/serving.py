"""The saved folder: what it must hold so that it reloads, anywhere, to the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings

RECORD = "pose.json"


def complete_folder(folder: str | Path, config: Any, settings: PoSESettings) -> None:
    """Writes beside saved weights what frameworks leave out.

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
    tokenizer = path / "tokenizer_config.json"
    if tokenizer.exists():
        values = json.loads(tokenizer.read_text(encoding="utf-8"))
        if int(values.get("model_max_length", 0)) < settings.target_length:
            values["model_max_length"] = settings.target_length
            _write(tokenizer, values)
    _write(path / RECORD, settings.model_dump(mode="json"))


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
