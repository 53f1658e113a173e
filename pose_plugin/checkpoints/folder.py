"""Complete a saved folder, so that it reloads anywhere to the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.lengths import raise_config, raise_limits
from pose_plugin.checkpoints.probe import stage_probe
from pose_plugin.checkpoints.saved import RECORD, is_adapter, text_part
from pose_plugin.config import PoSESettings
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.files import read_json, staged


def complete_folder(
    folder: str | Path,
    config: Any,
    settings: PoSESettings,
    tokenizer: bool = True,
    *,
    facts: Mapping[str, Any] | None = None,
    probe: Mapping[str, Any] | None = None,
    stored_quantised: bool = False,
) -> None:
    """Add to saved weights what frameworks leave out; all files are replaced together.

    - `config.json`: the rope also in the form of older readers (transformers 4, llama.cpp's converter, older vLLM),
      which would otherwise see no extension. An adapter gets the extended config of its base.
    - `tokenizer_config.json`, `generation_config.json`: the new maximum.
    - `pose.json`: what was trained.
    - `pose_probe.json`: answers of the trained model, which `pose-plugin check` compares with a reload.

    Args:
        folder: a saved model or adapter; left alone if it holds neither.
        config: the config of the (base) model that was trained.
        settings: what was trained.
        tokenizer: False leaves the tokenizer's files alone.
        facts: more for the record, see record.py.
        probe: see `take_probe`; without one, the probe of an earlier save is removed.
        stored_quantised: whether the files of an adapter's base hold quantised weights.
    """
    path = Path(folder)
    adapter = is_adapter(path)
    if not adapter and not (path / "config.json").exists():
        return
    values = json.loads(config.to_json_string()) if adapter else read_json(path / "config.json")
    if adapter and not stored_quantised:
        # A base that was loaded in 4 bits for training may serve in bf16. Weights that are stored so cannot.
        values.pop("quantization_config", None)
    for_older_readers(values)
    window = raise_config(text_part(values), settings.target_length)
    with staged(path) as stage:
        stage.write_json("config.json", values)
        raise_limits(stage, window, tokenizer)
        stage_probe(stage, probe)
        stage.write_json(RECORD, _record(config, settings) | dict(facts or {}))


def _record(config: Any, settings: PoSESettings) -> dict[str, Any]:
    record = settings.model_dump(mode="json")
    text = config.get_text_config()
    built = (getattr(text, "pose_plugin", None) or {}).get("rope")
    if built is not None and built != settings.rope.type:
        # Outside Axolotl the user builds the model, perhaps with another rope than these settings: the model counts.
        record["rope"] = {"type": built}
        if built == "base" and "rope_theta" in text.rope_parameters:
            record["rope"]["theta"] = text.rope_parameters["rope_theta"]
    return record


def for_older_readers(values: dict[str, Any]) -> None:
    """Add the form of the rope that transformers 4 knows to a config.json's values, at the top or in its text part."""
    text = text_part(values)
    if text.get("rope_parameters"):
        text.update(legacy_copies(text["rope_parameters"], text["model_type"]))
