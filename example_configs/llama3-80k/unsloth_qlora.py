"""Llama-3-8B-Instruct from 8K to 80K with Unsloth, which the published recipe (arXiv 2404.19553) used, on one GPU.

Run:       pip install ".[trl]" unsloth
           python example_configs/llama3-80k/unsloth_qlora.py                                  # PoSE, rows of 8,192
           python example_configs/llama3-80k/unsloth_qlora.py --train-length 81920 --output outputs/llama3-80k
Hardware:  one GPU of 24 GB for PoSE, or of 80 GB for whole rows (estimated). Published for whole rows: 8 hours on 8 ×
           A800 (80 GB). One GPU accumulates the 8 rows of a step.
Data:      chats.jsonl and texts.jsonl as for trl_qlora.py in this folder.
Results:   published for whole rows: needle in a haystack 100 % up to 80K, topic retrieval 100 %, LongBench 47.19 on
           average (base: 43.20), InfiniteBench long-book QA 30.92 (base: 7.00), MMLU 64.44 (base: 65.91). For PoSE
           nothing is published, and it has not been measured. The norms stay frozen as published; the start of the
           run warns about that.

Unsloth replaces the new RoPE base by a linear scaling if `max_seq_length` is beyond the base model's maximum, or if its
own `rope_scaling` is set. Therefore `extended_base` first writes a base folder whose config already has the target.
"""

from __future__ import annotations

import unsloth  # noqa: F401 - before all that it patches

# isort: split
import argparse
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer
from trl_qlora import BATCH, rows
from unsloth import FastLanguageModel

from pose_plugin import PoSECollator
from pose_plugin.frameworks.unsloth import extended_base


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="unsloth/llama-3-8b-Instruct-bnb-4bit", help="name or folder of the base")
    parser.add_argument("--extended", default="outputs/llama-3-8b-80k-base", help="folder for the extended base")
    parser.add_argument("--chats", default="chats.jsonl", help="rows of {'messages': […]}")
    parser.add_argument("--texts", default="texts.jsonl", help="rows of {'text': …}")
    parser.add_argument("--target-length", type=int, default=81920, help="the target window in tokens")
    parser.add_argument("--train-length", type=int, default=8192, help="longest row; PoSE is on below the target")
    parser.add_argument("--output", default="outputs/llama3-80k-unsloth", help="folder to save to")
    parser.add_argument("--max-steps", type=int, default=-1, help="stop before the end of the epoch")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    folder = extended_base(args.model, args.extended, args.target_length, rope="base", theta=2e8)
    model: Any
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder,
        max_seq_length=args.train_length,
        load_in_4bit=True,
        dtype=torch.bfloat16,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=32,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=["embed_tokens"],
        use_gradient_checkpointing="unsloth",
    )
    tokenizer.pad_token = "<|end_of_text|>"
    pose = args.train_length < args.target_length
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            num_train_epochs=1,
            max_steps=args.max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=BATCH,
            learning_rate=5e-5,
            lr_scheduler_type="linear",
            warmup_steps=0,
            train_sampling_strategy="group_by_length",
            max_length=args.train_length,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
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
    )
    trainer.train()
    trainer.save_model(args.output)
    print(f"saved to {args.output}: pose_plugin.load_extended({args.output!r})")


if __name__ == "__main__":
    main()
