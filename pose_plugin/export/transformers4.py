"""Copy a saved folder into the form that transformers 4 reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pose_plugin.checkpoints.folder import text_part
from pose_plugin.checkpoints.saved import Saved
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json, write_json

_LINKED = (".safetensors", ".bin", ".pt", ".gguf")


def write_older_form(saved: Saved, output: str | Path) -> Path:
    """Write config.json and tokenizer_config.json as transformers 4 would, and copies of or links to all other files.

    The folder's config already has both forms of the rope. But transformers 5 names the tokenizer class
    TokenizersBackend, which transformers 4 does not know, and some readers fail at unknown keys.

    Args:
        saved: a model or adapter.
        output: a new folder.

    Returns: the folder.

    Raises:
        PoSEError: the folder exists and is not empty, or the older form cannot express the rope.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PoSEError(f"--output {folder} exists and is not empty; name a new folder")
    config = read_json(saved.path / "config.json")
    text = text_part(config)
    assert text is not None  # read_saved has checked it
    copies = legacy_copies(text["rope_parameters"], saved.model_type)
    if not copies:
        raise PoSEError(
            f"the transformers 4 config format cannot express this rope: model type {saved.model_type!r} has one per "
            "layer type"
        )
    del text["rope_parameters"]
    text.update(copies)
    for part in (config, text):
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
    folder.mkdir(parents=True, exist_ok=True)
    for file in saved.path.iterdir():
        if file.is_file() and file.name not in ("config.json", "tokenizer_config.json"):
            _link(file, folder / file.name)
    write_json(folder / "config.json", config)
    tokenizer = saved.path / "tokenizer_config.json"
    if tokenizer.is_file():
        values = read_json(tokenizer)
        if values.get("tokenizer_class") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(folder / "tokenizer_config.json", values)
    return folder


def _link(source: Path, target: Path) -> None:
    """Hard-link weights, if the disk allows it, and copy small files, which may be rewritten in either folder."""
    if source.suffix not in _LINKED:
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
