"""Axolotl: `adapter: beacon` and a `beacon:` block, whose keys are the fields of BeaconConfig.

    plugins: [pose_plugin]
    adapter: beacon
    beacon: {interval: 1024, ratios: [2, 4, 8, 16, 32]}
    sequence_len: 8192          # the longest text; it is read in intervals

`pose: {target_length: …, rope: yarn, sampler: none}` in addition stretches the window itself, as in Appendix C of the
paper (arXiv 2401.03462).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pose_plugin.training.checks import refuse_settings, require_undivided
from pose_plugin.utils.errors import PoSEError, did_you_mean
from pose_plugin.utils.log import log

ADAPTER = "beacon"


_PACKED = "several texts in one row would be condensed into one another. Set it to false"
_FSDP = "FSDP keeps parameters divided where beacons need them whole. Use DDP or DeepSpeed ZeRO-2/3"
_UNTRIED = "it has not been tested"
_KERNEL = "Axolotl's kernels are for layers of LoRA. Remove it"
_REFUSED = {
    "sample_packing": _PACKED,
    "eval_sample_packing": _PACKED,
    "batch_flattening": _PACKED,
    "load_in_8bit": "Axolotl only quantises for adapter: lora and qlora, so the base would silently stay unquantised. "
    "Use load_in_4bit, or train through TRL with peft_config=BeaconConfig(…)",
    "gptq": _UNTRIED,
    "merge_lora": "beacon projections only act on beacon rows and cannot be merged. Load the adapter as it is: import "
    "pose_plugin.beacon, then peft.PeftModel.from_pretrained(base, output_dir)",
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), _KERNEL),
    "relora": "a Beacon adapter cannot be merged, which ReLoRA does at each restart",
    "activation_offloading": _UNTRIED,
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "rl": "preference trainers read the logits of two answers in one batch, which has not been tested",
    "pretraining_dataset": "streamed rows have no lengths to group by. Use `datasets:` with type: completion",
    "processor_type": "multimodal rows cannot be condensed. Train the text model",
    "curriculum_sampling": "rows are ordered by interval count",
    "group_by_length": "rows are ordered by interval count already",
}
_DIVIDED = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")


def is_beacon(cfg: Any) -> bool:
    return cfg.get("adapter") == ADAPTER


def beacon_config(block: Any) -> Any:
    """Return the BeaconConfig of a `beacon:` block; None and an empty block mean the defaults.

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
        close = did_you_mean(unknown[0], known)
        raise PoSEError(
            f"beacon.{unknown[0]} is not known{close}; the keys of `beacon:` are {', '.join(sorted(known))}"
        )
    try:
        return BeaconConfig(**given)
    except PoSEError as error:
        raise PoSEError(f"beacon.{error}") from error


def prepare(cfg: Any) -> None:
    """Check the YAML before anything is loaded, and set what Axolotl would set wrongly.

    Raises:
        PoSEError: naming the key, its value and the fix.
    """
    if not is_beacon(cfg):
        if cfg.get("beacon") is not None:
            raise PoSEError(
                f"adapter={cfg.get('adapter')!r}, but the config has a `beacon:` block. Set adapter: beacon, or remove "
                "the block"
            )
        return
    beacon_config(cfg.get("beacon"))
    refuse_settings(cfg.get, _REFUSED, "adapter: beacon")
    require_undivided({key: cfg.get(key) for key in _DIVIDED})
    pose = cfg.get("pose")
    # A `pose:` that is not a mapping is refused by `parse_settings`.
    if isinstance(pose, Mapping) and pose.get("sampler", "pose") != "none":
        raise PoSEError(
            f"pose.sampler={pose.get('sampler', 'pose')} skips positions, but beacons count positions inside their own "
            "window. With `beacon:`, the `pose:` block can only stretch the window: pose: {target_length: …, rope: "
            "yarn, sampler: none}"
        )
    if cfg.get("load_in_4bit"):
        _quantise(cfg)
    if cfg.get("gradient_checkpointing"):
        _checkpoint(cfg)


def without_effect(cfg: Any) -> list[str]:
    """Return a sentence about keys of other adapters, e.g. left over from a run with LoRA."""
    theirs = [
        str(key)
        for key, value in cfg.items()
        if str(key).startswith(("lora_", "peft_")) and key != "lora_model_dir" and value
    ]
    if not is_beacon(cfg) or not theirs:
        return []
    return [
        f"{', '.join(theirs)}: no effect with adapter: beacon, whose settings are in the `beacon:` block, e.g. rank "
        "and target_modules. Remove them"
    ]


def _checkpoint(cfg: Any) -> None:
    """Ask for checkpointing that is not reentrant: Axolotl takes reentrant by default.

    Raises:
        PoSEError: the YAML asks for another kind.
    """
    if cfg["gradient_checkpointing"] is not True:
        raise PoSEError(
            f"gradient_checkpointing={cfg['gradient_checkpointing']!r} is Axolotl's own kind of checkpointing, which "
            "is not tested with beacons. Set gradient_checkpointing: true"
        )
    given = cfg.get("gradient_checkpointing_kwargs") or {}
    if not isinstance(given, Mapping):
        raise PoSEError(f"gradient_checkpointing_kwargs={given!r} must be a block, e.g. {{use_reentrant: false}}")
    if given.get("use_reentrant"):
        raise PoSEError(
            "gradient_checkpointing_kwargs.use_reentrant=True gives every beacon parameter a zero gradient, with an "
            "unchanged loss. Set use_reentrant: false"
        )
    cfg["gradient_checkpointing_kwargs"] = {**given, "use_reentrant": False}


def _quantise(cfg: Any) -> None:
    """Ask transformers for a 4-bit base as Axolotl does for qlora.

    Axolotl only quantises for adapter: lora and qlora, and would silently load the base unquantised.
    """
    asked = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": _compute_dtype(cfg),
        **dict(cfg.get("bnb_config_kwargs") or {}),
    }
    given = dict(cfg.get("overrides_of_model_kwargs") or {})
    cfg["overrides_of_model_kwargs"] = {"quantization_config": asked, **given}
    cfg["load_in_4bit"] = None
    log.info("beacons: the base is loaded in 4 bits, %s", {k: v for k, v in asked.items() if k != "load_in_4bit"})


def _compute_dtype(cfg: Any) -> str:
    """Return the name of the dtype that Axolotl will compute in. It decides only after this, by the same rules."""
    from transformers.utils import is_torch_bf16_gpu_available

    bf16, fp16 = cfg.get("bf16", "auto"), cfg.get("fp16")
    if bf16 == "auto":
        bf16 = not fp16 and is_torch_bf16_gpu_available()
        fp16 = fp16 or (not bf16 and fp16 is None)
    if bf16 or cfg.get("bfloat16"):
        return "bfloat16"
    return "float16" if fp16 or cfg.get("float16") else "float32"


def note_window(model: Any) -> None:
    """Store the model's window before Axolotl raises max_position_embeddings to sequence_len.

    Texts for beacons are longer than the window, but no position may pass its end.
    """
    model._built_window = getattr(model.config, "max_position_embeddings", None)


def load(model: Any, cfg: Any, inference: bool = False, config_only: bool = False) -> tuple[Any, Any] | None:
    """Return (model with the adapter, its config) for Axolotl's hook `load_adapter`; None for other adapters."""
    if not is_beacon(cfg):
        return None
    from peft import PeftModel, get_peft_model

    from pose_plugin.beacon import find_tuner

    config = beacon_config(cfg.get("beacon"))
    if config_only:
        return None, config
    window = getattr(model, "_built_window", None)
    if window and model.config.max_position_embeddings != window:
        log.info("beacons: the window stays %d, Axolotl's %d is the longest text", window, cfg.get("sequence_len"))
        model.config.max_position_embeddings = window
    loaded: Any
    if cfg.get("lora_model_dir"):
        loaded = PeftModel.from_pretrained(model, cfg.get("lora_model_dir"), is_trainable=not inference)
        saved = find_tuner(loaded).active_config
        _require_same(cfg, saved, config)
        config = saved
    elif inference:
        raise untrained(cfg)
    else:
        loaded = get_peft_model(model, config)
    log.info("beacons: %s", {key: getattr(config, key) for key in dict(cfg.get("beacon") or {})})
    loaded.print_trainable_parameters()
    return loaded, config


def untrained(cfg: Any) -> PoSEError:
    """Return the error for an answer or a score of an adapter that was made just now."""
    return PoSEError(
        f"lora_model_dir=None: the adapter ({cfg.get('adapter')}) would be an untrained one. Name the trained one: "
        f"--lora-model-dir {cfg.get('output_dir') or 'FOLDER'}"
    )


def _require_same(cfg: Any, saved: Any, asked: Any) -> None:
    """Check the keys of the `beacon:` block against the adapter that is trained further.

    Raises:
        PoSEError: a key differs, and would have no effect.
    """
    for key in dict(cfg.get("beacon") or {}):
        before, now = getattr(saved, key), getattr(asked, key)
        if key in ("target_modules", "exclude_modules"):
            before, now = _names(before), _names(now)
        if before != now:
            raise PoSEError(
                f"beacon.{key}={now!r}, but the adapter in lora_model_dir={cfg.get('lora_model_dir')} was trained with "
                f"{before!r}. Remove the key, or train a new adapter without lora_model_dir"
            )


def _names(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else sorted(value)
