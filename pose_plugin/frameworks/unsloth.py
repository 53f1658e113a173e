"""Unsloth: a base folder that it loads at the target, and what must hold before it trains.

Three things go wrong there without a word. Its fused RoPE reads a table of cos and sin at each position without a look
at the table's end, and the table is as long as the model's maximum when it was loaded. Asked for rows longer than that
maximum, it puts a linear scaling of its own in the place of ours. And rows longer than its `max_seq_length` are cut.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pose_plugin.rope import extend_context
from pose_plugin.rope.read import RECORD_KEY
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import atomic_file, write_json


def extended_base(base: str | Path, folder: str | Path, target_length: int, rope: Any = "yarn", **settings: Any) -> str:
    """A folder that differs from a base in its config alone, for `FastLanguageModel.from_pretrained`.

        model, tokenizer = FastLanguageModel.from_pretrained(
            extended_base("unsloth/llama-3-8b-bnb-4bit", "extended", target_length=81920), max_seq_length=8192
        )

    Args:
        base: a local folder, or a name on the Hugging Face hub.
        folder: where to write; the weights are linked, not copied, where the file system allows it.
        target_length: L_t, the wanted window in tokens.
        rope, settings: as for `extend_context`.

    Returns:
        `folder`.

    Raises:
        PoSEError: the folder holds something else, or the rope cannot be (see `extend_context`).
    """
    source, path = Path(base), Path(folder)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(str(base)))
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    extended = extend_context(values, target_length, rope, **settings)
    there = path / "config.json"
    # Every rank of a script comes here, perhaps at once: another's config.json is there first, and whole.
    others = [each for each in path.iterdir() if not each.match("_*.part")] if path.exists() else []
    if path.resolve() == source.resolve() or (
        others and RECORD_KEY not in (there.read_text(encoding="utf-8") if there.exists() else "")
    ):
        raise PoSEError(f"folder={str(path)!r} holds something else already; name one that is new or empty")
    path.mkdir(parents=True, exist_ok=True)
    write_json(there, extended)
    for file in source.iterdir():
        target = path / file.name
        if file.name != "config.json" and file.is_file():
            try:
                os.symlink(file.resolve(), target)
            except FileExistsError:
                continue
            except OSError:
                # No links here. Another rank may be loading a copy already, so none is written over.
                if target.exists():
                    continue
                with atomic_file(target) as part:
                    shutil.copy2(file, part)
    return str(path)
