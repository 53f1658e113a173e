"""Write the choices of `pose-plugin init` as an Axolotl YAML."""

from __future__ import annotations

from typing import Any

from pose_plugin.plan.init_setup import Setup, one_line

Lines = list[tuple[str, str]]


def write(setup: Setup) -> str:
    """Return the YAML."""
    why = setup.reasons
    lines: Lines = [
        *((f"# {one_line(each)}", "") for each in setup.title),
        ("", ""),
        (f"base_model: {_scalar(setup.base)}", ""),
        (f"sequence_len: {setup.window}", why["train_length"])
        if setup.chat
        else (f"sequence_len: {setup.target}", "the tokens of a document that are kept"),
        ("", ""),
        ("plugins: [pose_plugin]", ""),
        ("pose:", ""),
        (f"  target_length: {setup.target}", why["target_length"]),
        *([] if setup.chat else [(f"  train_length: {setup.window}", why["train_length"])]),
        (f"  rope: {setup.rope}", why["rope"]),
        (f"  unskipped_ratio: {setup.unskipped_ratio}", why["unskipped_ratio"]),
        ("  sampler: turns", why["sampler"]) if setup.chat else ("  content: skip", why["content"]),
        ("", ""),
        *_method(setup),
        ("datasets:", ""),
        (f"  - path: {_scalar(setup.data)}", ""),
        ("    ds_type: json", ""),
        *((f"    {text}", comment) for text, comment in _rows(setup)),
        (f"dataset_prepared_path: {_scalar(f'{setup.output}/prepared')}", ""),
        (f"output_dir: {_scalar(setup.output)}", ""),
        (f"excess_length_strategy: {'drop' if setup.chat else 'truncate'}", ""),
        ("", ""),
        ("micro_batch_size: 1", ""),
        (f"gradient_accumulation_steps: {setup.accumulate}", why["accumulate"]),
        (f"num_epochs: {setup.epochs}", ""),
        (f"learning_rate: {_rate(setup.learning_rate)}", ""),
        (f"lr_scheduler: {setup.scheduler}", ""),
        (f"warmup_steps: {setup.warmup_steps}", ""),
        *_hardware(setup),
        ("logging_steps: 10", ""),
        ("saves_per_epoch: 2", ""),
    ]
    return "".join(f"{text:<38} # {comment}\n" if comment else f"{text}\n" for text, comment in lines)


def _scalar(value: Any) -> str:
    """Return a value as YAML reads it back, in quotes if it needs them."""
    import yaml

    return yaml.safe_dump(value, width=float("inf"), allow_unicode=True).removesuffix("...\n").rstrip("\n")


def _rate(value: float) -> str:
    """Return e.g. "2.0e-5": without the point, YAML 1.1 reads it as text."""
    return f"{value:.1e}".replace("e-0", "e-")


def _rows(setup: Setup) -> Lines:
    """Return how Axolotl reads the rows: the lines of the data set's block."""
    chat = [("type: chat_template", ""), (f"field_messages: {setup.key}", "")]
    answers = [("roles_to_train: [assistant]", setup.reasons["answers"]), ("train_on_eos: turn", "")]
    return {
        "input_ids": [("type:", setup.reasons["input_ids"])],
        "messages": [*chat, *answers],
        "conversations": [*chat, ("message_property_mappings: {role: from, content: value}", ""), *answers],
        "text": [("type: completion", ""), ("field: text", "")],
        "instruction": [("type: alpaca", "")],
    }[setup.row]


def _method(setup: Setup) -> Lines:
    if setup.method == "full":
        return []
    return [
        *([("load_in_4bit: true", "")] if setup.method == "qlora" else []),
        (f"adapter: {setup.method}", ""),
        *((f"lora_{name}: {value}", "") for name, value in setup.lora),
        ("lora_target_linear: true", ""),
        *_saved_modules(setup),
        ("lora_mlp_kernel: false", "Axolotl's kernels for LoRA need a GPU with Triton"),
        ("lora_qkv_kernel: false", ""),
        ("lora_o_kernel: false", ""),
        ("", ""),
    ]


def _saved_modules(setup: Setup) -> Lines:
    if not setup.saved_modules:
        return []
    names = ", ".join(setup.saved_modules)
    return [(f"# {setup.reasons['saved_modules']}", ""), (f"lora_modules_to_save: [{names}]", "")]


def _hardware(setup: Setup) -> Lines:
    why = setup.reasons
    optimizer = f"optimizer: {setup.optimizer}"
    if setup.gpus == 0:
        off = [(f"{key}: false", "") for key in ("bf16", "fp16", "tf32")]
        return [(optimizer, ""), *off, ("attn_implementation: sdpa", "")]
    lines = [
        ("bf16: true", ""),
        ("gradient_checkpointing: true", ""),
        ("attn_implementation: sdpa", why["attention"]),
    ]
    if not setup.rounding:
        return [(optimizer, ""), *lines]
    lines += [
        (optimizer, why["optimizer"]),
        (f"optim_args: {{{setup.rounding}: true}}", why["rounding"]),
    ]
    if setup.sharded:
        lines += [
            ("fsdp_version: 2", why["fsdp"]),
            ("fsdp_config:", ""),
            ("  auto_wrap_policy: TRANSFORMER_BASED_WRAP", ""),
            (f"  transformer_layer_cls_to_wrap: {setup.layer}", ""),
            ("  cpu_ram_efficient_loading: true", ""),
            ("  state_dict_type: FULL_STATE_DICT", why["state_dict"]),
            ("  reshard_after_forward: true", ""),
        ]
    return lines
