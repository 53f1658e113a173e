"""Read what is to be planned: an Axolotl YAML (or the same values from options) and the base's config.json."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.frameworks.axolotl_settings import likely_mistakes, require_compatible, settings_of
from pose_plugin.plan.base import base_config, overrides
from pose_plugin.plan.keys import block, number, unknown_keys
from pose_plugin.plan.memory import OPTIMIZERS, Run
from pose_plugin.plan.steps import datasets_of, steps_of
from pose_plugin.training.checks import divided
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError, did_you_mean

# The limit of the lengths in a `pose:` block.
LONGEST = 2**31 - 1
_FUSED_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")
# Optimizers that keep what bf16 rounds away, always or with an argument.
_EXACT = ("optimi_adamw", "stable_adamw", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion")
_EXACT_IF = ("bf16_stochastic_round", "use_kahan_summation")
# Axolotl's older keys of an attention; the first of them that is on counts.
_ATTENTIONS = ("xformers", "sage", "flex", "flash", "sdp", "eager")
# GPUs that read the same rows.
_PARALLEL = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree")
# Of FSDP 1, by name and by number; FSDP 2 ignores them.
_STRATEGIES = {"SHARD_GRAD_OP": 2, "2": 2, "HYBRID_SHARD_ZERO2": 2, "5": 2, "NO_SHARD": 0, "3": 0}
_ADAPTERS = ("lora", "qlora")
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Inputs:
    """Everything a plan is made from.

    Attributes:
        base: the base's name or folder.
        config: its config.json.
        settings: the `pose:` block with the trained window filled in; None if the run has no such block.
        run: what the memory of a step depends on.
        accumulate: batches of a GPU in one step.
        steps, rows: of the training; None if neither the YAML nor local data tell.
        chat: whether rows are made by a chat template.
        beacon: the values of the YAML if its adapter is beacon, else None.
        bf16: the YAML's setting that keeps trained weights in bf16, e.g. "bf16=True"; None if no steps are lost.
        learning_rate: of the YAML, if it has one.
        notes: assumptions.
        warnings: about keys and plugins.
    """

    base: str
    config: Mapping[str, Any]
    settings: PoSESettings | None
    run: Run
    accumulate: int = 1
    steps: int | None = None
    rows: int | None = None
    chat: bool = False
    beacon: Mapping[str, Any] | None = None
    bf16: str | None = None
    learning_rate: float | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def from_yaml(path: str | Path, base: str | None = None, **given: Any) -> Inputs:
    """Read an Axolotl YAML.

    Args:
        base: a folder with the base's config.json, if the YAML names a model of the Hub.
        given: `gpus`, and `steps` or `rows` instead of the YAML's; see `from_values`.

    Raises:
        PoSEError: the file cannot be read, or the base's config.json is not on this machine.
    """
    try:
        import yaml
    except ImportError:
        raise PoSEError("reading a YAML needs PyYAML: pip install pyyaml, or give the settings as options") from None
    path = Path(path)
    if not path.is_file():
        raise PoSEError(f"{path} is not a file; give an Axolotl YAML, or --target-length and --train-length")
    try:
        cfg = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PoSEError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(cfg, dict) or not cfg.get("base_model") or not isinstance(cfg["base_model"], str):
        raise PoSEError(f"{path} has no base_model; give an Axolotl YAML")
    inputs = from_values(cfg, base, **given)
    plugins = cfg.get("plugins") or []
    if not isinstance(plugins, list):
        raise PoSEError(f"plugins={plugins!r} is not a list; write plugins: [pose_plugin]")
    warnings = unknown_keys(cfg)
    if inputs.settings:
        warnings += likely_mistakes(_with_numbers(cfg), inputs.settings)
    if inputs.beacon:
        warnings += _without_effect(cfg)
    if (inputs.settings or inputs.beacon) and not any(str(name).startswith("pose_plugin") for name in plugins):
        warnings.append(FORGOTTEN_LINE)
    return replace(inputs, warnings=warnings)


def from_values(
    cfg: Mapping[str, Any],
    base: str | None = None,
    gpus: int = 1,
    steps: int | None = None,
    rows: int | None = None,
    apart: bool = False,
) -> Inputs:
    """Read the values of an Axolotl YAML.

    Args:
        cfg: the values by their keys.
        base: a folder with the base's config.json, if `base_model` is a name of the Hub.
        gpus: number of GPUs, which no YAML names.
        steps: of the training; None: `max_steps`, or epochs of the rows.
        rows: of the data set; None: the lines of its local .jsonl files.
        apart: whether each epoch is divided into steps separately; see `steps_of`.

    Raises:
        PoSEError: a value of a wrong type, or the base's config.json is not on this machine.
    """
    notes: list[str] = []
    name = str(cfg["base_model"])
    place = str(base or cfg.get("base_model_config") or name)
    config = base_config(place, name)
    beacon = cfg if cfg.get("adapter") == "beacon" else None
    if beacon is not None or cfg.get("beacon") is not None:
        _check_beacon(cfg, notes)
    settings, window = _settings(cfg)
    config |= overrides(cfg, config, settings)
    micro, accumulate, planned = _batches(cfg)
    run = replace(
        _method(cfg, notes),
        **_sharding(cfg, notes),
        gpus=gpus,
        gpus_of_a_row=_gpus_of_a_row(cfg, gpus, notes),
        rows=micro,
        window=window,
        optimizer=_optimizer(str(cfg.get("optimizer") or "adamw_torch_fused"), notes),
        checkpointing=bool(cfg.get("gradient_checkpointing")),
        eager=_attention(cfg) == "eager",
        fused_loss=any(cfg.get(key) for key in _FUSED_LOSSES),
    )
    place = str(cfg.get("tokenizer_config") or place)
    rows_of_step = (micro * accumulate * run.groups, planned * run.groups)
    steps, rows = steps_of(cfg, rows_of_step, steps, rows, notes, place, apart)
    return Inputs(
        base=name,
        config=config,
        settings=settings,
        run=run,
        accumulate=accumulate,
        steps=steps,
        rows=rows,
        chat=any("chat_template" in str(each.get("type")) for each in datasets_of(cfg)),
        beacon=beacon,
        bf16=lossy_bf16(cfg, run),
        learning_rate=number(cfg, "learning_rate", None, least=0, whole=False),
        notes=notes,
    )


def _batches(cfg: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the rows of a batch, the batches of a step, and the rows that Axolotl takes for those of a step."""
    micro, size = number(cfg, "micro_batch_size", 1), number(cfg, "batch_size", None)
    # Axolotl divides batch_size only if this key is null; without the key, 1 is its default.
    shared = size // micro if size and "gradient_accumulation_steps" in cfg else 0
    accumulate = number(cfg, "gradient_accumulation_steps", shared or 1)
    return micro, accumulate, size or micro * accumulate


def _settings(cfg: Mapping[str, Any]) -> tuple[PoSESettings | None, int]:
    """Return the `pose:` block, and the trained window in tokens."""
    whole = _with_numbers(cfg)
    settings, window = None, whole["sequence_len"]
    if cfg.get("pose") is not None:
        settings = settings_of(whole)
        require_compatible(whole, settings)
        window = settings.train_length or window
    if not window:
        raise PoSEError("the YAML has neither sequence_len nor pose.train_length, the trained window in tokens")
    return settings, int(window)


def _with_numbers(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the YAML with its lengths as numbers, as Axolotl reads them."""
    lengths = ("sequence_len", "eval_sequence_len")
    return {**cfg, **{key: number(cfg, key, None, most=LONGEST) for key in lengths}}


def _check_beacon(cfg: Mapping[str, Any], notes: list[str]) -> None:
    """Check a `beacon:` block, and the keys it cannot go with, by the function that the run uses.

    Raises:
        PoSEError: as the run would; and for values that must be blocks, which Axolotl itself would refuse.
    """
    for key in ("pose", "gradient_checkpointing_kwargs", "bnb_config_kwargs", "overrides_of_model_kwargs"):
        block(cfg, key)
    try:
        from pose_plugin.frameworks.axolotl_beacon import prepare
    except ImportError:
        notes.append('the `beacon:` block is not checked: PEFT is missing, pip install "peft>=0.20"')
        return
    # On a copy, because it changes keys as the run needs them.
    prepare(copy.deepcopy(dict(cfg)))


def _without_effect(cfg: Mapping[str, Any]) -> list[str]:
    """Return the run's warnings about keys of other adapters; none if PEFT is missing."""
    try:
        from pose_plugin.frameworks.axolotl_beacon import without_effect
    except ImportError:
        return []
    return without_effect(cfg)


# -- what the memory of a step depends on ----------------------------------------------------------------------------


def _method(cfg: Mapping[str, Any], notes: list[str]) -> Run:
    """Return how weights are kept and which are trained. Assumptions are added to `notes`.

    Raises:
        PoSEError: a value of a wrong type.
    """
    adapter = cfg.get("adapter")
    # Without bf16 and fp16 Axolotl loads and computes in float32.
    wide = 2 if cfg.get("bf16") in (True, "auto", None) or cfg.get("bfloat16") or cfg.get("fp16") else 4
    if cfg.get("bf16") not in (True, False, "auto", None):
        notes.append(f"bf16={cfg.get('bf16')!r} is refused by Axolotl (true, false or auto); estimated as for false")
    if adapter is None:
        return Run(method="full", weight_bytes=wide, trained_bytes=wide)
    quantised: Any = "int8" if cfg.get("load_in_8bit") else None
    if cfg.get("load_in_4bit"):
        double = block(cfg, "bnb_config_kwargs").get("bnb_4bit_use_double_quant", True)
        quantised = "nf4" if double else "nf4-single"
    base = Run(quantised=quantised, quantised_experts=bool(cfg.get("quantize_moe_experts")), weight_bytes=wide)
    if adapter == "beacon":
        values = block(cfg, "beacon")
        if values.get("exclude_modules"):
            notes.append("beacon.exclude_modules: the excluded modules are counted as if they were trained")
        return replace(
            base,
            method="beacon",
            lora_rank=number(values, "rank", 0, least=0),
            lora_targets=values.get("target_modules") or _PROJECTIONS,
            trained_bytes=4 if values.get("dtype") == "float32" else wide,
        )
    if adapter not in _ADAPTERS:
        notes.append(f"adapter={adapter}{did_you_mean(str(adapter), _ADAPTERS)}: memory is estimated as for LoRA")
    elif adapter == "qlora" and not quantised:
        notes.append("adapter=qlora without load_in_4bit: true is refused by Axolotl; estimated as for LoRA")
    saved = cfg.get("lora_modules_to_save") or []
    if not isinstance(saved, list):
        raise PoSEError(f"lora_modules_to_save={saved!r} is not a list; write [{saved}]")
    targets = "all-linear" if cfg.get("lora_target_linear") else cfg.get("lora_target_modules") or "all-linear"
    methods: dict[Any, Any] = {"nf4": "qlora", "nf4-single": "qlora", "int8": "8bit", None: "lora"}
    return replace(
        base,
        method=methods[quantised],
        lora_rank=number(cfg, "lora_r", 8),
        lora_targets=targets,
        saved_modules=saved,
        trained_bytes=4,
    )


def _sharding(cfg: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the ZeRO stage, offloading, and whether float32 copies of trained bf16 weights are kept.

    Raises:
        PoSEError: a value of a wrong type.
    """
    # Adapters are in float32 themselves; beacons have the base's type.
    narrow = cfg.get("adapter") is None
    narrow = narrow or (cfg.get("adapter") == "beacon" and block(cfg, "beacon").get("dtype") != "float32")
    if cfg.get("fsdp_config") or cfg.get("fsdp_version") or cfg.get("fsdp"):
        values = block(cfg, "fsdp_config")
        offload = bool(values.get("offload_params") or values.get("fsdp_offload_params"))
        reshard = values.get("reshard_after_forward", values.get("fsdp_reshard_after_forward", True))
        version = str(cfg.get("fsdp_version") or values.get("fsdp_version") or values.get("version"))
        stage = 3 if reshard else 2
        if version != "2":
            strategy = values.get("sharding_strategy") or values.get("fsdp_sharding_strategy")
            stage = _STRATEGIES.get(str(strategy or reshard).upper(), stage)
        # Without resharding, gathered weights stay until the backward pass, so all are whole when it begins.
        # accelerate widens weights under FSDP 1; under FSDP 2 Axolotl shards the model itself and leaves bf16 as it is.
        return {"stage": stage, "offload": offload, "master": narrow and version != "2"}
    path = cfg.get("deepspeed")
    if not path:
        return {}
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, str) else path
    except (OSError, ValueError):
        stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(path)), 0)
        # Axolotl's …_cpuoffload_params.json leaves the optimizer on the GPU.
        offload = "offload" in str(path) and "params" not in str(path)
        kept = ", with the optimizer offloaded," if offload else ""
        notes.append(f"deepspeed={path} cannot be read here; assumed to be ZeRO-{stage}{kept} by its name")
        return {"stage": stage, "offload": offload, "master": narrow}
    zero = block(block({"deepspeed": given}, "deepspeed"), "zero_optimization")
    stage = number(zero, "stage", 0, least=0, most=3)
    device = block(zero, "offload_optimizer").get("device")
    return {"stage": stage, "offload": device not in (None, "none"), "master": narrow}


def _attention(cfg: Mapping[str, Any]) -> str | None:
    """Return the attention that the YAML names; None if it names none."""
    older = (name for name in _ATTENTIONS if cfg.get(f"{name}_attention"))
    return cfg.get("attn_implementation") or next(older, None)


def _gpus_of_a_row(cfg: Mapping[str, Any], gpus: int, notes: list[str]) -> int:
    """Return how many GPUs read the same rows, because rows or projections are split over them.

    Raises:
        PoSEError: all GPUs cannot be divided into such groups.
    """
    sizes = divided({key: number(cfg, key, None, least=0) for key in _PARALLEL})
    together = math.prod(sizes.values())
    named = " and ".join(f"{key}={size}" for key, size in sizes.items())
    if gpus % together:
        raise PoSEError(f"{named} needs a multiple of {together} GPUs, but {gpus} are given; change --gpus")
    if sizes:
        notes.append(f"memory is estimated without {named}, so each GPU may need less")
    return together


def _optimizer(name: str, notes: list[str]) -> str:
    """Return the name in `memory.OPTIMIZERS` of e.g. "paged_adamw_8bit"."""
    kinds = {"adam": "adamw", "lion": "lion", "adafactor": "adafactor", "sgd": "sgd"}
    kind = next((kind for part, kind in kinds.items() if part in name), None)
    if kind is None:
        notes.append(f"optimizer={name}: memory is estimated as for AdamW")
        return "adamw"
    small = next((f"{kind}_{bits}" for bits in ("8bit", "4bit") if bits in name), kind)
    return small if small in OPTIMIZERS else kind


def lossy_bf16(cfg: Mapping[str, Any], run: Run) -> str | None:
    """Return the setting that keeps trained weights in bf16, if nothing keeps what bf16 rounds away of a step."""
    setting = next((f"{key}={cfg[key]}" for key in ("bf16", "bfloat16") if cfg.get(key)), None)
    if setting is None and cfg.get("bf16") is None:
        setting = "bf16=auto, the default,"
    lossless = cfg.get("fp16") or run.master or run.trained_bytes != 2 or _exact_optimizer(cfg)
    return None if lossless else setting


def _exact_optimizer(cfg: Mapping[str, Any]) -> bool:
    """Return whether the optimizer keeps what bf16 rounds away of a step, or rounds at random."""
    given = cfg.get("optim_args") or {}
    if isinstance(given, str):
        given = dict(part.partition("=")[::2] for part in given.replace(" ", "").split(","))
    options = {name: str(value).lower() for name, value in given.items()} if isinstance(given, Mapping) else {}
    if str(cfg.get("optimizer")) in _EXACT:
        return options.get("kahan_sum", "true") not in ("false", "0")
    return any(options.get(name) in ("true", "1", "yes", "on") for name in _EXACT_IF)
