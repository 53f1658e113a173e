"""How many steps a training has, and how many rows it reads: what the YAML says, or the rows of the data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.plan.dropped import share_dropped
from pose_plugin.plan.keys import number
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.tables import counted


def datasets_of(cfg: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the blocks below `datasets:`."""
    value = cfg.get("datasets") or []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise PoSEError(f"datasets={value!r} is not a list of blocks; write `- path: rows.jsonl` below `datasets:`")
    return value


def steps_of(
    cfg: Mapping[str, Any],
    rows_of_step: tuple[int, int],
    steps: int | None,
    rows: int | None,
    notes: list[str],
    place: str,
    apart: bool = False,
) -> tuple[int | None, int | None]:
    """Return the steps of the training and the rows that they read, or None for what cannot be known here.

    Args:
        rows_of_step: the most that one step reads, and what Axolotl takes for it to get the number of steps.
        place: of the tokenizer; see `share_dropped`.
        apart: whether each epoch is divided into steps separately, as in transformers, or all together, as in Axolotl.
    """
    most, planned = rows_of_step
    # In Axolotl max_steps: -1 means the same as none.
    steps = steps or max(number(cfg, "max_steps", 0, least=-1), 0) or None
    epochs = number(cfg, "num_epochs", 1, least=0, whole=False) or 1
    if rows is None:
        rows = _count_rows(cfg, notes, place, needed=not steps)
    elif steps:
        notes.append(
            f"the number of steps is set to {steps}, so the {counted(rows, 'row')} of the data do not change it"
        )
    if rows is not None:
        rows = _without_held_out(cfg, rows, notes)
    about = _about_rows(cfg, rows or 0)
    if rows is None or (steps and about):
        return steps, steps and steps * most
    of_epoch = math.ceil(rows / most)
    if not steps:
        notes += about
        steps = max(1, math.ceil(epochs * of_epoch if apart else rows * epochs / planned))
    # The last step of an epoch reads what is left.
    whole, more = divmod(steps, of_epoch)
    return steps, whole * rows + min(more * most, rows)


def _count_rows(cfg: Mapping[str, Any], notes: list[str], place: str, needed: bool) -> int | None:
    """Return the rows of local JSON lines files that are kept, or None if any part of the data is elsewhere.

    Args:
        notes: what was assumed is added here.
        place: of the tokenizer.
        needed: whether the number of steps depends on the rows, so that a missing file is worth a note.
    """
    paths = [Path(str(each.get("path"))) for each in datasets_of(cfg)]
    gone = [p for p in paths if p.suffix in (".jsonl", ".json", ".parquet", ".csv") and not p.exists()]
    parts = [f"{key}: {each[key]}" for each in datasets_of(cfg) for key in ("split", "shards") if each.get(key)]
    parts = [part for part in parts if part != "split: train"]
    if gone and needed:
        notes.append(f"datasets: {gone[0]} is not on this machine or not in this folder, so its rows are not counted")
    elif parts and needed:
        notes.append(f"{parts[0]} takes a part of the data, so its rows are not counted")
    if parts or not paths or not all(path.suffix == ".jsonl" and path.is_file() for path in paths):
        return None
    count, dropped, unknown = 0, 0, False
    longest = number(cfg, "sequence_len", 512)
    drops = str(cfg.get("excess_length_strategy") or "drop").lower() == "drop"
    for data, path in zip(datasets_of(cfg), paths, strict=True):
        with path.open("rb") as file:
            lines = sum(bool(line.strip()) for line in file)
        share = share_dropped(path, data, longest, place) if drops else 0.0
        count += lines
        dropped += round(lines * (share or 0))
        unknown |= share is None
    longer = f"of more than sequence_len={longest} tokens, which Axolotl drops (excess_length_strategy: drop)"
    if dropped:
        notes.append(f"about {dropped} of the {counted(count, 'row')} are not trained: those {longer}")
    if unknown:
        notes.append(
            f"there may be fewer rows, without those {longer}. Tokens are counted here only of input_ids, and of chats "
            "if the tokenizer is on this machine"
        )
    if count == dropped:
        notes.append(f"datasets: there is no row to train on in {', '.join(map(str, paths))}")
        return None
    return count - dropped


def _without_held_out(cfg: Mapping[str, Any], rows: int, notes: list[str]) -> int:
    """Return the rows that are left to train on.

    Raises:
        PoSEError: none are.
    """
    share = number(cfg, "val_set_size", 0, least=0, whole=False)
    if not share:
        return rows
    notes.append(f"val_set_size={cfg['val_set_size']} holds part of the {counted(rows, 'row')} out")
    left = rows - (rows * share if share < 1 else share)
    if left < 1:
        raise PoSEError(f"val_set_size={cfg['val_set_size']} leaves none of the {rows} rows to train on")
    return int(left)


def _about_rows(cfg: Mapping[str, Any], rows: int) -> list[str]:
    """Return how the number of steps may differ, because rows of the data are not rows of the training."""
    reasons = []
    if any(each.get("type") == "completion" for each in datasets_of(cfg)):
        reasons.append(
            "there may be more, because type: completion cuts a text longer than sequence_len into up to 64 rows (and "
            "drops the rest)"
        )
    if cfg.get("sample_packing"):
        reasons.append("there may be fewer, because sample_packing puts several documents into a row")
    if not reasons:
        return []
    return [
        f"steps assume that each of the {rows} rows of the data is one of the training; {'; '.join(reasons)}. Axolotl "
        "logs the number"
    ]
