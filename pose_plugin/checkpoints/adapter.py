"""Which base model an adapter belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Base:
    """Where the base's weights are: a folder or a name on the hub, and there a revision."""

    name: str
    revision: str | None = None


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / ADAPTER).is_file()


def is_beacons(folder: str | Path) -> bool:
    """An Activation Beacon adapter: it leaves the model's window as it is."""
    return is_adapter(folder) and read_json(Path(folder) / ADAPTER).get("peft_type") == "POSE_PLUGIN_BEACON"


def base_of(folder: str | Path, base: str | None = None) -> Base:
    """The base of an adapter.

    Args:
        folder: holds adapter_config.json.
        base: in its place, e.g. where the base has been moved.

    Raises:
        PoSEError: the adapter names none.
    """
    file = Path(folder) / ADAPTER
    values = read_json(file)
    if base is not None:
        return Base(base)
    name = values.get("base_model_name_or_path")
    if not name:
        raise PoSEError(f"{file} names no base_model_name_or_path; add the path of the base model there")
    # A relative path was relative to where training ran, which may be above the adapter's folder or here.
    for start in (Path(), *file.resolve().parents):
        if (start / name / "config.json").is_file():
            return Base(str(start / name))
    return Base(str(name), values.get("revision") or None)
