"""Tell adapters from models, and find an adapter's base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Base:
    """Where the base's weights are: a folder, or a name on the Hugging Face hub and its revision."""

    name: str
    revision: str | None = None


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (Path(folder) / ADAPTER).is_file()


def is_beacons(folder: str | Path) -> bool:
    """Return whether a folder holds an Activation Beacon adapter, which leaves the model's window as it is."""
    return is_adapter(folder) and read_json(Path(folder) / ADAPTER).get("peft_type") == "POSE_PLUGIN_BEACON"


def require_model(folder: str | Path) -> Path:
    """Return the path of a folder that holds a model or an adapter.

    Raises:
        PoSEError: it does not exist, or holds neither.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PoSEError(f"{path} is not a folder; name the output folder of a training run")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise PoSEError(f"{path} holds neither config.json nor adapter_config.json; name a saved model or adapter")
    return path


def require_peft() -> Any:
    """Return the module `peft`.

    Raises:
        PoSEError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise PoSEError("an adapter needs PEFT, which is not installed; pip install peft") from None
    return peft


def base_of(folder: str | Path, base: str | None = None) -> Base:
    """Return the base of an adapter.

    Args:
        folder: holds adapter_config.json.
        base: used instead, e.g. if the base has been moved.

    Raises:
        PoSEError: the adapter names none.
    """
    if base is not None:
        return Base(base)
    file = Path(folder) / ADAPTER
    values = read_json(file)
    name = values.get("base_model_name_or_path")
    if not name:
        raise PoSEError(f"{file} has no base_model_name_or_path; add the path of the base model there")
    # A relative path was relative to where training ran, which may be this folder or one above the adapter's.
    for start in (Path(), *file.resolve().parents):
        if (start / name / "config.json").is_file():
            return Base(str(start / name))
    return Base(str(name), values.get("revision") or None)
