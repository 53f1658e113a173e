"""The saved folder: what it must hold so that it reloads, anywhere, to the model that was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import is_adapter
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
    """Writes beside saved weights what frameworks leave out.

    transformers 5 writes the rope in its own form only; older readers (transformers 4, llama.cpp's converter, older
    vLLM) would see no extension, so the form they know is put beside it.
    An adapter alone does not carry the frequencies it was trained with: the extended config is put beside it.
    The tokenizer learns the new maximum, `pose.json` records what was trained, and `pose_probe.json` what the trained
    model answered, which `pose-plugin check` compares with a reload.

    Args:
        folder: a saved model or adapter; left alone where it holds neither.
        config: the config of the (base) model that was trained.
        settings: what was trained.
        tokenizer: False leaves the tokenizer's files alone.
        facts: more for the record, see `serving.record`.
        probe: see `take_probe`; without one a probe of an earlier save is removed.
    """
    from pose_plugin.checkpoints.probe import PROBE, write_probe

    path = Path(folder)
    adapter = is_adapter(path)
    if not adapter and not (path / "config.json").exists():
        return
    if adapter:
        config.save_pretrained(path)
        _without_quantization(path / "config.json")
    for_older_readers(path / "config.json")
    file = path / "tokenizer_config.json"
    if tokenizer and file.exists():
        values = read_json(file)
        if int(values.get("model_max_length", 0)) < settings.target_length:
            values["model_max_length"] = settings.target_length
            write_json(file, values)
    record = settings.model_dump(mode="json")
    text = config.get_text_config()
    built = (getattr(text, "pose_plugin", None) or {}).get("rope")
    if built is not None and built != settings.rope.type:
        # Without the door of Axolotl the model is built apart from these settings, and it is the model that counts.
        record["rope"] = {"type": built}
        if built == "base" and "rope_theta" in text.rope_parameters:
            record["rope"]["theta"] = text.rope_parameters["rope_theta"]
    write_json(path / RECORD, record | dict(facts or {}))
    if probe is not None:
        write_probe(path, probe)
    else:
        # What an earlier model answered is no reference for this one.
        (path / PROBE).unlink(missing_ok=True)


def read_record(folder: str | Path) -> dict[str, Any]:
    """What `complete_folder` recorded in a folder; empty where it did not.

    Raises:
        PoSEError: a record that is none.
    """
    file = Path(folder) / RECORD
    if not file.exists():
        return {}
    record = read_json(file)
    target = record.get("target_length")
    if not isinstance(target, int) or target < 1:
        raise PoSEError(f"{file}: target_length={target!r} is no number of tokens (≥ 1); save the folder again")
    return record


def for_older_readers(file: Path) -> None:
    """Puts the form of the rope that transformers 4 knows into a config.json, at the top or in its text part."""
    values = read_json(file)
    text = text_part(values)
    if text is not None and text.get("rope_parameters"):
        text.update(legacy_copies(text["rope_parameters"], text["model_type"]))
        write_json(file, values)


def text_part(values: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a config.json that holds the rope."""
    text = values.get("text_config") if "rope_parameters" not in values else values
    return text if isinstance(text, dict) else None


def _without_quantization(file: Path) -> None:
    """How the base was loaded for training is not how it must be loaded: a 4-bit base may serve in bf16."""
    values = read_json(file)
    if values.pop("quantization_config", None) is not None:
        write_json(file, values)
