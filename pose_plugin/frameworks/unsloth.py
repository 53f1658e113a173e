"""Unsloth: a base folder that it loads at the target, and what must hold before it trains.

Three things go wrong there without a word. Its fused RoPE reads a table of cos and sin at each position without a look
at the table's end, and the table is as long as the model's maximum when it was loaded. Asked for rows longer than that
maximum, it puts a linear scaling of its own in the place of ours. And rows longer than its `max_seq_length` are cut.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
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


def is_unsloth(model: Any) -> bool:
    """Whether Unsloth loaded a model: it then carries the longest row it takes."""
    return "unsloth" in sys.modules and _longest_row(model) is not None


def require_unsloth_fits(model: Any, settings: PoSESettings) -> None:
    """Checks that Unsloth's table reaches the farthest position, its scaling is not in ours' place, rows stay whole.

    Raises:
        PoSEError: naming what to load instead.
    """
    config, longest = model.config.get_text_config(), _longest_row(model) or 0
    record = getattr(config, RECORD_KEY, None)
    load = "FastLanguageModel.from_pretrained(extended_base(base, folder, target_length=…), max_seq_length=…)"
    if not record:
        raise PoSEError(
            f"Unsloth loaded a base that was not extended: with max_seq_length={longest} it stretches the positions by "
            f"a linear scaling of its own, or not at all. Load it by {load} "
            "(from pose_plugin.frameworks.unsloth import extended_base)"
        )
    if longest > record["target_length"]:
        raise PoSEError(
            f"max_seq_length={longest} is beyond target_length={record['target_length']}, for which the base was "
            f"extended: Unsloth then puts its own linear scaling in the place of rope={record['rope']}. Load with "
            f"max_seq_length={settings.train_length or record['original_length']}, the trained window"
        )
    if settings.train_length is not None and longest < settings.train_length:
        raise PoSEError(
            f"max_seq_length={longest} is shorter than train_length={settings.train_length}: Unsloth cuts what is "
            f"longer. Load with max_seq_length={settings.train_length}"
        )
    farthest = settings.target_length + settings.target_margin
    if farthest > config.max_position_embeddings:
        raise PoSEError(
            f"target_length={settings.target_length} with target_margin={settings.target_margin} reaches position "
            f"{farthest - 1}, but Unsloth's table of cos and sin ends at max_position_embeddings="
            f"{config.max_position_embeddings} and is read beyond its end. Set target_margin: 0, or load from "
            f"extended_base(…, target_length={farthest})"
        )


def _longest_row(model: Any) -> int | None:
    # PEFT and accelerate wrap the model that carries it.
    return next(
        (m.max_seq_length for m in model.modules() if isinstance(getattr(m, "max_seq_length", None), int)), None
    )
