"""Axolotl: `adapter: beacon` and a `beacon:` block, whose keys are the fields of BeaconConfig.

    plugins: [pose_plugin]
    adapter: beacon
    beacon: {interval: 1024, ratios: [2, 4, 8, 16, 32]}
    sequence_len: 8192          # the longest text; it is read in intervals

With `pose: {target_length: …, rope: yarn, sampler: none}` beside it the window itself is stretched as well, as in the
paper's Appendix C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

ADAPTER = "beacon"


def is_beacon(cfg: Any) -> bool:
    return cfg.get("adapter") == ADAPTER


def beacon_config(block: Any) -> Any:
    """BeaconConfig from a `beacon:` block; None or an empty block takes the defaults.

    Raises:
        PoSEError: an unknown key, or a value that cannot work.
    """
    from peft import PeftConfig

    from pose_plugin.beacon import BeaconConfig

    if block is not None and not isinstance(block, Mapping):
        raise PoSEError(f"beacon={block!r} must be a block of settings, e.g. beacon: {{interval: 1024}}")
    given = dict(block or {})
    known = [field.name for field in dataclasses.fields(BeaconConfig)]
    known = [name for name in known if name not in {field.name for field in dataclasses.fields(PeftConfig)}]
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise PoSEError(f"beacon.{unknown[0]} is not known; the keys of `beacon:` are {', '.join(sorted(known))}")
    try:
        return BeaconConfig(**given)
    except PoSEError as error:
        raise PoSEError(f"beacon.{error}") from error


def prepare(cfg: Any) -> None:
    """Checks the YAML before anything is loaded, and sets what Axolotl would set wrongly.

    Raises:
        PoSEError: naming the key, its value and the way out.
    """
    if not is_beacon(cfg):
        if cfg.get("beacon") is not None:
            raise PoSEError(
                f"the config has a `beacon:` block, but adapter={cfg.get('adapter')!r}: add adapter: beacon"
            )
        return
    beacon_config(cfg.get("beacon"))
    for key, why in _REFUSED.items():
        if cfg.get(key):
            raise PoSEError(f"{key}={cfg.get(key)!r} cannot go with adapter: beacon: {why}")
    for key in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"):
        if cfg.get(key) not in (None, 0, 1):
            raise PoSEError(
                f"{key}={cfg.get(key)} divides rows or projections over devices, and beacons read a row in intervals "
                f"with whole projections. Set {key}: 1: DDP or ZeRO uses the devices"
            )
    if cfg.get("load_in_4bit"):
        _quantise(cfg)
    pose = cfg.get("pose")
    # What is no mapping is refused where it is read.
    if isinstance(pose, Mapping) and pose.get("sampler", "pose") != "none":
        raise PoSEError(
            f"pose.sampler={pose.get('sampler', 'pose')} skips positions, and beacons count positions inside their own "
            "window. Beside `beacon:` the `pose:` block can only stretch the window: pose: {target_length: …, rope: "
            "yarn, sampler: none}"
        )
    if cfg.get("gradient_checkpointing"):
        given = cfg.get("gradient_checkpointing_kwargs") or {}
        if not isinstance(given, Mapping):
            raise PoSEError(f"gradient_checkpointing_kwargs={given!r} is no block; write {{use_reentrant: false}}")
        if given.get("use_reentrant"):
            raise PoSEError(
                "gradient_checkpointing_kwargs.use_reentrant=True gives every beacon parameter a zero gradient, with "
                "an unchanged loss. Write use_reentrant: false"
            )
        # Axolotl takes true where nothing is said.
        cfg["gradient_checkpointing_kwargs"] = {**given, "use_reentrant": False}
        if cfg["gradient_checkpointing"] is not True:
            raise PoSEError(
                f"gradient_checkpointing={cfg['gradient_checkpointing']!r} is Axolotl's own way of checkpointing, "
                "which has not been tried with beacons. Write gradient_checkpointing: true"
            )


def _quantise(cfg: Any) -> None:
    """Axolotl quantises for adapter: lora and qlora only, and would load the base unquantised, without a word: what it
    would say for qlora is said to transformers instead."""
    dtype = "bfloat16" if cfg.get("bf16") else "float16" if cfg.get("fp16") else "float32"
    asked = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        **dict(cfg.get("bnb_config_kwargs") or {}),
    }
    given = dict(cfg.get("overrides_of_model_kwargs") or {})
    cfg["overrides_of_model_kwargs"] = {"quantization_config": asked, **given}
    cfg["load_in_4bit"] = None
    log.info("beacons: the base is loaded in 4 bits, %s", {k: v for k, v in asked.items() if k != "load_in_4bit"})


_REFUSED = {
    "sample_packing": "several texts in a row would be condensed into one another. Write sample_packing: false",
    "eval_sample_packing": "several texts in a row would be condensed into one another. Write false",
    "load_in_8bit": "Axolotl quantises for adapter: lora and qlora only and would load the base unquantised, without "
    "a word. Write load_in_4bit, or train through TRL with peft_config=BeaconConfig(…)",
    "gptq": "it has not been tried",
    "merge_lora": "beacon projections act on beacon rows only and cannot be merged. Load the adapter as it is: "
    "import pose_plugin.beacon, then peft.PeftModel.from_pretrained(base, output_dir)",
    "relora": "a Beacon adapter cannot be merged, which ReLoRA does at each restart",
    "activation_offloading": "it has not been tried",
    "fsdp": "FSDP keeps parameters divided where beacons need them. Use DDP or DeepSpeed ZeRO-2/3",
    "fsdp_config": "FSDP keeps parameters divided where beacons need them. Use DDP or DeepSpeed ZeRO-2/3",
    "rl": "preference trainers read logits of both answers in one batch, which has not been tried",
    "pretraining_dataset": "streamed rows have no lengths to group by. Use `datasets:` with type: completion",
    "processor_type": "multimodal rows cannot be condensed. Train the text model",
    "curriculum_sampling": "rows are ordered by interval count",
    "group_by_length": "rows are ordered by interval count already",
}


def note_window(model: Any) -> None:
    """Called before Axolotl raises max_position_embeddings to sequence_len: beacons' texts are longer than the window,
    whose end no position may pass."""
    model._built_window = getattr(model.config, "max_position_embeddings", None)


def load(model: Any, cfg: Any, inference: bool = False, config_only: bool = False) -> tuple[Any, Any] | None:
    """Axolotl's `load_adapter` hook: (model with the adapter, its config); None for an adapter that is not ours."""
    if not is_beacon(cfg):
        return None
    from peft import PeftModel, get_peft_model

    from pose_plugin.beacon import find_tuner

    config = beacon_config(cfg.get("beacon"))
    if config_only:
        return None, config
    loaded: Any
    window = getattr(model, "_built_window", None)
    if window and model.config.max_position_embeddings != window:
        log.info("beacons: the window stays %d, Axolotl's %d is the longest text", window, cfg.get("sequence_len"))
        model.config.max_position_embeddings = window
    if cfg.get("lora_model_dir"):
        loaded = PeftModel.from_pretrained(model, cfg.get("lora_model_dir"), is_trainable=not inference)
        saved = find_tuner(loaded).active_config
        for key in dict(cfg.get("beacon") or {}):
            before, now = getattr(saved, key), getattr(config, key)
            if key in ("target_modules", "exclude_modules"):
                before, now = _names(before), _names(now)
            if before != now:
                raise PoSEError(
                    f"beacon.{key}={now!r}, but the adapter in lora_model_dir={cfg.get('lora_model_dir')} was trained "
                    f"with {before!r}. Leave the key out, or train a new adapter without lora_model_dir"
                )
        config = saved
    else:
        loaded = get_peft_model(model, config)
    log.info("beacons: %s", {k: v for k, v in dataclasses.asdict(config).items() if k in dict(cfg.get("beacon") or {})})
    loaded.print_trainable_parameters()
    return loaded, config


def _names(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else sorted(value)
