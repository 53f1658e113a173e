"""Write a base folder that Unsloth, or any other trainer, loads with the extended window.

Unsloth's fused RoPE reads a table of cos and sin that is as long as the model's maximum at load time, so the config
must be extended before. `training.checks.require_unsloth_fits` checks a loaded model.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.lengths import LIMITING, raised_limits
from pose_plugin.checkpoints.load import local_folder
from pose_plugin.rope import extend_context
from pose_plugin.rope.read import RECORD_KEY, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import atomic_file, read_json, write_json


def extended_base(base: str | Path, folder: str | Path, target_length: int, rope: Any = "yarn", **settings: Any) -> str:
    """Write a folder that differs from a base in its config and its limits of length, for any trainer.

        model, tokenizer = FastLanguageModel.from_pretrained(
            extended_base("unsloth/llama-3-8b-bnb-4bit", "extended", target_length=81920), max_seq_length=8192
        )

    Args:
        base: a local folder, or a name on the Hugging Face hub.
        folder: where to write; the weights are linked if the file system allows it, else copied.
        target_length: L_t, the target window in tokens.
        rope, settings: as for `extend_context`.

    Returns:
        `folder`.

    Raises:
        PoSEError: no such base, the folder holds something else or files of another base, or the rope is not possible
            (see `extend_context`).
    """
    source, path = local_folder(base), Path(folder)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    extended = extend_context(values, target_length, rope, **settings)
    there = path / "config.json"
    # All ranks of a script may call this at once. Another rank's config.json is written first, and atomically.
    others = [each for each in path.iterdir() if not each.match("_*.part")] if path.exists() else []
    if path.resolve() == source.resolve() or (
        others and RECORD_KEY not in (there.read_text(encoding="utf-8") if there.exists() else "")
    ):
        raise PoSEError(f"folder={str(path)!r} is not empty. Name a new or an empty folder")
    # Also those that keep their limits: an earlier call may have raised them to another target.
    limits = {name: read_json(source / name) for name in LIMITING if (source / name).is_file()}
    window = text_config(extended)["max_position_embeddings"]
    written = {"config.json": extended, **limits, **dict(raised_limits(source.joinpath, window))}
    files = [file for file in source.iterdir() if file.is_file() and file.name not in written]
    if foreign := [file.name for file in files if not _may_become(file, path / file.name)]:
        raise PoSEError(
            f"folder={str(path)!r} has the {foreign[0]} of another base, which would be trained with the config of "
            f"{base}. Name a new or an empty folder"
        )
    path.mkdir(parents=True, exist_ok=True)
    for name, values in written.items():
        write_json(path / name, values)
    for file in files:
        _link_or_copy(file, path / file.name)
    return str(path)


def _may_become(file: Path, target: Path) -> bool:
    """Return whether a place is free for a file of the base, or holds a link to it or a copy of it."""
    if not os.path.lexists(target):
        return True
    if target.is_symlink():
        return target.resolve() == file.resolve()
    # The content of weights is not read; a copy has the time of its original.
    one, other = file.stat(), target.stat()
    return one.st_size == other.st_size and abs(one.st_mtime - other.st_mtime) < 2


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.symlink(file.resolve(), target)
    except FileExistsError:
        return
    except OSError:
        # No links on this file system. Another rank may be loading its copy, so a copy is never overwritten.
        if not target.exists():
            with atomic_file(target) as part:
                shutil.copy2(file, part)
