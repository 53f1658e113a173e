"""What is planned: from an Axolotl YAML or from options, with the base's config.json beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.errors import PoSEError
from pose_plugin.plan.memory import Run
from pose_plugin.serving.base import read_json

_OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_4bit"),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "lion": ("lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "lion_8bit": ("lion_8bit", "paged_lion_8bit"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
}
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_FUSED = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")


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
        notes: what was taken for granted.
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
    notes: list[str] = field(default_factory=list)


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
    return from_values(cfg, base, **given)


def from_values(cfg: Mapping[str, Any], base: str | None = None, **given: Any) -> Inputs:
    """The same for the values of an Axolotl YAML."""
    notes: list[str] = []
    name = str(cfg["base_model"])
    config = base_config(base or cfg.get("base_model_config") or name, name)
    window = _number(cfg, "sequence_len", None)
    settings = None
    if cfg.get("pose") is not None:
        block = cfg["pose"]
        if isinstance(block, dict) and block.get("train_length") is None and window:
            block = {**block, "train_length": window}
        settings = parse_settings(block)
    size = (settings.train_length if settings else None) or window
    if not size:
        raise PoSEError("the YAML has neither sequence_len nor pose.train_length, the trained window in tokens")
    batch, accumulate = _number(cfg, "micro_batch_size", 1), _number(cfg, "gradient_accumulation_steps", 1)
    gpus = int(given.get("gpus") or 1)
    rows = given.get("rows") or _rows(cfg, notes)
    run = replace(
        _method(cfg, notes), **_sharding(cfg, notes), gpus=gpus, rows=batch, window=int(size),
        optimizer=_optimizer(str(cfg.get("optimizer") or "adamw_torch_fused"), notes),
        checkpointing=bool(cfg.get("gradient_checkpointing")),
        eager=cfg.get("attn_implementation") == "eager",
        fused_loss=any(cfg.get(key) for key in _FUSED),
    )  # fmt: skip
    packed = bool(cfg.get("sample_packing"))
    # -1, as 0, leaves it to the epochs.
    steps = given.get("steps") or max(_number(cfg, "max_steps", 0, least=-1), 0)
    if not steps and rows:
        if packed and not given.get("rows"):
            notes.append(
                f"sample_packing puts several of the {rows} documents into a row, so there are at most as many steps "
                "as counted here; Axolotl logs the number"
            )
        if not packed and not given.get("rows") and any(each.get("type") == "completion" for each in _datasets(cfg)):
            notes.append(
                f"each of the {rows} lines is counted as one row, but type completion makes several of a text longer "
                "than sequence_len, so there may be more steps than counted here; Axolotl logs the number"
            )
        epochs = _number(cfg, "num_epochs", 1, least=0, whole=False) or 1
        steps = max(1, int(rows * epochs / (batch * accumulate * gpus)))
    return Inputs(
        base=name, config=config, settings=settings, run=run, accumulate=accumulate,
        steps=int(steps) if steps else None, rows=rows, packed=packed,
        chat=any("chat_template" in str(each.get("type")) for each in _datasets(cfg)), notes=notes,
    )  # fmt: skip


def _number(cfg: Mapping[str, Any], key: str, default: Any, least: float = 1, whole: bool = True) -> Any:
    """A number of the YAML; Raises PoSEError for what is none, or below `least`."""
    value = cfg.get(key)
    if value is None:
        return default
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number < math.inf or (whole and number != int(number)):
        raise PoSEError(f"{key}={value!r} cannot work: a {'whole ' * whole}number of at least {least:g} is needed")
    return int(number) if whole else number


def _block(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = cfg.get(key) or {}
    if not isinstance(value, Mapping):
        raise PoSEError(f"{key}={value!r} is no block of keys; write them indented below `{key}:`")
    return value


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


def _method(cfg: Mapping[str, Any], notes: list[str]) -> Run:
    adapter = cfg.get("adapter")
    # Axolotl without bf16 and fp16 computes in float32, as models are then loaded.
    wide = 2 if cfg.get("bf16") in (True, "auto", None) or cfg.get("fp16") else 4
    if adapter is None:
        return Run(method="full", weight_bytes=wide, trained_bytes=wide)
    quantised: Any = "nf4" if cfg.get("load_in_4bit") else "int8" if cfg.get("load_in_8bit") else None
    if adapter == "beacon":
        block = _block(cfg, "beacon")
        notes.append("rows that beacons add to a text are not counted in the memory of activations")
        targets = block.get("target_modules") or ["q_proj", "k_proj", "v_proj", "o_proj"]
        return Run(
            method="beacon",
            lora_rank=_number(block, "rank", 0, least=0),
            lora_targets=[targets] if isinstance(targets, str) else list(targets),
            quantised=quantised,
            weight_bytes=wide,
            trained_bytes=4 if block.get("dtype") == "float32" else wide,
        )
    if adapter not in ("lora", "qlora"):
        notes.append(f"adapter={adapter} is reckoned as LoRA")
    elif adapter == "qlora" and not quantised:
        notes.append("adapter=qlora without load_in_4bit: true is refused by Axolotl; reckoned as LoRA")
    saved = cfg.get("lora_modules_to_save") or []
    if not isinstance(saved, list):
        raise PoSEError(f"lora_modules_to_save={saved!r} is no list; write [{saved}]")
    given = cfg.get("lora_target_modules")
    targets = list(given) if isinstance(given, list) else []
    if isinstance(given, str) and given != "all-linear" and not cfg.get("lora_target_linear"):
        notes.append(f"lora_target_modules={given} is reckoned as all linear maps")
    if cfg.get("lora_target_linear") or not targets:
        targets = [*_ALL_LINEAR, *(name for name in targets if name not in _ALL_LINEAR)]
    methods: dict[Any, Any] = {"nf4": "qlora", "int8": "8bit", None: "lora"}
    return Run(
        method=methods[quantised],
        lora_rank=_number(cfg, "lora_r", 8),
        lora_targets=targets,
        saved_modules=saved,
        quantised=quantised,
        weight_bytes=wide,
        trained_bytes=4,
    )


def _sharding(cfg: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if cfg.get("fsdp_config") or cfg.get("fsdp_version") or cfg.get("fsdp"):
        block = _block(cfg, "fsdp_config")
        offload = bool(block.get("offload_params") or block.get("fsdp_offload_params"))
        whole = block.get("reshard_after_forward", block.get("fsdp_reshard_after_forward", True))
        # Gathered weights that are kept until the backward pass are whole at its beginning.
        return {"stage": 3 if whole else 2, "offload": offload, "master": cfg.get("adapter") is None}
    path = cfg.get("deepspeed")
    if not path:
        return {}
    try:
        block = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, str) else path
    except (OSError, ValueError):
        stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(path)), 0)
        notes.append(f"deepspeed={path} cannot be read here; taken for ZeRO-{stage} by its name")
        return {"stage": stage, "master": cfg.get("adapter") is None}
    zero = _block(_block({"deepspeed": block}, "deepspeed"), "zero_optimization")
    device = _block(zero, "offload_optimizer").get("device")
    return {
        "stage": _number(zero, "stage", 0, least=0),
        "offload": device not in (None, "none"),
        "master": cfg.get("adapter") is None,
    }


def _optimizer(name: str, notes: list[str]) -> str:
    for known, names in _OPTIMIZERS.items():
        if name in names or name == known:
            return known
    notes.append(f"optimizer={name} is reckoned as AdamW")
    return "adamw"


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
        share = _number(cfg, "val_set_size", 0, least=0, whole=False)
        held = count * share if share < 1 else share
        if held >= count:
            raise PoSEError(f"val_set_size={cfg['val_set_size']} leaves none of the {count} rows to train on")
        count = int(count - held)
    return count or None
