"""Folders that people reported: the shape of each, its public report, the cause, and the repair if one is certain.

A row of BROKEN is (source, cause, files, base's config or None, expected values in the repaired copy or None), a row of
HEALTHY (source, files, base's config or None).
"""

from __future__ import annotations

import copy
from typing import Any

LLAMA2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LLAMA3 = {**LLAMA2, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192}
QWEN3 = {
    **LLAMA2,
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}
QWEN2 = {**QWEN3, "model_type": "qwen2", "max_position_embeddings": 32768}
SMALL = {**LLAMA2, "vocab_size": 49152, "rope_theta": 100000.0, "max_position_embeddings": 8192, "head_dim": 64}
PHI3 = {
    **LLAMA2,
    "model_type": "phi3",
    "vocab_size": 32064,
    "hidden_size": 3072,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}
QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "hidden_size": 2560,
        "num_attention_heads": 16,
        "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
}
LONG = {"max_position_embeddings": 131072}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def yarn(factor: Any, original: Any = None, **more: Any) -> dict[str, Any]:
    values = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}
    return {key: value for key, value in values.items() if value is not None}


def new(config: dict[str, Any], rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config in the form of transformers 5: no rope_theta at the top."""
    return {**{k: v for k, v in config.items() if k != "rope_theta"}, "rope_parameters": rope, **more}


def nested(**changes: Any) -> dict[str, Any]:
    """QWEN35 with other values in its text_config."""
    config = copy.deepcopy(QWEN35)
    config["text_config"].update(changes)
    return config


LORA = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 8}

BROKEN: list[tuple[str, str, dict[str, dict[str, Any]], dict[str, Any] | None, dict[str, Any] | None]] = [
    # The maximum.
    (
        "QwenLM/Qwen3 model cards: static YaRN written by hand; vllm-project/vllm-ascend#760",
        "maximum not raised",
        {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}},
        None,
        {"max_position_embeddings": 131072},
    ),
    (
        "huggingface/trl, the guide to long contexts: rope_parameters in model_init_kwargs only",
        "maximum not raised",
        {"config.json": new(SMALL, yarn(4.0, 8192, rope_theta=100000.0))},
        None,
        {"max_position_embeddings": 32768},
    ),
    (
        "axolotl-ai-cloud/axolotl#343: told to change the factor only",
        "maximum not raised",
        {"config.json": {**LLAMA3, "rope_scaling": yarn(8.0, 8192, type="yarn")}},
        None,
        {"max_position_embeddings": 65536},
    ),
    (
        "vllm-project/vllm#17924: garbage past the maximum, allowed by an environment variable",
        "maximum not raised",
        {"config.json": {**QWEN2, "rope_scaling": yarn(2.0, 32768)}},
        None,
        {"max_position_embeddings": 65536},
    ),
    (
        "QwenLM/Qwen3#1424: one engine uses the factor, another maximum / original",
        "factor below maximum",
        {"config.json": {**QWEN3, "rope_scaling": yarn(2.0, 32768), "max_position_embeddings": 131072}},
        None,
        None,
    ),
    (
        "huggingface/transformers#40320: explicit and implicit factor of YaRN differ",
        "factor below maximum",
        {"config.json": new(QWEN3, yarn(1.5, 32768, rope_theta=1e6), max_position_embeddings=163840)},
        None,
        None,
    ),
    (
        "hiyouga/LlamaFactory: rope_scaling computes the maximum as a float",
        "maximum of another type",
        {"config.json": {**LLAMA3, "rope_scaling": yarn(4.0, 8192), "max_position_embeddings": 32768.0}},
        None,
        {"max_position_embeddings": 32768},
    ),
    (
        "hand edits with quotes, as in vllm-project/vllm#2518 and its duplicates",
        "maximum of another type",
        {"config.json": {**LLAMA3, "max_position_embeddings": "8192"}},
        None,
        {"max_position_embeddings": 8192},
    ),
    (
        "JIA-Lab-research/LongLoRA#181: uploaded without rope_scaling",
        "maximum raised without frequencies",
        {"config.json": {**LLAMA2, "max_position_embeddings": 32768}},
        None,
        None,
    ),
    (
        "vllm-project/vllm#10537: Llama 3 with a raised maximum and no scaling",
        "maximum raised without frequencies",
        {"config.json": {**LLAMA3, "max_position_embeddings": 131072}},
        None,
        None,
    ),
    # The original window.
    (
        "EricLBuehler/candle-vllm#284: original_max_position_embeddings missing",
        "original window missing",
        {"config.json": {**QWEN3, "rope_scaling": yarn(4.0), "max_position_embeddings": 131072}},
        None,
        None,
    ),
    (
        "NVIDIA-NeMo/Automodel#2652: yarn with a factor only",
        "original window missing",
        {"config.json": {**SMALL, "rope_scaling": yarn(2.0)}},
        None,
        None,
    ),
    (
        "hiyouga/LlamaFactory#8101: yarn saved without the original window; the record of the run knows it",
        "original window missing",
        {
            "config.json": {**SMALL, "rope_scaling": yarn(4.0), "max_position_embeddings": 32768},
            "pose.json": {"target_length": 32768, "model": {"original_length": 8192}, "trained": {"steps": 10}},
        },
        None,
        {"rope_scaling.original_max_position_embeddings": 8192},
    ),
    (
        "modelscope/ms-swift#5146: kind and factor on the command line, original window and maximum as before",
        "original window missing",
        {"config.json": {**SMALL, "rope_scaling": {"type": "yarn", "factor": 3.0}}},
        None,
        None,
    ),
    (
        "ROCm/aiter#4742: engines fail at start without the original window",
        "original window missing",
        {"config.json": new(QWEN3, yarn(4.0, rope_theta=1e6), max_position_embeddings=131072)},
        None,
        None,
    ),
    (
        "meta-llama/llama3#299: llama3 scaling without its original window after an edit for old readers",
        "original window missing",
        {
            "config.json": {
                **LLAMA3,
                "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"},
                "max_position_embeddings": 131072,
            }
        },
        None,
        None,
    ),
    # Two forms.
    (
        "gpustack/gpustack#4236: rope_scaling as advised for vLLM, over a config that transformers 5 saved",
        "forms disagree",
        {
            "config.json": new(
                QWEN3,
                yarn(4.0, 32768, rope_theta=1e6),
                rope_scaling=yarn(2.0, 32768),
                max_position_embeddings=131072,
            )
        },
        None,
        {"rope_scaling.factor": 4.0},
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge#3077: rope_scaling replaces rope_parameters in transformers 5, with the base",
        "forms disagree",
        {
            "config.json": new(
                SMALL,
                {"rope_type": "default", "rope_theta": 1e5},
                rope_scaling=yarn(4.0, 8192),
                max_position_embeddings=32768,
            )
        },
        None,
        {"rope_parameters.factor": 4.0, "rope_scaling.rope_theta": 1e5, "rope_theta": 1e5},
    ),
    (
        "vllm-project/vllm#42624 and then rope_scaling by hand: two bases besides two forms",
        "forms disagree",
        {
            "config.json": {
                **QWEN3,
                "rope_theta": 10000.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": yarn(4.0, 32768),
                "max_position_embeddings": 131072,
            }
        },
        None,
        None,
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge#3077: the same if both forms agree, except that one has the base",
        "rope_theta missing",
        {
            "config.json": new(
                SMALL,
                yarn(4.0, 8192, rope_theta=1e5),
                rope_scaling=yarn(4.0, 8192),
                max_position_embeddings=32768,
            )
        },
        None,
        {"rope_theta": 1e5},
    ),
    (
        "vllm-project/vllm#42624: rope_theta=10000 at the top, the real base inside rope_parameters",
        "two bases",
        {
            "config.json": {
                **LLAMA3,
                "rope_theta": 10000.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
        None,
        None,
    ),
    (
        "vllm-project/vllm#56066: rope_theta only at the top, and another inside",
        "two bases",
        {"config.json": {**QWEN2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}},
        None,
        None,
    ),
    (
        "vllm-project/vllm#9490: rope_theta changed at the top, which readers of rope_parameters do not see",
        "two bases",
        {"config.json": {**LLAMA3, "rope_theta": 8e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        None,
        None,
    ),
    (
        "hiyouga/LlamaFactory with transformers 5: the dict is replaced by one without its base",
        "rope_theta missing",
        {"config.json": new(QWEN3, yarn(4.0, 32768), max_position_embeddings=131072)},
        None,
        {"rope_parameters.rope_theta": 1e6},
    ),
    (
        "TensorRT-Model-Connect#400: a reader of one form only, and no base in it",
        "rope_theta missing",
        {"config.json": new(LLAMA3, dict(LLAMA3_ROPE), max_position_embeddings=131072)},
        None,
        {"rope_parameters.rope_theta": 500000.0},
    ),
    # The kind.
    (
        "vllm-project/vllm#6692: type: yarn added next to rope_type: llama3",
        "two kinds",
        {"config.json": {**LLAMA3, "rope_scaling": {**LLAMA3_ROPE, "type": "yarn"}, "max_position_embeddings": 131072}},
        None,
        None,
    ),
    (
        "vllm-project/vllm#6692: type: dummy to get past an old reader",
        "unknown kind",
        {"config.json": {**LLAMA3, "rope_scaling": {"type": "dummy"}, "max_position_embeddings": 131072}},
        None,
        None,
    ),
    (
        "huggingface/transformers#32167: KeyError 'rope_type'",
        "no kind",
        {"config.json": {**LLAMA2, "rope_scaling": {"factor": 8.0}, "max_position_embeddings": 32768}},
        None,
        None,
    ),
    (
        "modelscope/ms-swift#5155: the kind is written as the user spelled it",
        "unknown kind",
        {
            "config.json": {
                **QWEN2,
                "rope_scaling": {**yarn(4.0, 32768), "rope_type": "YaRN"},
                "max_position_embeddings": 131072,
            }
        },
        None,
        {"rope_scaling.rope_type": "yarn"},
    ),
    (
        "unslothai/unsloth#1042 and lightseekorg/TorchSpec#101: kinds of one library in the files of another",
        "unknown kind",
        {"config.json": {**LLAMA2, "rope_scaling": {"rope_type": "ntk-aware", "factor": 4.0}}},
        None,
        None,
    ),
    # The factor.
    (
        "sgl-project/sglang#14627: KeyError 'factor'",
        "no factor",
        {"config.json": {**QWEN3, "rope_scaling": yarn(None, 32768), "max_position_embeddings": 131072}},
        None,
        {"rope_scaling.factor": 4.0},
    ),
    (
        "modelscope/ms-swift#7198: a dict without factor",
        "no factor",
        {"config.json": new(QWEN3, yarn(None, 32768, rope_theta=1e6), max_position_embeddings=65536)},
        None,
        {"rope_parameters.factor": 2.0},
    ),
    (
        "axolotl-ai-cloud/axolotl#342 and LostRuins/koboldcpp#375: llama.cpp's scale, original / target, as the factor",
        "factor below 1",
        {"config.json": {**LLAMA2, "rope_scaling": {"type": "linear", "factor": 0.25}}},
        None,
        None,
    ),
    (
        "vllm-project/vllm#10293: values in quotes",
        "number as text",
        {"config.json": {**QWEN2, "rope_scaling": yarn("4.0", 32768), "max_position_embeddings": 131072}},
        None,
        {"rope_scaling.factor": 4.0},
    ),
    (
        "Qwen/Qwen3-8B edited by hand: a scale of cos and sin in one form only",
        "forms disagree",
        {
            "config.json": new(
                QWEN3, yarn(4.0, 32768, rope_theta=1e6, attention_factor=1.0), rope_scaling=yarn(4.0, 32768), **LONG
            )
        },
        None,
        None,
    ),
    (
        "Qwen/Qwen3-8B edited by hand: a window in quotes",
        "number as text",
        {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, "32768"), "max_position_embeddings": 131072}},
        None,
        {"rope_scaling.original_max_position_embeddings": 32768},
    ),
    (
        "Qwen/Qwen3-8B edited by hand: a base in quotes",
        "number as text",
        {"config.json": {**QWEN3, "rope_theta": "1000000"}},
        None,
        {"rope_theta": 1000000.0},
    ),
    (
        "Qwen/Qwen3-8B edited by hand: a factor that no reader can compute with",
        "no number",
        {"config.json": {**QWEN3, "rope_scaling": yarn(float("inf"), 32768)}},
        None,
        None,
    ),
    (
        "Qwen/Qwen3-8B edited by hand: a base of null hides the other one",
        "no number",
        {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768) | {"rope_theta": None}, **LONG}},
        None,
        {"rope_scaling.rope_theta": 1000000.0},
    ),
    (
        "Qwen/Qwen3-8B edited by hand: the kind instead of the dict",
        "rope of another type",
        {"config.json": {**QWEN3, "rope_scaling": "yarn"}},
        None,
        None,
    ),
    (
        "meta-llama/Llama-3.1-8B without its factor, which is not the ratio of its windows",
        "no factor",
        {"config.json": {**LLAMA3, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "factor"}, **LONG}},
        None,
        None,
    ),
    # longrope.
    (
        "lm-sys/FastChat#3907 and mlc-ai/mlc-llm#3375: longrope without one of its lists",
        "longrope list missing",
        {"config.json": {**PHI3, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}},
        None,
        None,
    ),
    (
        "sgl-project/sglang#3055: lists of another head size after a change of width",
        "longrope list of another length",
        {
            "config.json": {
                **PHI3,
                "hidden_size": 4096,
                "rope_scaling": {"type": "su", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
            }
        },
        None,
        None,
    ),
    (
        "lablup/mlxcel#1358: longrope lists copied without the original window",
        "original window missing",
        {
            "config.json": {
                **{k: v for k, v in PHI3.items() if k != "original_max_position_embeddings"},
                "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
            }
        },
        None,
        None,
    ),
    # Models inside models.
    (
        "vllm-project/recipes#856 and #237: the override written at the top, where the decoder does not read it",
        "rope outside text_config",
        {"config.json": {**QWEN35, "rope_parameters": yarn(4.0, 262144, rope_theta=1e7)}},
        None,
        {"text_config.rope_parameters.factor": 4.0, "rope_parameters": None},
    ),
    (
        "modelscope/ms-swift#1591: rope_scaling of a multimodal model set outside its language model",
        "rope outside text_config",
        {"config.json": {**QWEN35, "rope_scaling": yarn(2.0, 262144)}},
        None,
        {"text_config.rope_scaling.factor": 2.0},
    ),
    (
        "ls1intum/edutelligence#744: an override without the keys of the family",
        "keys of the family missing",
        {
            "config.json": nested(
                rope_parameters=yarn(4.0, 262144, rope_theta=1e7),
                max_position_embeddings=1048576,
            )
        },
        None,
        None,
    ),
    # Other lengths in the folder.
    (
        "vllm-project/recipes#794: capped by the tokenizer",
        "tokenizer limit",
        {
            "config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768), "max_position_embeddings": 131072},
            "tokenizer_config.json": {"model_max_length": 32768},
        },
        None,
        {"tokenizer_config.json:model_max_length": 131072},
    ),
    (
        "modelscope/ms-swift#861: seq_length left at the old window",
        "second window",
        {"config.json": {**QWEN2, "seq_length": 8192}},
        None,
        {"seq_length": 32768},
    ),
    (
        "vllm-project/vllm#3919: model_max_length in the config is the window for some readers",
        "second window",
        {"config.json": {**QWEN2, "model_max_length": 4096}},
        None,
        {"model_max_length": 32768},
    ),
    (
        "unslothai/unsloth#1236: generation ends inside the window",
        "generation limit",
        {
            "config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768), "max_position_embeddings": 131072},
            "generation_config.json": {"max_length": 4096},
        },
        None,
        {"generation_config.json:max_length": None},
    ),
    # Adapters.
    (
        "huggingface/trl#4277: an adapter whose base has another rope at inference",
        "base without the adapter's rope",
        {
            "config.json": new(SMALL, yarn(4.0, 8192, rope_theta=1e5), max_position_embeddings=32768),
            "adapter_config.json": LORA,
        },
        SMALL,
        None,
    ),
    (
        "JIA-Lab-research/LongLoRA#69: an adapter loaded on a base without its scaling",
        "adapter without its config",
        {"adapter_config.json": LORA, "tokenizer_config.json": {"model_max_length": 32768}},
        LLAMA2,
        None,
    ),
    (
        "Llama-3-8B-Instruct-80K-QLoRA: rope_theta belongs to the adapter and is lost with its config",
        "base without the adapter's rope",
        {"config.json": {**LLAMA3, "rope_theta": 2e8, "max_position_embeddings": 81920}, "adapter_config.json": LORA},
        LLAMA3,
        None,
    ),
    (
        "vllm-project/vllm and sgl-project/sglang: adapters with use_dora are refused or served without it",
        "DoRA",
        {"config.json": SMALL, "adapter_config.json": {**LORA, "use_dora": True}},
        SMALL,
        None,
    ),
    (
        "huggingface/peft#2368: quality lost in the merge of a model with tied embeddings",
        "tied embeddings trained",
        {"config.json": SMALL, "adapter_config.json": {**LORA, "modules_to_save": ["embed_tokens"]}},
        {**SMALL, "tie_word_embeddings": True},
        None,
    ),
    # Records.
    (
        "JIA-Lab-research/LongLoRA#181 with a record: the base's config.json instead of the trained one",
        "record and config differ",
        {"config.json": SMALL, "pose.json": {"target_length": 32768, "trained": {"steps": 100}}},
        None,
        None,
    ),
    (
        "fw-ai/cookbook#335: all rows were filtered, and the run ends as complete after 0 steps",
        "nothing trained",
        {
            "config.json": new(SMALL, yarn(4.0, 8192, rope_theta=1e5), max_position_embeddings=32768),
            "pose.json": {"target_length": 32768, "trained": {"steps": 0}},
        },
        None,
        None,
    ),
]

LONGROPE = {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}

# What looks like one of the above, and works. The published configs are in tests/data/published_configs.
HEALTHY: list[tuple[str, dict[str, dict[str, Any]], dict[str, Any] | None]] = [
    ("meta-llama/Llama-2-7b-hf: no base and no scaling", {"config.json": LLAMA2}, None),
    ("HuggingFaceTB/SmolLM2-135M", {"config.json": SMALL}, None),
    ("Qwen/Qwen3-8B: a maximum of 40,960 without scaling", {"config.json": {**QWEN3, "rope_scaling": None}}, None),
    (
        "Qwen/Qwen3-8B with YaRN as its model card says, and the maximum raised",
        {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768), **LONG}},
        None,
    ),
    (
        "the same in both forms, as this package writes it",
        {
            "config.json": {
                **QWEN3,
                "rope_parameters": yarn(4.0, 32768, rope_theta=1e6),
                "rope_scaling": yarn(4.0, 32768, rope_theta=1e6),
                **LONG,
            }
        },
        None,
    ),
    (
        "meta-llama/Llama-3.1-8B",
        {"config.json": {**LLAMA3, "rope_scaling": LLAMA3_ROPE, **LONG}, "generation_config.json": {"top_p": 0.9}},
        None,
    ),
    (
        "gradientai/Llama-3-8B-Instruct-262k: a larger base and no scaling",
        {"config.json": {**LLAMA3, "rope_theta": 283461213.0, "max_position_embeddings": 262144}},
        None,
    ),
    ("microsoft/Phi-3-mini-128k-instruct", {"config.json": {**PHI3, "rope_scaling": LONGROPE}}, None),
    (
        "microsoft/Phi-3-mini-128k-instruct at its first release",
        {"config.json": {**PHI3, "rope_scaling": {**LONGROPE, "type": "su"}}},
        None,
    ),
    (
        "Qwen/Qwen3.5-4B with YaRN inside text_config, and the keys of its family",
        {
            "config.json": nested(
                rope_parameters={**QWEN35["text_config"]["rope_parameters"], **yarn(4.0, 262144)},
                max_position_embeddings=1048576,
            )
        },
        None,
    ),
    (
        "unslothai/unsloth: linear scaling with the maximum raised",
        {
            "config.json": {
                **LLAMA2,
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "max_position_embeddings": 16384,
            }
        },
        None,
    ),
    (
        "meta-llama/Llama-3.1-8B: a tokenizer without a limit",
        {
            "config.json": {**LLAMA3, "rope_scaling": LLAMA3_ROPE, **LONG},
            "tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656},
        },
        None,
    ),
    (
        "Qwen/Qwen2.5-7B-Instruct: a tokenizer with a larger limit than the window",
        {"config.json": QWEN2, "tokenizer_config.json": {"model_max_length": 131072}},
        None,
    ),
    (
        "meta-llama/Llama-2-7b-hf: generation ends at the window",
        {"config.json": LLAMA2, "generation_config.json": {"max_length": 4096}},
        None,
    ),
    (
        "transformers writes its default max_length=20, which it treats as not set",
        {"config.json": SMALL, "generation_config.json": {"max_length": 20}},
        None,
    ),
    (
        "Qwen/Qwen3-8B with the usual values of YaRN in one form only",
        {
            "config.json": new(
                QWEN3,
                yarn(4.0, 32768, rope_theta=1e6, attention_factor=1.1386294361119891, beta_fast=32, beta_slow=1),
                rope_scaling=yarn(4.0, 32768, rope_theta=1e6),
                **LONG,
            )
        },
        None,
    ),
    (
        "openbmb/MiniCPM3-4B: a part of each head has its own width",
        {
            "config.json": {
                **PHI3,
                **{"model_type": "minicpm3", "hidden_size": 2560, "num_attention_heads": 40, "qk_rope_head_dim": 32},
                "rope_scaling": {"type": "longrope", "long_factor": [1.1] * 16, "short_factor": [1.0] * 16},
            }
        },
        None,
    ),
    (
        "a tokenizer without a limit, as some tools write it",
        {"config.json": SMALL, "tokenizer_config.json": {"model_max_length": float("inf")}},
        None,
    ),
    ("huggingface/peft: a LoRA adapter of the model as it is", {"adapter_config.json": LORA}, LLAMA2),
    (
        "axolotl-ai-cloud/axolotl: an adapter with the base's config and tokenizer",
        {"adapter_config.json": LORA, "config.json": SMALL, "tokenizer_config.json": {"model_max_length": 8192}},
        SMALL,
    ),
    (
        "huggingface/peft: embeddings and head of a model with tied weights trained together",
        {"adapter_config.json": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}},
        {**SMALL, "tie_word_embeddings": True},
    ),
    (
        "a full run of this package",
        {
            "config.json": {**SMALL, "rope_scaling": yarn(4.0, 8192), "max_position_embeddings": 32768},
            "tokenizer_config.json": {"model_max_length": 32768},
            "pose.json": {"target_length": 32768, "model": {"original_length": 8192}, "trained": {"steps": 10}},
        },
        None,
    ),
]
