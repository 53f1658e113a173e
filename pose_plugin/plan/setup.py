"""What of an Axolotl YAML the memory of a step and its precision depend on: method, sharding, optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.plan.memory import Run
from pose_plugin.utils.errors import PoSEError

_OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "adamw_4bit": ("adamw_torch_4bit",),
    "lion": ("lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "lion_8bit": ("lion_8bit", "paged_lion_8bit"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
}
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")
# Optimizers that keep what bf16 rounds away, by themselves or with an argument; see integrations/precision.py.
_EXACT = ("optimi_adamw", "stable_adamw", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion")
_EXACT_IF = ("bf16_stochastic_round", "use_kahan_summation")


def method(cfg: Mapping[str, Any], notes: list[str]) -> Run:
    """How weights are kept and what is trained; what is taken for granted is added to `notes`.

    Raises:
        PoSEError: a value of a wrong type.
    """
    adapter = cfg.get("adapter")
    # Axolotl without bf16 and fp16 computes in float32, as models are then loaded.
    wide = 2 if cfg.get("bf16") in (True, "auto", None) or cfg.get("bfloat16") or cfg.get("fp16") else 4
    if cfg.get("bf16") not in (True, False, "auto", None):
        notes.append(f"bf16={cfg.get('bf16')!r} is refused by Axolotl: true, false or auto; reckoned as false")
    if adapter is None:
        return Run(method="full", weight_bytes=wide, trained_bytes=wide)
    quantised: Any = "nf4" if cfg.get("load_in_4bit") else "int8" if cfg.get("load_in_8bit") else None
    if adapter == "beacon":
        values = block(cfg, "beacon")
        targets = values.get("target_modules") or ["q_proj", "k_proj", "v_proj", "o_proj"]
        if isinstance(targets, str) or values.get("exclude_modules"):
            notes.append("target_modules as a pattern, and exclude_modules, are reckoned as q, k, v and o projections")
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return Run(
            method="beacon",
            lora_rank=number(values, "rank", 0, least=0),
            lora_targets=list(targets),
            quantised=quantised,
            weight_bytes=wide,
            trained_bytes=4 if values.get("dtype") == "float32" else wide,
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
        lora_rank=number(cfg, "lora_r", 8),
        lora_targets=targets,
        saved_modules=saved,
        quantised=quantised,
        weight_bytes=wide,
        trained_bytes=4,
    )


def sharding(cfg: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """ZeRO stage, offloading, and whether float32 copies of trained bf16 weights are kept.

    Raises:
        PoSEError: a value of a wrong type.
    """
    # Adapters are in float32 themselves; beacons are as the base is.
    narrow = cfg.get("adapter") is None
    narrow = narrow or (cfg.get("adapter") == "beacon" and block(cfg, "beacon").get("dtype") != "float32")
    if cfg.get("fsdp_config") or cfg.get("fsdp_version") or cfg.get("fsdp"):
        values = block(cfg, "fsdp_config")
        offload = bool(values.get("offload_params") or values.get("fsdp_offload_params"))
        whole = values.get("reshard_after_forward", values.get("fsdp_reshard_after_forward", True))
        version = cfg.get("fsdp_version") or values.get("fsdp_version") or values.get("version")
        # Gathered weights that are kept until the backward pass are whole at its beginning. accelerate widens weights
        # under FSDP 1; under FSDP 2 Axolotl's own way of dividing them leaves bf16 as it is.
        return {"stage": 3 if whole else 2, "offload": offload, "master": narrow and str(version) != "2"}
    path = cfg.get("deepspeed")
    if not path:
        return {}
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, str) else path
    except (OSError, ValueError):
        stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(path)), 0)
        notes.append(f"deepspeed={path} cannot be read here; taken for ZeRO-{stage} by its name")
        return {"stage": stage, "master": narrow}
    zero = block(block({"deepspeed": given}, "deepspeed"), "zero_optimization")
    stage = number(zero, "stage", 0, least=0)
    if stage > 3:
        raise PoSEError(f"deepspeed: zero_optimization.stage={stage} cannot work: the stages of ZeRO are 0 to 3")
    device = block(zero, "offload_optimizer").get("device")
    return {"stage": stage, "offload": device not in (None, "none"), "master": narrow}


def optimizer(name: str, notes: list[str]) -> str:
    for known, names in _OPTIMIZERS.items():
        if name in names or name == known:
            return known
    notes.append(f"optimizer={name} is reckoned as AdamW")
    return "adamw"


def keeps_remainders(cfg: Mapping[str, Any]) -> bool:
    """Whether the optimizer keeps what bf16 weights round away of a step, or rounds by chance."""
    given = cfg.get("optim_args") or {}
    if isinstance(given, str):
        given = dict(part.partition("=")[::2] for part in given.replace(" ", "").split(","))
    asked = {name: str(value).lower() for name, value in given.items()} if isinstance(given, Mapping) else {}
    if str(cfg.get("optimizer")) in _EXACT:
        return asked.get("kahan_sum", "true") not in ("false", "0")
    return any(asked.get(name) in ("true", "1", "yes", "on") for name in _EXACT_IF)


def number(
    cfg: Mapping[str, Any], key: str, default: Any, least: float = 1, whole: bool = True, most: float = math.inf
) -> Any:
    """A number of the YAML; Raises PoSEError for what is none, below `least`, or above `most`."""
    value = cfg.get(key)
    if value is None:
        return default
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not least <= found <= most or found == math.inf or (whole and found != int(found)):
        limit = f" and at most {int(most)}" if most < math.inf else ""
        raise PoSEError(
            f"{key}={value!r} cannot work: a {'whole ' * whole}number of at least {least:g}{limit} is needed"
        )
    return int(found) if whole else found


def block(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = cfg.get(key) or {}
    if not isinstance(value, Mapping):
        raise PoSEError(f"{key}={value!r} is no block of keys; write them indented below `{key}:`")
    return value
