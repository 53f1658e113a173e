"""Tiny random models and tokenizers: every test makes its own here, and nothing is downloaded.

Models: `make_llama`, `make_base` and `make_beacon` (the architectures of Beacon), `build` (a family of `CONFIGS`).
Folders as a training leaves them: `save_base`, `save_full`, `save_adapter`.
Tokenizers: `make_tokenizer` (words), `spelled_tokenizer` (bytes), `bpe_tokenizer`, `sentencepiece_tokenizer`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers as t
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pose_plugin.evaluation.prompts import PasskeyTemplate


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Draw the same numbers in this block at every call, and leave the caller's generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


# --- tokenizers -------------------------------------------------------------------------------------------------------


def make_tokenizer(size: int = 128, side: str = "right") -> Any:
    """Words w0…w127 by white space; w0 pads, w2 ends."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w2", unk_token="w1", padding_side=side, model_max_length=64
    )


def spelled_tokenizer(special: tuple[str, ...] = (), **options: Any) -> Any:
    """One token per byte, so that lengths in tokens are lengths in bytes; `special` follow at 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    return t.PreTrainedTokenizerFast(tokenizer_object=inner, **options)


TEXT = [
    PasskeyTemplate().prefix,
    PasskeyTemplate().filler * 3,
    PasskeyTemplate().key_sentence,
    PasskeyTemplate().question,
    "The quick brown fox jumps over the lazy dog, 12345 times 67890 in 2048 years.\n\nAnd so on.\n",
]


def bpe_tokenizer(digits: str) -> Any:
    """Byte-level BPE as in GPT-2. digits: "single" splits numbers up, "joined" learns number tokens."""
    tokenizer = Tokenizer(models.BPE())
    steps: list = [pre_tokenizers.Digits(individual_digits=True)] if digits == "single" else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = [f" {n}" for n in range(10, 100)] * 3 + [f" {n}" for n in range(100, 1000)] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=400 if digits == "single" else 1600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT + (numbers if digits == "joined" else []), trainer)
    return t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def sentencepiece_tokenizer() -> Any:
    """As Llama 2: a word mark before the first word, single digits, and <s> in front of every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    # Without line breaks, so that they are written as the byte <0x0A>.
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in TEXT], trainer)
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------


def make_llama(attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """A random Llama of two layers and a window of 64; every caller gets the same weights."""
    values = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "use_cache": False,
        **changes,
    }
    with seeded(seed):
        return t.LlamaForCausalLM._from_config(t.LlamaConfig(**values), attn_implementation=attention)


def is_save_probe(ids: Any) -> bool:
    """Whether a batch is the one that the trained model is asked at each save."""
    from pose_plugin.checkpoints.probe import probe_inputs

    return ids.tolist() == [probe_inputs(128, 64, 512)["ids"]]


# --- for Beacon: larger weights, four architectures -------------------------------------------------------------------

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
BEACON_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_base(architecture: str = "llama", attention: str = "sdpa", rope: str = "default", **changes: Any) -> Any:
    """Return a base with the same weights at every call: vocabulary 64, window 128, 4 query and 2 key-value heads."""
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_parameters": dict(BEACON_ROPES[rope]),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **changes,
    }
    if architecture in ("llama", "qwen2"):
        values.pop("head_dim")
    config = t.AutoConfig.for_model(architecture, **values)
    with seeded():
        model = t.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():  # larger than usual, so that attention is not flat
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
            elif parameter.abs().max() == 0:
                parameter.data.normal_(std=0.1)  # biases
    return model.eval()


def make_config(**changes: Any) -> Any:
    """Return a config of Beacon with interval 8, ratio 4, no headroom."""
    from pose_plugin.beacon import BeaconConfig

    return BeaconConfig(**{"interval": 8, "ratio": 4, "headroom": 0, **changes})


def make_beacon(architecture: str = "llama", attention: str = "sdpa", rope: str = "default", **changes: Any) -> Any:
    """Return a PEFT model whose beacon weights differ from the base's, as after training."""
    from peft import get_peft_model

    model = get_peft_model(make_base(architecture, attention, rope), make_config(**changes))
    unlike_base(model)
    return model.eval()


def unlike_base(model: Any, seed: int = 1) -> None:
    """Add noise to the trained weights."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=rng) * 0.1
            parameter.data += noise.to(parameter.dtype)


def make_ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids of shape [rows, tokens]."""
    return torch.randint(2, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# --- the families: a config each, with a window of 64 -----------------------------------------------------------------

WINDOW = 64
SMALL = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def small_config(model_type: str, **changes: Any) -> Any:
    """A config of a family with the sizes of SMALL."""
    # A copy: some classes complete the rope dict that they are given in place.
    return t.CONFIG_MAPPING[model_type](**copy.deepcopy({**SMALL, **changes}))


GPT_OSS_ROPE = {"rope_type": "default", "rope_theta": 150000.0}
DEEPSEEK = {
    "num_key_value_heads": 2, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 16,
    "kv_lora_rank": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "llama": lambda: small_config("llama"),
    "qwen3": lambda: small_config("qwen3", head_dim=48, rope_theta=1e6),
    "mistral": lambda: small_config("mistral", sliding_window=None),
    "gemma2": lambda: small_config("gemma2", head_dim=32),
    "gemma3": lambda: small_config("gemma3_text", **LAYERS, head_dim=32),
    "phi3": lambda: small_config("phi3", partial_rotary_factor=0.5),
    "olmo3": lambda: small_config("olmo3", **LAYERS),
    "gpt_neox": lambda: small_config("gpt_neox", num_key_value_heads=2, rotary_pct=0.5),
    "gpt_oss": lambda: small_config("gpt_oss", **LAYERS, **EXPERTS, head_dim=32, rope_parameters=GPT_OSS_ROPE),
    "deepseek_v3": lambda: small_config("deepseek_v3", **DEEPSEEK),
}
# The dimensions of a head that turn, as each family defines them.
ROTARY_DIM = {
    "llama": 32,
    "qwen3": 48,
    "mistral": 32,
    "gemma2": 32,
    "gemma3": 32,
    "phi3": 16,
    "olmo3": 32,
    "gpt_neox": 16,
    "gpt_oss": 32,
    "deepseek_v3": 16,
}


def build(config: Any, **kwargs: Any) -> Any:
    """A model with reproducible random weights, in eval mode."""
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **kwargs).eval()


def logits(model: Any, positions: list[int]) -> torch.Tensor:
    """Logits of a fixed row of tokens at the given positions, shape [1, len(positions), vocabulary]."""
    position_ids = torch.tensor([positions])
    tokens = torch.arange(len(positions)).unsqueeze(0) % 40 + 3
    # With a mask: without one transformers takes a jump in the positions for the start of another document.
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        return model(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits.float()


# --- saved folders: extended 64 → 512, with logits that depend on positions visibly -----------------------------------

TARGET = 512
ROPES: dict[str, Any] = {
    "linear": "linear",
    "ntk": "ntk",
    "base": {"type": "base", "theta": 1e6},
    "yarn": "yarn",
    "yarn-revised": "yarn-revised",
    "llama3": "llama3",
}


def save(model: Any, folder: Path) -> Path:
    """Save a model with the tokenizer of words."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_base(folder: Path, **changes: Any) -> Any:
    """A Llama with a window of 64. Returns it."""
    # Large weights: with the usual ones a random model hardly attends to anything.
    model = make_llama(initializer_range=0.3, num_key_value_heads=1, **changes)
    save(model, folder)
    return model


def save_full(folder: Path, rope: Any = "yarn", base: Path | None = None) -> Any:
    """A model with the base's weights and stretched frequencies. Returns it."""
    base = base or folder.with_name("base")
    if not base.exists():
        save_base(base)
    model = extended(base, rope)
    save(model, folder)
    finish(folder, model, rope)
    return model


def save_adapter(folder: Path, rope: Any = "yarn", base: Path | None = None, **lora: Any) -> Any:
    """A LoRA adapter of random weights on the stretched base. Returns the PEFT model."""
    from peft import LoraConfig, get_peft_model

    base = base or folder.with_name("base")
    if not base.exists():
        save_base(base)
    with seeded(1):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **lora)
        model = get_peft_model(extended(base, rope), config)
    save(model, folder)
    finish(folder, model, rope)
    return model


def extended(base: Path, rope: Any) -> Any:
    """The model in `base`, with the frequencies of `rope` for TARGET."""
    from pose_plugin import extend_context

    config = extend_context(t.AutoConfig.from_pretrained(base), TARGET, rope)
    return t.AutoModelForCausalLM.from_pretrained(base, config=config)


def finish(folder: Path, model: Any, rope: Any) -> None:
    """Write what a training writes next to the weights: pose.json, the probe and the tokenizer's limit."""
    from pose_plugin.checkpoints import complete_folder
    from pose_plugin.checkpoints.probe import take_probe
    from pose_plugin.checkpoints.record import model_facts
    from pose_plugin.config import parse_settings

    settings = parse_settings({"target_length": TARGET, "train_length": 64, "rope": rope})
    complete_folder(folder, model.config, settings, facts=model_facts(model), probe=take_probe(model, TARGET))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Applies `change` to a JSON file's values in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
