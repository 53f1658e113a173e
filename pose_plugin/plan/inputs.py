"""What is planned: from an Axolotl YAML or from options, with the base's config.json beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.errors import PoSEError
from pose_plugin.plan.memory import Run

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
    except yaml.YAMLError as error:
        raise PoSEError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(cfg, dict) or "base_model" not in cfg:
        raise PoSEError(f"{path} has no base_model: an Axolotl YAML is needed")
    return from_values(cfg, base, **given)


def from_values(cfg: Mapping[str, Any], base: str | None = None, **given: Any) -> Inputs:
    """The same for the values of an Axolotl YAML."""
    notes: list[str] = []
    name = str(cfg["base_model"])
    config = base_config(base or cfg.get("base_model_config") or name, name)
    window = cfg.get("sequence_len")
    settings = None
    if cfg.get("pose") is not None:
        block = cfg["pose"]
        if isinstance(block, dict) and block.get("train_length") is None and window:
            block = {**block, "train_length": int(window)}
        settings = parse_settings(block)
    size = (settings.train_length if settings else None) or window
    if not size:
        raise PoSEError("the YAML has neither sequence_len nor pose.train_length, the trained window in tokens")
    batch, accumulate = int(cfg.get("micro_batch_size") or 1), int(cfg.get("gradient_accumulation_steps") or 1)
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
    steps = given.get("steps") or cfg.get("max_steps")
    if steps is None and rows:
        if packed and not given.get("rows"):
            notes.append(
                f"sample_packing puts several of the {rows} documents into a row, so there are at most as many steps "
                "as counted here; Axolotl logs the number"
            )
        epochs = float(cfg.get("num_epochs") or 1)
        steps = max(1, int(rows * epochs / (batch * accumulate * gpus)))
    return Inputs(
        base=name, config=config, settings=settings, run=run, accumulate=accumulate,
        steps=int(steps) if steps else None, rows=rows, packed=packed,
        chat=any("chat_template" in str(each.get("type")) for each in cfg.get("datasets") or []), notes=notes,
    )  # fmt: skip


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
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PoSEError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise PoSEError(f"{file} does not hold a config")
    return found


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
        block = cfg.get("beacon") or {}
        notes.append("rows that beacons add to a text are not counted in the memory of activations")
        targets = block.get("target_modules") or ["q_proj", "k_proj", "v_proj", "o_proj"]
        return Run(
            method="beacon",
            lora_rank=int(block.get("rank") or 0),
            lora_targets=[targets] if isinstance(targets, str) else list(targets),
            quantised=quantised,
            weight_bytes=wide,
            trained_bytes=4 if block.get("dtype") == "float32" else wide,
        )
    targets = list(cfg.get("lora_target_modules") or []) if isinstance(cfg.get("lora_target_modules"), list) else []
    if cfg.get("lora_target_linear") or not targets:
        targets = [*_ALL_LINEAR, *(name for name in targets if name not in _ALL_LINEAR)]
    methods: dict[Any, Any] = {"nf4": "qlora", "int8": "8bit", None: "lora"}
    return Run(
        method=methods[quantised],
        lora_rank=int(cfg.get("lora_r") or 8),
        lora_targets=targets,
        saved_modules=list(cfg.get("lora_modules_to_save") or []),
        quantised=quantised,
        weight_bytes=wide,
        trained_bytes=4,
    )


def _sharding(cfg: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if cfg.get("fsdp_config") or cfg.get("fsdp_version") or cfg.get("fsdp"):
        block = cfg.get("fsdp_config") or {}
        offload = bool(block.get("offload_params") or block.get("fsdp_offload_params"))
        whole = block.get("reshard_after_forward", block.get("fsdp_reshard_after_forward", True))
        # Gathered weights that are kept until the backward pass are whole at its beginning.
        return {"stage": 3 if whole else 2, "offload": offload, "master": cfg.get("adapter") is None}
    path = cfg.get("deepspeed")
    if not path:
        return {}
    try:
        block = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, str) else dict(path)
    except (OSError, ValueError):
        stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(path)), 0)
        notes.append(f"deepspeed={path} cannot be read here; taken for ZeRO-{stage} by its name")
        return {"stage": stage, "master": cfg.get("adapter") is None}
    zero = block.get("zero_optimization") or {}
    device = (zero.get("offload_optimizer") or {}).get("device")
    return {
        "stage": int(zero.get("stage") or 0),
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
    for each in cfg.get("datasets") or []:
        path = Path(str(each.get("path")))
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as file:
            count += sum(bool(line.strip()) for line in file)
    if count and cfg.get("val_set_size"):
        notes.append(f"val_set_size={cfg['val_set_size']} takes its part of the {count} rows")
        share = float(cfg["val_set_size"])
        count = int(count * (1 - share)) if share < 1 else count - int(share)
    return count or None
