"""What is planned: from an Axolotl YAML or from options, with the base's config.json beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.plan.keys import unknown_keys
from pose_plugin.plan.memory import Run
from pose_plugin.plan.setup import FUSED_LOSSES, block, keeps_remainders, method, number, optimizer, sharding
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError
from pose_plugin.utils.files import read_json

# As of the lengths in a `pose:` block.
LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Inputs:
    """Everything a plan is made from.

    Attributes:
        base: the base's name or folder.
        config: its config.json.
        settings: the `pose:` block with the window filled in; None where the run has none.
        run: what memory depends on.
        accumulate: batches of a GPU in one step.
        steps: of the training; None where neither the YAML nor the data on this machine tell.
        rows: of the data set; None where they are not known.
        packed: several documents share a row.
        chat: rows are made by a chat template.
        beacon: the values of the YAML, where its adapter is beacon; else None.
        bf16: how the YAML asks for bf16, where the trained weights are then kept in it; None where small steps are not
            rounded away.
        learning_rate: where the YAML has one.
        notes: what was taken for granted.
        warnings: of keys and plugins.
    """

    base: str
    config: Mapping[str, Any]
    settings: PoSESettings | None
    run: Run
    accumulate: int = 1
    steps: int | None = None
    rows: int | None = None
    packed: bool = False
    chat: bool = False
    beacon: Mapping[str, Any] | None = None
    bf16: str | None = None
    learning_rate: float | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def from_yaml(path: str | Path, base: str | None = None, **given: Any) -> Inputs:
    """Reads an Axolotl YAML.

    Args:
        path: of the file.
        base: a folder with the base's config.json, where the name in the YAML is of the Hub.
        given: what is not in the YAML or shall differ: `gpus`, `steps`, `rows`.

    Raises:
        PoSEError: the file cannot be read, or the base's config.json is not on this machine.
    """
    try:
        import yaml
    except ImportError:
        raise PoSEError("reading a YAML needs PyYAML: pip install pyyaml, or give the settings as options") from None
    path = Path(path)
    if not path.is_file():
        raise PoSEError(f"{path} is no file; give an Axolotl YAML, or --target-length and --train-length")
    try:
        cfg = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PoSEError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(cfg, dict) or not cfg.get("base_model") or not isinstance(cfg["base_model"], str):
        raise PoSEError(f"{path} has no base_model: an Axolotl YAML is needed")
    found = from_values(cfg, base, **given)
    warnings = unknown_keys(cfg)
    if (found.settings or found.beacon is not None) and not _names_us(cfg):
        warnings.append(FORGOTTEN_LINE)
    return replace(found, warnings=warnings)


def _names_us(cfg: Mapping[str, Any]) -> bool:
    plugins = cfg.get("plugins") or []
    if not isinstance(plugins, list):
        raise PoSEError(f"plugins={plugins!r} is no list; write plugins: [pose_plugin]")
    return any(str(name).startswith("pose_plugin") for name in plugins)


def from_values(cfg: Mapping[str, Any], base: str | None = None, **given: Any) -> Inputs:
    """The same for the values of an Axolotl YAML."""
    notes: list[str] = []
    name = str(cfg["base_model"])
    config = base_config(base or cfg.get("base_model_config") or name, name)
    window = number(cfg, "sequence_len", None, most=LONGEST)
    beacon = cfg if cfg.get("adapter") == "beacon" else None
    if beacon is not None or cfg.get("beacon") is not None:
        _refuse_as_the_run(cfg, notes)
    settings = None
    if cfg.get("pose") is not None:
        given_block = cfg["pose"]
        if isinstance(given_block, dict) and given_block.get("train_length") is None and window:
            given_block = {**given_block, "train_length": window}
        settings = parse_settings(given_block)
    size = (settings.train_length if settings else None) or window
    if not size:
        raise PoSEError("the YAML has neither sequence_len nor pose.train_length, the trained window in tokens")
    batch, accumulate = number(cfg, "micro_batch_size", 1), number(cfg, "gradient_accumulation_steps", 1)
    gpus = int(given.get("gpus") or 1)
    rows = given.get("rows") or _rows(cfg, notes)
    run = replace(
        method(cfg, notes), **sharding(cfg, notes), gpus=gpus, rows=batch, window=int(size),
        optimizer=optimizer(str(cfg.get("optimizer") or "adamw_torch_fused"), notes),
        checkpointing=bool(cfg.get("gradient_checkpointing")),
        eager=cfg.get("attn_implementation") == "eager",
        fused_loss=any(cfg.get(key) for key in FUSED_LOSSES),
    )  # fmt: skip
    packed = bool(cfg.get("sample_packing"))
    # -1, as 0, leaves it to the epochs.
    steps = given.get("steps") or max(number(cfg, "max_steps", 0, least=-1), 0)
    epochs = number(cfg, "num_epochs", 1, least=0, whole=False) or 1
    gone = [each["path"] for each in _datasets(cfg) if _is_missing_file(each.get("path"))]
    if not steps and not rows and gone:
        notes.append(f"datasets: {gone[0]} is not on this machine, as seen from here, so its rows are not counted")
    if not steps and rows:
        if not given.get("rows"):
            notes += _of_rows(rows, packed, any(each.get("type") == "completion" for each in _datasets(cfg)))
        steps = max(1, int(rows * epochs / (batch * accumulate * gpus)))
    return Inputs(
        base=name, config=config, settings=settings, run=run, accumulate=accumulate,
        steps=int(steps) if steps else None, rows=rows, packed=packed,
        chat=any("chat_template" in str(each.get("type")) for each in _datasets(cfg)),
        beacon=beacon, bf16=_narrow(cfg, run),
        learning_rate=number(cfg, "learning_rate", None, least=0, whole=False), notes=notes,
    )  # fmt: skip


def _is_missing_file(path: Any) -> bool:
    """Whether that names a file, not a data set of the Hub, which is not here."""
    return Path(str(path)).suffix in (".jsonl", ".json", ".parquet", ".csv") and not Path(str(path)).exists()


def _refuse_as_the_run(cfg: Mapping[str, Any], notes: list[str]) -> None:
    """What the real run refuses of a `beacon:` block and beside it, by the same function.

    Raises:
        PoSEError: as the run would; and for blocks that are none, which Axolotl refuses by itself.
    """
    for key in ("pose", "gradient_checkpointing_kwargs", "bnb_config_kwargs", "overrides_of_model_kwargs"):
        block(cfg, key)
    try:
        from pose_plugin.frameworks.axolotl_beacon import prepare

        # It sets keys as the run needs them.
        prepare(copy.deepcopy(dict(cfg)))
    except ImportError:
        notes.append('the `beacon:` block is not checked: PEFT is missing, pip install "peft>=0.20"')


def _narrow(cfg: Mapping[str, Any], run: Run) -> str | None:
    """How bf16 is asked for, where trained weights stay in it without a float32 copy."""
    asked = next((f"{key}={cfg[key]}" for key in ("bf16", "bfloat16") if cfg.get(key)), None)
    if asked is None and cfg.get("bf16") is None:
        asked = "bf16=auto, the default"
    if cfg.get("fp16"):
        asked = None
    kept = run.master or run.trained_bytes != 2 or keeps_remainders(cfg)
    return None if kept else asked


def _of_rows(rows: int, packed: bool, completion: bool) -> list[str]:
    """How lines of a file and rows of the training differ."""
    if packed and completion:
        return [
            f"steps are counted as if each of the {rows} lines were a row, and there may be more or fewer: type "
            "completion makes several pieces of a text longer than sequence_len (and leaves out what is behind 64 of "
            "them), and sample_packing puts several pieces into a row. Axolotl logs the number"
        ]
    if packed:
        return [
            f"sample_packing puts several of the {rows} documents into a row, so there are at most as many steps "
            "as counted here; Axolotl logs the number"
        ]
    if completion:
        return [
            f"each of the {rows} lines is counted as one row, but type completion makes several of a text longer "
            "than sequence_len, so there may be more steps than counted here; Axolotl logs the number"
        ]
    return []


def _datasets(cfg: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = cfg.get("datasets") or []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise PoSEError(f"datasets={value!r} is no list of blocks; write e.g. `- path: rows.jsonl` below `datasets:`")
    return value


def base_config(place: str, name: str | None = None) -> dict[str, Any]:
    """The dict of a base's config.json: from a folder, or from the cache of the Hub's client.

    Raises:
        PoSEError: it is not on this machine.
    """
    folder = Path(place)
    file = folder if folder.is_file() else folder / "config.json"
    if not file.is_file():
        cached = _cached(place)
        if cached is None:
            where = "" if name in (None, place) else f" (looked in {place})"
            raise PoSEError(
                f"the config.json of {name or place} is not on this machine{where}. Give a folder that has it by "
                "--base FOLDER; the weights are not needed"
            )
        file = cached
    return read_json(file)


def _cached(name: str) -> Path | None:
    """From the cache of the Hub's client; the one small file is fetched where it is not and the Hub may be asked."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        return None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HFValidationError, HfHubHTTPError, OSError, ValueError):
        # No such name, no right to it, no network, or offline by HF_HUB_OFFLINE.
        return None


def _rows(cfg: Mapping[str, Any], notes: list[str]) -> int | None:
    """Lines of local JSON lines files; None if any part of the data is somewhere else."""
    count = 0
    for each in _datasets(cfg):
        path = Path(str(each.get("path")))
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as file:
            count += sum(bool(line.strip()) for line in file)
    if count and cfg.get("val_set_size"):
        notes.append(f"val_set_size={cfg['val_set_size']} takes its part of the {count} rows")
        share = number(cfg, "val_set_size", 0, least=0, whole=False)
        held = count * share if share < 1 else share
        if count - held < 1:
            raise PoSEError(f"val_set_size={cfg['val_set_size']} leaves none of the {count} rows to train on")
        count = int(count - held)
    if not count and (files := [str(each["path"]) for each in _datasets(cfg)]):
        notes.append(f"datasets: there is no row in {', '.join(files)}; the training would have nothing to read")
    return count or None
