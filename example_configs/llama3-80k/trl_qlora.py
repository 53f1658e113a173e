"""Llama-3-8B-Instruct from 8K to 80K with TRL: the published recipe (arXiv 2404.19553), or the same with PoSE.

Run:       pip install ".[trl]" bitsandbytes flash-attn
           torchrun --nproc_per_node 8 example_configs/llama3-80k/trl_qlora.py                 # whole rows
           python example_configs/llama3-80k/trl_qlora.py --train-length 8192 --output outputs/llama3-80k-pose
Hardware:  8 GPUs of 80 GB for whole rows of 81,920 tokens. Published: 8 hours on 8 × A800 (80 GB). One GPU of 24 GB
           for rows of 8,192 tokens; `pose-plugin plan` of qlora-pose.yaml, the same run, estimates the memory.
Data:      chats.jsonl, {"messages": [{"role": "user", "content": "…"}, …]}: the loss is on the assistant's turns, and
           rows longer than the window are dropped. texts.jsonl, {"text": "…"}: cut at the window. Published: 15,500
           and 5,000 rows.
Results:   published for whole rows: needle in a haystack 100 % up to 80K, topic retrieval 100 %, LongBench 47.19 on
           average (base: 43.20), InfiniteBench long-book QA 30.92 (base: 7.00), MMLU 64.44 (base: 65.91). For PoSE
           nothing is published, and it has not been measured. The norms stay frozen as published; the start of the
           run warns about that.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, concatenate_datasets, load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from pose_plugin import PoSECollator, extend_context

# Llama 3's format. {% generation %} marks the assistant's turns, from which the tokenizer makes the loss mask.
TEMPLATE = (
    "{% for message in messages %}{{ bos_token if loop.first }}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
BATCH = 8  # rows per step over all GPUs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="meta-llama/Meta-Llama-3-8B-Instruct", help="name or folder of the base")
    parser.add_argument("--chats", default="chats.jsonl", help="rows of {'messages': […]}")
    parser.add_argument("--texts", default="texts.jsonl", help="rows of {'text': …}")
    parser.add_argument("--target-length", type=int, default=81920, help="the target window in tokens")
    parser.add_argument("--train-length", type=int, default=81920, help="longest row; PoSE is on below the target")
    parser.add_argument("--output", default="outputs/llama3-80k", help="folder to save to")
    parser.add_argument("--max-steps", type=int, default=-1, help="stop before the end of the epoch")
    return parser.parse_args()


def rows(tokenizer: Any, args: argparse.Namespace) -> Dataset:
    """Return input_ids and labels of conversations and texts."""

    def chat(row: dict[str, Any]) -> dict[str, list[int]]:
        made = tokenizer.apply_chat_template(
            row["messages"],
            chat_template=TEMPLATE,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, trained = made["input_ids"], made["assistant_masks"]
        return {"input_ids": ids, "labels": [i if on else -100 for i, on in zip(ids, trained, strict=True)]}

    def text(row: dict[str, Any]) -> dict[str, list[int]]:
        ids = tokenizer(row["text"])["input_ids"][: args.train_length]
        return {"input_ids": ids, "labels": ids}

    with PartialState().main_process_first():
        chats = load_dataset("json", data_files=args.chats, split="train")
        chats = chats.map(chat, remove_columns=chats.column_names)
        kept = chats.filter(lambda row: len(row["input_ids"]) <= args.train_length)
        texts = load_dataset("json", data_files=args.texts, split="train")
        texts = texts.map(text, remove_columns=texts.column_names)
    print(f"{len(kept)} of {len(chats)} conversations fit into {args.train_length} tokens; {len(texts)} texts")
    return concatenate_datasets([kept, texts])


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    state = PartialState()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = "<|end_of_text|>"

    config = extend_context(
        AutoConfig.from_pretrained(args.model), args.target_length, rope="base", theta=2e8
    )  # 500,000 before
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        config=config,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        attn_implementation="flash_attention_2" if gpu else "sdpa",
        device_map={"": state.local_process_index} if gpu else None,
    )
    pose = args.train_length < args.target_length
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            num_train_epochs=1,
            max_steps=args.max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=max(1, BATCH // state.num_processes),
            learning_rate=5e-5,
            lr_scheduler_type="linear",
            warmup_steps=0,
            train_sampling_strategy="group_by_length",
            max_length=None,  # the rows are cut already
            bf16=True,
            use_cpu=not gpu,
            gradient_checkpointing=True,
            logging_steps=1,
            save_strategy="epoch",
            report_to="none",
        ),
        train_dataset=rows(tokenizer, args),
        processing_class=tokenizer,
        data_collator=PoSECollator(
            tokenizer,
            target_length=args.target_length,
            train_length=args.train_length,
            sampler="pose" if pose else "none",
            unskipped_ratio=0.1 if pose else 0.0,  # some plain rows, a precaution for short texts
        ),
        peft_config=LoraConfig(
            r=32,
            lora_alpha=16,
            lora_dropout=0.0,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            modules_to_save=["embed_tokens"],
            task_type="CAUSAL_LM",
        ),
    )
    trainer.train()
    trainer.save_model(args.output)
    if state.is_main_process:
        print(f"saved to {args.output}: pose_plugin.load_extended({args.output!r})")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
