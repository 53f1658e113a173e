"""Write a complete Axolotl YAML for a base, a data set and a number of GPUs, with the reason for each choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pose_plugin.plan.config_reader import base_config, from_values
from pose_plugin.plan.memory import architecture, memory
from pose_plugin.rope.plan import RopePlan, plan_rope
from pose_plugin.utils.errors import PoSEError

METHODS = ("full", "lora", "qlora")
# Rows of this length fit most GPUs, and PoSE needs no longer ones.
_USUAL_WINDOW = 4096
# Rows of one step over all GPUs, as in the PoSE paper.
_ROWS_OF_STEP = 64
# The estimate leaves out kernels' scratch memory and fragmentation.
_USABLE = 0.85
_CHAT = ("roles_to_train: [assistant]", "loss on the answers"), ("train_on_eos: turn", "")
# How Axolotl reads rows that have this key: lines of the data set's block, each with its comment.
_DATA: dict[str, tuple[tuple[str, str], ...]] = {
    "input_ids": (("type:", "the rows are token ids already"),),
    "messages": (("type: chat_template", ""), ("field_messages: messages", ""), *_CHAT),
    "conversations": (
        ("type: chat_template", ""),
        ("field_messages: conversations", ""),
        ("message_property_mappings: {role: from, content: value}", ""),
        *_CHAT,
    ),
    "text": (("type: completion", ""), ("field: text", "")),
    "instruction": (("type: alpaca", ""),),
}


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


def write_config(wish: Wish) -> str:
    """Return the text of a YAML that `axolotl train` and `pose-plugin plan` take as it is.

    Raises:
        PoSEError: the base or the data cannot be read, the target does not exceed the base's window, or no method fits
            into the memory.
    """
    import yaml

    config = base_config(wish.place or wish.base, wish.base)
    rope = plan_rope(config, wish.target)
    if wish.window is None:
        wish = replace(wish, window=min(rope.original_length, _USUAL_WINDOW, wish.target))
    row = _first_row(Path(wish.data))
    methods = [wish.method] if wish.method else list(METHODS[: 2 if wish.gpus == 0 else 3])
    needed = {}
    for method in methods:
        text = _text(wish, method, rope, row, config)
        run = from_values(yaml.safe_load(text), wish.place, gpus=max(wish.gpus, 1), steps=1).run
        needed[method] = memory(architecture(config), run).total / 2**30
        # A CPU has what it has: the first method is taken, and the plan shows the memory.
        if wish.gpus == 0 or wish.method or needed[method] <= wish.gpu_gib * _USABLE:
            return text.replace("MEMORY", f"about {needed[method]:.1f} GiB")
    shown = ", ".join(f"{method} {size:.0f}" for method, size in needed.items())
    raise PoSEError(
        f"--gpu-memory {wish.gpu_gib:g}: no method fits ({shown} GiB per GPU); give more GPUs, or a shorter "
        f"--train-length than {wish.window}"
    )


def _first_row(file: Path) -> str:
    """Return the key by which the rows of a JSONL file are read.

    Raises:
        PoSEError: there is no such file, or its first row has none of the known keys.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            values = json.loads(next((line for line in lines if line.strip()), "{}"))
    except (OSError, ValueError) as error:
        raise PoSEError(f"--data {file}: {error}; give a JSONL file") from None
    found = [key for key in _DATA if isinstance(values, Mapping) and key in values]
    if not found:
        raise PoSEError(f"--data {file}: the first row has none of the keys {', '.join(_DATA)}; rename its fields")
    return found[0]


def _text(wish: Wish, method: str, rope: RopePlan, row: str, config: Mapping[str, Any]) -> str:
    """Return the YAML; MEMORY stands for the estimate."""
    gpus = max(wish.gpus, 1)
    accumulate = max(1, _ROWS_OF_STEP // gpus)
    chat = row in ("messages", "conversations")
    lines = [
        (f"# {wish.base} from {rope.original_length} to {wish.target} tokens, written by `pose-plugin init`.", ""),
        (f"# Memory of each {'GPU' if wish.gpus else 'process'}: MEMORY, as `pose-plugin plan` estimates.", ""),
        ("", ""),
        (f"base_model: {wish.base}", ""),
        (f"sequence_len: {wish.window}", "the trained window, and the longest conversation")
        if chat
        else (f"sequence_len: {wish.target}", "the tokens of a document that are kept"),
        ("", ""),
        ("plugins: [pose_plugin]", ""),
        ("pose:", ""),
        (f"  target_length: {wish.target}", f"{wish.target / rope.original_length:g} times the base's window"),
        *([] if chat else [(f"  train_length: {wish.window}", "the trained window: no step sees more tokens")]),
        ("  rope: yarn", "lost least before any training, see docs/smollm2.md"),
        ("  unskipped_ratio: 0.1", "a tenth of the rows keep plain positions, for short texts"),
        ("  sampler: turns", "positions jump between turns only")
        if chat
        else ("  content: skip", "of longer documents, each chunk from a random place, in order"),
        ("", ""),
        *_method(method),
        ("datasets:", ""),
        (f"  - path: {wish.data}", ""),
        ("    ds_type: json", ""),
        *((f"    {text}", comment) for text, comment in _DATA[row]),
        (f"dataset_prepared_path: {wish.output}/prepared", ""),
        (f"output_dir: {wish.output}", ""),
        ("excess_length_strategy: drop" if chat else "excess_length_strategy: truncate", ""),
        ("", ""),
        ("micro_batch_size: 1", ""),
        (f"gradient_accumulation_steps: {accumulate}", f"× 1 × {gpus} = {accumulate * gpus} rows per step"),
        ("num_epochs: 1", ""),
        (f"learning_rate: {'2.0e-5' if method == 'full' else '1.0e-4'}", ""),
        ("lr_scheduler: cosine", ""),
        ("warmup_steps: 10", ""),
        *_hardware(wish, method, config),
        ("logging_steps: 10", ""),
        ("saves_per_epoch: 2", ""),
    ]
    return "".join(f"{text:<38} # {comment}\n" if comment else f"{text}\n" for text, comment in lines)


def _method(method: str) -> list[tuple[str, str]]:
    if method == "full":
        return []
    return [
        *([("load_in_4bit: true", "")] if method == "qlora" else []),
        (f"adapter: {method}", ""),
        ("lora_r: 32", ""),
        ("lora_alpha: 64", ""),
        ("lora_dropout: 0.0", ""),
        ("lora_target_linear: true", ""),
        ("lora_mlp_kernel: false", "Axolotl's kernels for LoRA need a GPU with Triton"),
        ("lora_qkv_kernel: false", ""),
        ("lora_o_kernel: false", ""),
        ("", ""),
    ]


def _hardware(wish: Wish, method: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    if wish.gpus == 0:
        off = [(f"{key}: false", "") for key in ("bf16", "fp16", "tf32")]
        return [("optimizer: adamw_torch", ""), *off, ("attn_implementation: sdpa", "")]
    lines = [
        ("bf16: true", ""),
        ("gradient_checkpointing: true", ""),
        ("attn_implementation: sdpa", "flash_attention_2, if flash-attn is installed, is faster"),
    ]
    if method != "full":
        return [(f"optimizer: {'adamw_bnb_8bit' if method == 'qlora' else 'adamw_torch'}", ""), *lines]
    lines += [
        ("optimizer: adamw_torch_8bit", "the weights are bf16, which loses small steps;"),
        ("optim_args: {bf16_stochastic_round: true}", "this rounding takes them on average"),
    ]
    if wish.gpus > 1:
        lines += [
            ("fsdp_version: 2", "each GPU holds a part of the weights"),
            ("fsdp_config:", ""),
            ("  auto_wrap_policy: TRANSFORMER_BASED_WRAP", ""),
            (f"  transformer_layer_cls_to_wrap: {_layer_class(config)}", ""),
            ("  cpu_ram_efficient_loading: true", ""),
            ("  state_dict_type: FULL_STATE_DICT", "saves the whole model"),
            ("  reshard_after_forward: true", ""),
        ]
    return lines


def _layer_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class of the base's decoder layers, which FSDP wraps."""
    import torch
    from transformers import AutoModelForCausalLM

    from pose_plugin.rope.read import as_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(as_config(config))
    return sorted(model._no_split_modules)[0]
