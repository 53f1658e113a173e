"""Read the config of the base model that a run names, and what the run changes in it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.plan.keys import block
from pose_plugin.rope import rope_overrides
from pose_plugin.rope.apply import merge_overrides
from pose_plugin.rope.read import as_config, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json


def base_config(place: str, name: str) -> dict[str, Any]:
    """Return the dict of a base's config.json, from a folder or from the Hub and its cache.

    Args:
        place: the folder, or the name on the Hub.
        name: as in the YAML, for the message.

    Raises:
        PoSEError: it is not on this machine and cannot be downloaded, or it is not valid JSON.
    """
    from transformers import PretrainedConfig

    if Path(name).is_file():
        raise PoSEError(f"the base {name} is a file; give its folder, {Path(name).parent}")
    file = Path(place) / "config.json"
    if file.is_file():
        return read_json(file)
    try:
        return PretrainedConfig.get_config_dict(place)[0]
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        missing = "" if Path(place).is_dir() else f", which is no folder here{_like(Path(place))}"
        raise PoSEError(
            f"the config.json of {name} cannot be read from {place}{missing}: {reason}. Correct the name, or give a "
            "folder that has it with --base FOLDER; the weights are not needed"
        ) from error


def _like(place: Path) -> str:
    """Return " (did you mean …?)" with a model's folder next to a misspelt one, or ""."""
    names = [file.parent.name for file in place.parent.glob("*/config.json")]
    close = get_close_matches(place.name, names, n=1)
    return f" (did you mean {place.with_name(close[0])}?)" if close else ""


def overrides(cfg: Mapping[str, Any], config: Mapping[str, Any], settings: PoSESettings | None) -> dict[str, Any]:
    """Return what `overrides_of_model_config` changes in the base's config.

    Raises:
        PoSEError: it contradicts the `pose:` block, as in the run.
    """
    theirs = dict(block(cfg, "overrides_of_model_config"))
    if settings is None or not theirs:
        return theirs
    ours = rope_overrides(text_config(as_config(config)), settings.target_length, settings.rope)
    merged = merge_overrides(ours, theirs)
    return {key: value for key, value in merged.items() if key not in ours}
