"""Write the choices of `pose-plugin init` as a TRL script."""

from __future__ import annotations

from pose_plugin.plan.init_setup import Setup, one_line

# How the script turns rows that have a key into the data set that TRL gets.
_ROWS = {
    "text": """\
    data = data.select_columns(["text"])
""",
    "input_ids": "",
    "instruction": """\
    data = data.map(prompt_and_completion, remove_columns=data.column_names)
""",
    "messages": """\
    data = data.select_columns([name for name in ("messages", "tools") if name in data.column_names])
""",
    "conversations": """\
    data = data.map(to_messages, remove_columns=data.column_names)
""",
}
_RENAMED = {"messages": '    data = data.rename_column("conversations", "messages")\n'}
# TRL would cut longer conversations, and the last answers with them. Axolotl drops such rows, and so does the script.
_DROP_LONG = """\
    conversations = len(data)
    data = data.filter(fits)
print(f"{len(data)} of {conversations} conversations fit into {TRAIN_LENGTH} tokens")
if not len(data):
    raise SystemExit(f"TRAIN_LENGTH = {TRAIN_LENGTH}: no conversation of {DATA} is as short; raise it")
"""
_FITS = '''

def fits(row):
    """Return whether no answer of a conversation would be cut off."""
    tokens = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True)
    return len(tokens["input_ids"]) <= TRAIN_LENGTH
'''
_TO_MESSAGES = '''

def to_messages(row):
    """Return the turns under the names that chat templates know."""
    names = {"human": "user", "gpt": "assistant"}
    turns = row["KEY"]
    return {"messages": [{"role": names.get(t["from"], t["from"]), "content": t["value"]} for t in turns]}
'''
_PROMPT = '''

def prompt_and_completion(row):
    """Return the Alpaca prompt, and the answer; the loss is on the answer."""
    more = row.get("input")
    context = ", paired with an input that provides further context" if more else ""
    parts = [
        f"Below is an instruction that describes a task{context}. "
        "Write a response that appropriately completes the request.",
        f"### Instruction:\\n{row['instruction']}",
        *([f"### Input:\\n{more}"] if more else []),
        "### Response:\\n",
    ]
    return {"prompt": "\\n\\n".join(parts), "completion": row["output"]}
'''
_FUNCTIONS = {"instruction": _PROMPT, "messages": _FITS, "conversations": _TO_MESSAGES + _FITS}


def write(setup: Setup) -> str:
    """Return the script. Whatever the user gave is in it as a Python literal, or escaped in a comment."""
    comment = f"  # {setup.reasons['input_ids']}" if setup.row == "input_ids" else ""
    return "".join(
        [
            _head(setup),
            _arguments(setup),
            "\ntokenizer = AutoTokenizer.from_pretrained(BASE)\nif tokenizer.pad_token is None:\n"
            "    tokenizer.pad_token = tokenizer.eos_token\n",
            _FUNCTIONS.get(setup.row, "").replace("KEY", setup.key),
            "\n" * 2 if setup.row in _FUNCTIONS else "\n",
            "with args.main_process_first():\n",
            f'    data = load_dataset("json", data_files=DATA, split="train"){comment}\n',
            "" if setup.row == setup.key else _RENAMED.get(setup.row, ""),
            _ROWS[setup.row],
            _DROP_LONG if setup.chat else "",
            _model(setup),
            _trainer(setup),
        ]
    )


def _head(setup: Setup) -> str:
    """Return comments, imports and constants."""
    why = setup.reasons
    several = setup.gpus > 1
    run = f"accelerate launch --num_processes {setup.gpus}" if several else "python"
    packages = {"lora": [], "qlora": ["bitsandbytes"], "full": ["torchao"] if setup.rounding and not several else []}
    needed = "".join(f", pip install {name}" for name in packages[setup.method])
    quantized = ", BitsAndBytesConfig" if setup.method == "qlora" else ""
    peft = "" if setup.method == "full" else "from peft import LoraConfig\n"
    return f"""\
# {one_line(setup.title[0])}
# {one_line(setup.title[1])}
# Install: pip install ".[trl]" in a clone of pose-plugin{needed}
# Run:     {run}, then the name of this file

import torch
from datasets import load_dataset
{peft}from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer{quantized}
from trl import SFTConfig, SFTTrainer

from pose_plugin import PoSECollator, extend_context

BASE = {literal(setup.base)}
DATA = {literal(setup.data)}
OUTPUT = {literal(setup.output)}
TARGET_LENGTH = {setup.target}  # {why["target_length"]}
TRAIN_LENGTH = {setup.window}  # {why["train_length"]}

"""


def _arguments(setup: Setup) -> str:
    """Return SFTConfig. It comes before the model, because with FSDP it decides how the model is loaded."""
    why = setup.reasons
    optimizer = [f'    optim="{setup.optimizer}",']
    if setup.sharded:
        # accelerate would widen bf16 weights under FSDP in any case, so there is nothing to round.
        optimizer = ['    optim="adamw_torch",']
    elif setup.rounding:
        optimizer = [
            f'    optim="{setup.optimizer}",  # {why["optimizer"]}',
            f'    optim_args="{setup.rounding}=True",  # {why["rounding"]}',
        ]
    lines = [
        "args = SFTConfig(",
        "    output_dir=OUTPUT,",
        "    max_length=TRAIN_LENGTH,"
        if setup.chat
        else "    max_length=None,  # documents stay whole, and the collator takes its pieces from anywhere in them",
        *([f"    assistant_only_loss=True,  # {why['answers']}"] if setup.chat else []),
        "    per_device_train_batch_size=1,",
        f"    gradient_accumulation_steps={setup.accumulate},  # {why['accumulate']}",
        f"    num_train_epochs={setup.epochs},",
        f"    learning_rate={setup.learning_rate},",
        f'    lr_scheduler_type="{setup.scheduler}",',
        f"    warmup_steps={setup.warmup_steps},",
        *optimizer,
        *_hardware(setup),
        "    logging_steps=10,",
        '    save_strategy="steps",',
        "    save_steps=0.5,  # as a share of all steps",
        '    report_to="none",',
        ")",
    ]
    return "\n".join(lines) + "\n"


def _hardware(setup: Setup) -> list[str]:
    if setup.gpus == 0:
        return ["    use_cpu=True,", "    bf16=False,", "    gradient_checkpointing=False,"]
    lines = ["    bf16=True,", "    gradient_checkpointing=True,"]
    if setup.sharded:
        lines += [
            f"    fsdp=True,  # {setup.reasons['fsdp']}",
            "    fsdp_config={",
            '        "version": 2,',
            '        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",',
            f'        "transformer_layer_cls_to_wrap": ["{setup.layer}"],',
            '        "cpu_ram_efficient_loading": True,',
            f'        "state_dict_type": "FULL_STATE_DICT",  # {setup.reasons["state_dict"]}',
            '        "reshard_after_forward": True,',
            "    },",
        ]
    return lines


def _model(setup: Setup) -> str:
    dtype = "bfloat16" if setup.gpus and not setup.sharded else "float32"
    reason = "  # trained in float32 and computed in bf16, so that no small step is lost" if setup.sharded else ""
    quantized = f"""\
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.{dtype},
    ),
"""
    return f"""
config = extend_context(
    AutoConfig.from_pretrained(BASE),
    TARGET_LENGTH,
    rope="{setup.rope}",  # {setup.reasons["rope"]}
)
model = AutoModelForCausalLM.from_pretrained(
    BASE,
    config=config,
    dtype=torch.{dtype},{reason}
    attn_implementation="sdpa",  # {setup.reasons["attention"] if setup.gpus else "works on a CPU"}
{quantized if setup.method == "qlora" else ""})
"""


def _trainer(setup: Setup) -> str:
    why = setup.reasons
    collator = f'sampler="turns",  # {why["sampler"]}' if setup.chat else f'content="skip",  # {why["content"]}'
    adapter, widen = "", ""
    if setup.method != "full":
        values, saved = dict(setup.lora), ""
        if setup.saved_modules:
            names = ", ".join(map(literal, setup.saved_modules))
            saved = f"\n        # {why['saved_modules']}\n        modules_to_save=[{names}],"
        adapter = f"""
    peft_config=LoraConfig(
        r={values["r"]},
        lora_alpha={values["alpha"]},
        lora_dropout={values["dropout"]},
        target_modules="all-linear",{saved}
        task_type="CAUSAL_LM",
    ),"""
    if setup.method == "qlora":
        widen = """\
# TRL casts adapters of 4-bit models to bf16, which loses small steps. PEFT keeps them in float32, and so do we.
for weight in trainer.model.parameters():
    if weight.requires_grad:
        weight.data = weight.data.float()
"""
    return f"""
trainer = SFTTrainer(
    model,
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
    data_collator=PoSECollator(
        tokenizer,
        train_length=TRAIN_LENGTH,
        unskipped_ratio={setup.unskipped_ratio},  # {why["unskipped_ratio"]}
        {collator}
    ),{adapter}
)
{widen}trainer.train()
trainer.save_model(OUTPUT)
trainer.accelerator.end_training()
"""


def literal(text: str) -> str:
    """Return a string as a Python literal, in double quotes if nothing in it needs escaping."""
    shown = repr(text)
    return shown if shown[0] == '"' or "\\" in shown or '"' in shown else f'"{shown[1:-1]}"'
