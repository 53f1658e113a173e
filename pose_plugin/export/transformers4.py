"""Copy a saved folder into the form that transformers 4 reads."""

from __future__ import annotations

import copy
from pathlib import Path

from pose_plugin.checkpoints.saved import Saved, text_part
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import copy_folder, json_text, read_json


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
    names = [file.name for file in saved.path.iterdir() if file.is_file()]
    copy_folder(saved.path, folder, names, _older_texts(saved), "--output")
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
