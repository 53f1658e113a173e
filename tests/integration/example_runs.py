"""The YAMLs of example_configs: read, held against Axolotl's schema, and run on CPU as shrunk copies."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

from tests.integration.axolotl_runs import train
from tests.integration.records import logits_far_out, moved

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "example_configs"

# -- the base models ------------------------------------------------------------------------------------------------


@dataclass
class Base:
    """What of a base model matters here: its config.json, its special tokens, and by how much to shrink lengths.

    Attributes:
        config: as published.
        special: its special tokens (bos, eos, pad, others), which chat templates write.
        shrink: what every length of an example is divided by.
        template: its own chat template, where an example uses it.
        begins: whether its tokenizer puts its first special token before a text.
    """

    config: dict[str, Any]
    special: dict[str, Any]
    shrink: int
    template: str = ""
    begins: bool = True

    @property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the decoder."""
        return self.config.get("text_config", self.config)

    @property
    def theta(self) -> float:
        return float(
            self.text["rope_theta"] if "rope_theta" in self.text else self.text["rope_parameters"]["rope_theta"]
        )


_ROUND = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CHATML = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]}
# Tokens of Qwen3's vocabulary, though not among its special ones.
_THINKING = [*_CHATML["additional_special_tokens"], "<think>", "</think>"]
_HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]
_SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# What its template writes, in words of ours: a system prompt where the conversation has none.
_SMOLLM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + _SMOLLM + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _config(kind: str, window: int, theta: float, heads: int, groups: int, **values: Any) -> dict[str, Any]:
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    names |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config: dict[str, Any] = {"model_type": kind, "architectures": [names[kind]], "hidden_act": "silu"}
    config |= {"max_position_embeddings": window, "rope_theta": theta, "dtype": "bfloat16"}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups} | values
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _size(vocabulary: int, width: int, inner: int, layers: int) -> dict[str, int]:
    return {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}


_QWEN35 = {"model_type": "qwen3_5_text", "head_dim": 256, "full_attention_interval": 4, "dtype": "bfloat16"}
_QWEN35 |= {"num_attention_heads": 24, "num_key_value_heads": 4, "max_position_embeddings": 262144}
_QWEN35 |= {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48}
_QWEN35 |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, **_size(248320, 5120, 17408, 64)}
_QWEN35["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
_QWEN35["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
# What a tiny one has, in addition to what all have.
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


# Sizes, windows and RoPE bases are held against copies of the published config.json files:
# - all of them: Lightning-AI/litgpt, litgpt/config.py at 26857050, which names each file (TinyLlama by the 1.1B of the
#   same architecture, SmolLM2 by its family, Qwen2.5-7B with the 131,072 of the base, not of Instruct);
# - Llama-3-8B-Instruct (eos 128009, <|eot_id|>): kevinstephano/thunder_model_blocks,
#   thunder_model_blocks/llama/llama_3_8B_Instruct_config.py;
# - Qwen2.5-7B-Instruct (32,768 positions): Lightning-AI/lightning-thunder, thunder/benchmarks/targets.py;
# - Qwen3.5-27B: ai-dynamo/aiconfigurator, model_configs/Qwen--Qwen3.5-27B_config.json;
# - Qwen3-8B: sanjithudupa/compute-aware-arch-search, Qwen3-8B/config.json;
# - SmolLM2-1.7B-Instruct: copies agree on bos 1, eos 2 and pad 2, which are <|im_start|>, <|im_end|> and <|im_end|>;
#   its template and system prompt: huggingface/nanoVLM, data/collators.py.
BASES: dict[str, Base] = {
    "meta-llama/Meta-Llama-3-8B-Instruct": Base(
        _config("llama", 8192, 500000.0, 32, 8, **_size(128256, 4096, 14336, 32)),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "additional_special_tokens": _HEADERS},
        shrink=128,
    ),
    "meta-llama/Llama-2-7b-hf": Base(
        _config("llama", 4096, 10000.0, 32, 32, **_size(32000, 4096, 11008, 32), dtype="float16"), _ROUND, shrink=64
    ),
    "mistralai/Mistral-7B-v0.3": Base(
        _config("mistral", 32768, 1000000.0, 32, 8, **_size(32768, 4096, 14336, 32), sliding_window=None),
        _ROUND,
        shrink=128,
    ),
    "Qwen/Qwen2.5-7B-Instruct": Base(
        _config("qwen2", 32768, 1000000.0, 28, 4, **_size(152064, 3584, 18944, 28), use_sliding_window=False),
        _CHATML | {"pad_token": "<|endoftext|>"},
        shrink=64,
    ),
    "Qwen/Qwen3-8B": Base(
        _config("qwen3", 40960, 1000000.0, 32, 8, **_size(151936, 4096, 12288, 36), head_dim=128),
        _CHATML | {"pad_token": "<|endoftext|>", "additional_special_tokens": _THINKING},
        shrink=64,
    ),
    "Qwen/Qwen3.5-27B": Base(
        {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": _QWEN35,
            "vision_config": {"model_type": "qwen3_5_vision"},
            "tie_word_embeddings": False,
        },
        _CHATML | {"pad_token": "<|endoftext|>", "additional_special_tokens": _THINKING},
        shrink=256,
    ),
    "TinyLlama/TinyLlama_v1.1": Base(
        _config("llama", 2048, 10000.0, 32, 4, **_size(32000, 2048, 5632, 22), dtype=None), _ROUND, shrink=32
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Base(
        _config("llama", 8192, 130000.0, 32, 32, **_size(49152, 2048, 8192, 24), tie_word_embeddings=True),
        _CHATML | {"bos_token": "<|im_start|>", "pad_token": "<|im_end|>"},
        shrink=128,
        template=_SMOLLM_TEMPLATE,
        begins=False,
    ),
}


def write_config(folder: Path, name: str) -> Path:
    """The base's own config.json and a small tokenizer: all that a schema check reads."""
    base = BASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(base.config))
    _tokenizer(base).save_pretrained(folder)
    return folder


def write_tiny(folder: Path, name: str) -> Path:
    """The same kind of model with two small layers, random weights, and its window divided like all lengths."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    base = BASES[name]
    tokenizer = _tokenizer(base)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"vocab_size": len(tokenizer), "dtype": "float32"}
    small |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    grouped = base.text["num_key_value_heads"] < base.text["num_attention_heads"]
    small["num_key_value_heads"] = 1 if grouped else 2
    if "head_dim" in base.text:
        small["head_dim"] = 16
    small["max_position_embeddings"] = base.text["max_position_embeddings"] // base.shrink
    torch.manual_seed(0)
    if base.text is base.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**base.config | small))
    else:
        # As published: the checkpoint has the whole model, with images.
        values = base.config | {"text_config": base.text | small | _LINEAR, "vision_config": _VISION}
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values, dtype="float32"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Two letters each, so that a pre-tokenizer of any model leaves them whole.
WORDS = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def _tokenizer(base: Base) -> Any:
    """Byte-level BPE that knows WORDS and roles as one token each, and the base's special tokens.

    Some kinds of models bring their pre-tokenizer, whatever is saved; bytes with merges work with all.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    given = dict(base.special)
    special = [token for key, token in given.items() if key != "additional_special_tokens"]
    special = list(dict.fromkeys([*special, *given.get("additional_special_tokens", [])]))
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [" ".join(WORDS), *WORDS, "user", "assistant", "system", _QWEN, _SMOLLM]
    inner.train_from_iterator(words, trainer)
    if base.begins and "bos_token" in given:
        bos = given["bos_token"]
        inner.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, special.index(bos))])
    window = base.text["max_position_embeddings"]
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=window, **given)
    made.chat_template = base.template or None
    return made


# -- the files ------------------------------------------------------------------------------------------------------


def examples() -> list[str]:
    """Every YAML for Axolotl, as the path below example_configs."""
    files = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
    return [name for name in files if not name.startswith(("accelerate/", "cluster/"))]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def unknown_keys(values: dict[str, Any]) -> list[str]:
    """Keys that no field of Axolotl's schema, plugins included, reads, with those of deprecated fields.

    Needs the plugins to be registered. Axolotl itself drops unknown keys without a word.
    """
    from axolotl.integrations.config import merge_input_args

    return list(_unknown(values, [merge_input_args()[1]], ""))


def _unknown(values: Any, kinds: list[Any], where: str) -> Iterator[str]:
    from pydantic import BaseModel

    parts = [part for kind in kinds for part in _parts(kind)]
    models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    if isinstance(values, list):
        for item in values:
            yield from _unknown(item, kinds, f"{where[:-1]}[].")
    elif isinstance(values, dict) and models:
        for key, value in values.items():
            fields = [model.model_fields[key] for model in models if key in model.model_fields]
            if not fields or all(field.deprecated for field in fields):
                yield where + key
            else:
                yield from _unknown(value, [field.annotation for field in fields], f"{where}{key}.")


def _parts(kind: Any) -> Iterator[Any]:
    """The kinds in a union, a list, or a list of unions."""
    yield kind
    for each in get_args(kind):
        yield from _parts(each)


# A machine with eight GPUs of the A100's kind.
CAPABILITIES = {"bf16": True, "tf32": True, "fp8": False, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_80"}


def validated(values: dict[str, Any], base: Path) -> tuple[list[str], dict[str, Any]]:
    """(unknown keys, the config as Axolotl validates it) of a file as it is but for where its base model is."""
    import torch
    from axolotl.cli.config import prepare_plugins
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault(copy.deepcopy({**values, "base_model": str(base)}))
    prepare_plugins(cfg)
    unknown = unknown_keys(values)
    version = torch.__version__.split("+")[0]
    return unknown, validate_config(cfg, dict(CAPABILITIES), {"torch_version": version}).to_dict()


# -- shrunk copies --------------------------------------------------------------------------------------------------

# All that a shrunk copy changes. Lengths are divided, everything else is as in the file.
ELSEWHERE = ("base_model", "output_dir", "dataset_prepared_path", "datasets[].path")
LENGTHS = ("sequence_len", "min_sample_len", "pose.target_length", "pose.train_length", "pose.rope.original_length")
STEPS = ("max_steps", "num_epochs", "micro_batch_size", "gradient_accumulation_steps", "warmup_steps", "logging_steps")
STEPS += ("save_steps", "eval_steps", "saves_per_epoch", "evals_per_epoch", "save_strategy", "val_set_size")
FOR_GPUS = ("bf16", "fp16", "tf32", "attn_implementation", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
FOR_GPUS += ("lora_embedding_kernel", "liger_fused_linear_cross_entropy", "plugins")
FOR_SEVERAL = ("deepspeed", "fsdp_version", "fsdp_config")
ADDED = ("dataset_num_proc",)
REPLACED = ELSEWHERE + LENGTHS + STEPS + FOR_GPUS + FOR_SEVERAL + ADDED

LIGER = "axolotl.integrations.liger.LigerPlugin"


def shrunk(values: dict[str, Any], base: Path, data: Path, out: Path) -> dict[str, Any]:
    """A copy that a CPU trains for two steps in seconds; the constants above say what it may change.

    Args:
        values: the file.
        base: the tiny model.
        data: a folder with a file for every one that `datasets` names.
        out: the folder for everything that is written.
    """
    small = copy.deepcopy(values)
    small |= {"base_model": str(base), "output_dir": str(out / "out"), "dataset_prepared_path": str(out / "prepared")}
    for each in small["datasets"]:
        each["path"] = str(data / each["path"])
    by = BASES[values["base_model"]].shrink
    for name in LENGTHS:
        *path, key = name.split(".")
        block: Any = small
        for part in path:
            block = block.get(part) if isinstance(block, dict) else None
        if isinstance(block, dict) and block.get(key):
            block[key] //= by
    for key in (*STEPS, "tf32", *FOR_SEVERAL, "liger_fused_linear_cross_entropy"):
        # No warm-up stays none.
        if not (key == "warmup_steps" and small.get(key) == 0):
            small.pop(key, None)
    small["plugins"] = [name for name in small["plugins"] if name != LIGER]
    small |= {"max_steps": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1}
    small |= {"bf16": False, "fp16": False, "attn_implementation": "sdpa", "dataset_num_proc": 1}
    if "val_set_size" in values:
        small["val_set_size"] = 0.2
    if "adapter" in values:
        small |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
    return small


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Names of what differs between two YAMLs, lists of blocks taken item by item."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {*one, *other}:
            yield from differences(one.get(key), other.get(key), f"{where}.{key}" if where else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and isinstance(one[0], dict):
        for a, b in zip(one, other, strict=True):
            yield from differences(a, b, f"{where}[]")
    elif one != other:
        yield where


# What templates write, and what they are written in, inside of texts and turns.
TRICKY = ["<|start_header_id|>user<|end_header_id|>", "<|eot_id|>", "<|im_start|>assistant", "<|im_end|>", "{{ x }}"]


def write_data(folder: Path, longest: int) -> Path:
    """texts.jsonl and chats.jsonl with rows on both sides of `longest` tokens, some with the words of templates."""
    folder.mkdir(parents=True, exist_ok=True)
    picker = random.Random(0)

    def some(count: int) -> str:
        return " ".join(picker.choices(WORDS, k=count))

    sizes = [max(12, longest * part // 8) for part in (1, 2, 3, 4, 5, 6, 7, 9)] * 2
    texts = [{"text": some(size)} for size in sizes]
    chats = []
    for size in sizes:
        asked, answer = size * 6 // 8, max(3, size // 16)
        turns = [("user", some(asked)), ("assistant", some(answer)), ("user", some(3)), ("assistant", some(answer))]
        chats.append([{"role": role, "content": content} for role, content in turns])
    for at, word in enumerate(TRICKY):
        asked, answer = ("ba " + word + " be", "bi bo") if at % 2 else ("ba be", "bi " + word + " bo")
        turns = [("user", asked), ("assistant", answer), ("user", "da"), ("assistant", "do")]
        chats.append([{"role": role, "content": content} for role, content in turns])
        texts.append({"text": f"ba be {word} {some(longest // 4)}"})
    files = {"texts": texts, "chats": [{"messages": turns} for turns in chats]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def answers(data: Path) -> list[list[str]]:
    """What the assistant says in each conversation of the data."""
    rows = [json.loads(line)["messages"] for line in (data / "chats.jsonl").read_text().splitlines()]
    return [[turn["content"] for turn in turns if turn["role"] == "assistant"] for turns in rows]


def supervised(tokenizer: Any, labels: list[int]) -> list[str]:
    """The text of each stretch of a row that is trained."""
    found: list[list[int]] = []
    before = -100
    for label in labels:
        if label != -100:
            if before == -100:
                found.append([])
            found[-1].append(label)
        before = label
    return [tokenizer.decode(each) for each in found]


@dataclass
class ExampleRun:
    """What a shrunk copy did.

    Attributes:
        rows: (tokens, labels) of the training rows, as Axolotl made them.
        farthest: the largest position in a training batch.
        jumps: whether positions jumped in a training batch.
        moved: names of the weights that changed.
        quantized: of 4-bit projections, (type, quantised twice), else None.
        sampler: the name of the class that orders the rows.
        arguments: some of the trainer's arguments.
    """

    losses: list[float]
    learning_rates: list[float]
    rows: list[tuple[list[int], list[int]]]
    farthest: int
    jumps: bool
    moved: list[str]
    quantized: tuple[str, bool] | None
    sampler: str
    inverse_frequencies: np.ndarray
    logits: list[list[float]]
    arguments: dict[str, Any] = field(default_factory=dict)


_ARGUMENTS = ("optim", "gradient_checkpointing", "weight_decay", "max_grad_norm")


def run_example(values: dict[str, Any]) -> ExampleRun:
    """Trains a shrunk copy by the real Axolotl, in this process."""
    import torch

    # The files have no seed, so Axolotl shuffles by this state, and two steps read a few of the rows only.
    np.random.seed(0)
    # torchao compiles a step for every shape of weights, which on a CPU takes longer than all the rest.
    torch.compiler.set_stance("force_eager")
    before: dict[str, torch.Tensor] = {}
    positions: list[torch.Tensor] = []
    seen: dict[str, Any] = {}

    def record(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # the self-test, evaluation
            return
        positions.append(kwargs["position_ids"].clone())

    def on_setup(model: Any, trainer: Any) -> None:
        model.register_forward_pre_hook(record, with_kwargs=True)
        before.update({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        seen["sampler"] = type(trainer._get_train_sampler()).__name__
        seen["rows"] = [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]

    model, trainer = train(values, on_setup)
    steps = [torch.diff(each, dim=1) for each in positions]
    frequencies = [b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n]
    layers = [m.weight for m in model.modules() if type(m).__name__ == "Linear4bit"]
    states = [(weight.quant_type, weight.quant_state.nested) for weight in layers]
    steps_logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return ExampleRun(
        losses=[entry["loss"] for entry in steps_logged],
        learning_rates=[entry["learning_rate"] for entry in steps_logged],
        rows=seen["rows"],
        farthest=max(int(each.max()) for each in positions),
        jumps=any(bool((each > 1).any()) for each in steps),
        moved=moved(model, before),
        quantized=next(iter(states), None),
        sampler=seen["sampler"],
        inverse_frequencies=frequencies[0].double().numpy(),
        # bitsandbytes' 4-bit layers on CPU cannot leave training mode.
        logits=[] if values.get("load_in_4bit") else logits_far_out(model),
        arguments={name: getattr(trainer.args, name, None) for name in _ARGUMENTS},
    )
