"""Choose how to extend a base, from the data and the GPUs, and write it as an Axolotl YAML or a TRL script.

`Setup` holds the choices and their reasons. `init_axolotl` and `init_trl` only write them down.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pose_plugin.plan import init_axolotl, init_trl
from pose_plugin.plan.advice import notes_of
from pose_plugin.plan.base import base_config
from pose_plugin.plan.config_reader import Inputs, from_values
from pose_plugin.plan.init_setup import NEEDED, ROWS, TURNS, Setup
from pose_plugin.plan.memory import architecture, memory
from pose_plugin.plan.trl_script import inputs_of_script
from pose_plugin.rope.plan import plan_rope
from pose_plugin.rope.source import read_rope
from pose_plugin.utils.errors import PoSEError, first_line, shown
from pose_plugin.utils.models import last_names

METHODS = ("full", "lora", "qlora")
# Rows of this length fit most GPUs, and PoSE needs no longer ones.
_USUAL_WINDOW = 4096
# The estimate leaves out kernels' scratch memory and fragmentation.
_USABLE = 0.85


@dataclass(frozen=True)
class Wish:
    """What the user gives.

    Attributes:
        base: a folder or a hub name.
        target: L_t, tokens.
        data: a local JSONL file.
        gpus: how many; 0 for a CPU.
        gpu_gib: memory of each GPU.
        method: full, lora or qlora; None: the first of them that fits.
        window: L_c, tokens; None: chosen.
        place: a folder with the base's config.json, if the base is not on this machine.
        output: the run's output folder.
    """

    base: str
    target: int
    data: str
    gpus: int = 1
    gpu_gib: float = 24.0
    method: str | None = None
    window: int | None = None
    place: str | None = None
    output: str = "outputs/extended"


def write_config(wish: Wish, framework: str = "axolotl") -> tuple[str, list[str]]:
    """Write a YAML for `axolotl train`, or a Python script for TRL. `pose-plugin plan` takes both.

    Returns:
        its text, and the plan's notes about it.

    Raises:
        PoSEError: the base or the data cannot be read, the target does not exceed the base's window, or no method fits
            into the memory.
    """
    config = base_config(wish.place or wish.base, wish.base)
    original = read_rope(config).original_length
    if wish.target <= original:
        raise PoSEError(f"--target-length {wish.target} does not exceed the base's window of {original}; raise it")
    if wish.window is not None and wish.window >= wish.target:
        raise PoSEError(
            f"--train-length {wish.window} is not below --target-length {wish.target}; shorten it, or leave it out"
        )
    rope = plan_rope(config, wish.target, Setup.rope)
    window = min(original, _USUAL_WINDOW) if wish.window is None else wish.window
    row, key = _first_row(Path(wish.data), framework)
    model = architecture(config)
    setup = Setup(
        base=wish.base,
        data=wish.data,
        output=wish.output,
        row=row,
        key=key,
        original=original,
        target=wish.target,
        window=window,
        gpus=wish.gpus,
        beside_lora={part: last_names(paths) for part, paths in model.beside_lora.items()},
    )
    needed = {}
    for way in _ways(setup, wish):
        if way.sharded:
            way = replace(way, layer=_layer_class(config))
        inputs = _read(_write(way, framework), wish, framework)
        needed[way.shown_method] = gib = memory(model, inputs.run).total / 2**30
        # A CPU has what it has: the first method is taken, and the plan shows the memory.
        if wish.gpus == 0 or wish.method or gib <= wish.gpu_gib * _USABLE:
            return _write(replace(way, gib=gib), framework), [*way.notes, *notes_of(inputs, rope)]
    sizes = ", ".join(f"{method} {size:.1f}" for method, size in needed.items())
    raise PoSEError(
        f"--gpu-memory {wish.gpu_gib:g}: no method fits into {_USABLE:.0%} of it ({sizes} GiB per GPU); give larger or "
        f"more GPUs, or a shorter --train-length than {window}"
    )


def _ways(setup: Setup, wish: Wish) -> list[Setup]:
    """Return what to try, the best first: the methods, and QLoRA that leaves the embeddings frozen."""
    methods = [wish.method] if wish.method else METHODS[: 2 if wish.gpus == 0 else 3]
    ways = [replace(setup, method=method) for method in methods]
    if not wish.method and ways[-1].method == "qlora" and ways[-1].trains_embeddings:
        ways.append(replace(ways[-1], embeddings_fit=False))
    return ways


def _write(setup: Setup, framework: str) -> str:
    return init_axolotl.write(setup) if framework == "axolotl" else init_trl.write(setup)


def _read(text: str, wish: Wish, framework: str) -> Inputs:
    """Return what `pose-plugin plan` reads from the text, so that both estimate the same memory."""
    import yaml

    given: dict[str, Any] = {"base": wish.place, "gpus": max(wish.gpus, 1), "steps": 1}
    if framework == "trl":
        return inputs_of_script(text, "the script", **given)
    return from_values(yaml.safe_load(text), **given)


def _first_row(file: Path, framework: str) -> tuple[str, str]:
    """Return how the rows of a JSONL file are read, one of `ROWS`, and the key by which.

    Raises:
        PoSEError: there is no such file, or its first row lacks what the frameworks read.
    """
    values = _first_object(file)
    key = next((key for key in ROWS if key in values), None)
    if key is None:
        raise PoSEError(
            f"--data {file}: the first row has the keys {shown(list(values))}, and none of {', '.join(ROWS)}; rename "
            "its fields"
        )
    missing = [name for name in NEEDED[framework].get(key, ()) if name not in values]
    if missing:
        raise PoSEError(f"--data {file}: the first row has {key} and lacks {', '.join(missing)}; add or rename fields")
    if key not in TURNS:
        return key, key
    turns = values[key] if isinstance(values[key], list) else []
    for row, names in TURNS.items():
        # A call of a tool has no content.
        if turns and all(isinstance(turn, Mapping) and names[0] in turn for turn in turns) and names[1] in turns[0]:
            return row, key
    known = " or ".join(" and ".join(names) for names in TURNS.values())
    raise PoSEError(f"--data {file}: the first row's {key} is not a list of turns with {known}; rename their fields")


def _first_object(file: Path) -> Mapping[str, Any]:
    """Return the first row of a JSONL file.

    Raises:
        PoSEError: the file is missing, has no row, or its first row is not a JSON object.
    """
    wanted = "give a JSONL file, with one JSON object per line"
    if not file.is_file():
        raise PoSEError(f"--data {file} is {'a folder' if file.is_dir() else 'no file on this machine'}; {wanted}")
    try:
        with file.open(encoding="utf-8") as lines:
            line = next((line for line in lines if line.strip()), None)
            row = None if line is None else json.loads(line)
    except OSError as error:
        raise PoSEError(f"--data {file} cannot be read ({first_line(error)}); {wanted}") from None
    except ValueError as error:
        raise PoSEError(f"--data {file}: the first row is not JSON ({error}); {wanted}") from None
    if not isinstance(row, Mapping):
        found = "there is no row" if line is None else f"the first row is {shown(row)}, no object"
        raise PoSEError(f"--data {file}: {found}; {wanted}")
    return row


def _layer_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class of the base's decoder layers, which FSDP wraps."""
    import torch
    from transformers import AutoModelForCausalLM

    from pose_plugin.rope.read import as_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(as_config(config))
    return sorted(model._no_split_modules)[0]
