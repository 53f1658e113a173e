"""Copy a saved folder into the form that transformers 4 reads."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pose_plugin.checkpoints.saved import Saved, text_part
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import json_text, new_folder, read_json, write_whole

_LINKED = (".safetensors", ".bin", ".pt", ".gguf")


def write_older_form(saved: Saved, output: str | Path) -> Path:
    """Write config.json and tokenizer_config.json as transformers 4 would, and copies of or links to all other files.

    The folder's config already has both forms of the rope. But transformers 5 names the tokenizer class
    TokenizersBackend, which transformers 4 does not know, and some readers fail at unknown keys.

    Args:
        saved: a model or adapter.
        output: a new folder, which is written whole or not at all; or one that this function has written.

    Returns: the folder.

    Raises:
        PoSEError: the folder holds something else, or the older form cannot express the rope.
    """
    folder = Path(output)
    texts = _older_texts(saved)
    linked = [file for file in saved.path.iterdir() if file.is_file() and file.name not in texts]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if folder.is_dir() and _is_this_copy(folder, texts, linked):
            return folder
        raise PoSEError(f"--output {folder} exists and is not empty; name a new folder")
    with new_folder(folder) as part:
        for file in linked:
            _link(file, part / file.name)
        for name, text in texts.items():
            write_whole(part / name, text)
    return folder


def _older_texts(saved: Saved) -> dict[str, str]:
    """Return the files that change, as JSON texts by name."""
    if saved.config is None:
        raise PoSEError(f"{saved.path} has no config.json next to its adapter; copy the trained model's there first")
    config = copy.deepcopy(saved.config)
    text = text_part(config)
    copies = legacy_copies(saved.rope_parameters, saved.model_type)
    if not copies:
        raise PoSEError(
            f"the transformers 4 config format cannot express this rope: model type {saved.model_type!r} has one per "
            "layer type"
        )
    text.pop("rope_parameters", None)
    text.update(copies)
    for part in (config, text):
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
    texts = {"config.json": json_text(config)}
    if saved.tokenizer is not None:
        values = read_json(saved.path / "tokenizer_config.json")
        if values.get("tokenizer_class") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
        texts["tokenizer_config.json"] = json_text(values)
    return texts


def _is_this_copy(folder: Path, texts: Mapping[str, str], linked: list[Path]) -> bool:
    """Return whether a folder holds what would be written, as after a repeated command."""
    if any(not (folder / file.name).is_file() for file in linked):
        return False
    return all(
        (folder / name).is_file() and (folder / name).read_text(encoding="utf-8", errors="replace") == text
        for name, text in texts.items()
    )


def _link(source: Path, target: Path) -> None:
    """Hard-link weights, if the disk allows it, and copy small files, which may be rewritten in either folder."""
    if source.suffix not in _LINKED:
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
