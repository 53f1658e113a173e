"""Supervised fine-tuning with TRL: train a window of 128 tokens and get one of 2048. One file to copy from.

    python example_configs/quickstart/make_data.py
    python example_configs/trl/sft.py --evaluate            # the tiny base of the quick start, on CPU

    # Two processes on a CPU. On GPUs use ddp, zero2, zero3 or fsdp2, one process per GPU, and no --mixed_precision.
    accelerate launch --config_file example_configs/accelerate/ddp.yaml --num_processes 2 --mixed_precision no \\
        example_configs/trl/sft.py --steps 20

    # A real model, rows of {"text": …} or {"messages": […]}. --qlora loads the base in 4 bits; without either option
    # all weights are trained.
    python example_configs/trl/sft.py --model Qwen/Qwen3-0.6B --data rows.jsonl --target-length 131072 \\
        --train-length 4096 --steps 1000 --batch-size 1 --lora

Hardware: a CPU and a few minutes for the tiny base, a GPU of 8 GB for Qwen3-0.6B with --lora.
Results: with the tiny base, the table of docs/quickstart.md; measure your own model with `pose-plugin evaluate`.

Only the two calls marked (1) and (2) differ from an ordinary SFTTrainer script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from pose_plugin import PoSECollator, extend_context

QUICKSTART = Path(__file__).parents[1] / "quickstart"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(QUICKSTART / "base"), help="name or folder of the base model")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "train.jsonl", help="a JSONL file")
    parser.add_argument("--target-length", type=int, default=2048, help="the target window in tokens")
    parser.add_argument("--train-length", type=int, default=128, help="the trained window in tokens")
    parser.add_argument("--rope", default="yarn", help="linear, ntk, yarn, llama3, auto, none")
    parser.add_argument("--sampler", default="pose", help="pose, randpos, …; none for plain positions")
    parser.add_argument("--content", default="skip", help="skip for long texts, contiguous for chats")
    parser.add_argument("--output", default="outputs/trl_sft", help="folder to save to")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step and process")
    parser.add_argument("--logging-steps", type=int, default=10, help="steps between two lines of the log")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="e.g. 2e-5 for all weights of a large model")
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of all weights")
    parser.add_argument("--qlora", action="store_true", help="the same on a 4-bit base; needs bitsandbytes")
    parser.add_argument("--deepspeed", help="a DeepSpeed JSON, e.g. for the `deepspeed` launcher")
    parser.add_argument("--evaluate", action="store_true", help="passkey retrieval before and after")
    parser.add_argument("--trials", type=int, default=20, help="passkeys per length")
    return parser.parse_args()


def passkey_table(model: Any, tokenizer: Any, args: argparse.Namespace) -> str:
    """Return the share of passkeys found at lengths from the trained window to the target."""
    from pose_plugin.evaluation.measures.passkey import passkey

    lengths = [args.train_length]
    while lengths[-1] * 2 < args.target_length:
        lengths.append(lengths[-1] * 2)
    found = passkey(model, tokenizer, [*lengths, args.target_length], trials=args.trials).by_length()
    return "  ".join(f"{length}: {row.score:.0%}" for length, row in found.items())


def main() -> None:
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    if args.deepspeed and not torch.cuda.is_available():
        # With use_cpu, transformers does not start DeepSpeed's communication, and ZeRO-3 would count one process.
        import deepspeed

        deepspeed.init_distributed()

    # Before the model, so that ZeRO-3 shards it while it is loaded.
    training = SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=10,
        # `content: skip` takes its window out of the whole document, so TRL must not truncate it first.
        max_length=args.train_length if args.content == "contiguous" else None,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        gradient_checkpointing=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=args.logging_steps,
        # Plain rows may be split over GPUs, into equal parts.
        pad_to_multiple_of=16 if args.sampler == "none" else None,
        save_strategy="no",
        deepspeed=args.deepspeed,
        report_to="none",
    )

    # (1) The model is built from the extended config.
    config = extend_context(AutoConfig.from_pretrained(args.model), args.target_length, rope=args.rope)
    quantized: dict[str, Any] = {}
    if args.qlora:
        from transformers import BitsAndBytesConfig

        quantized["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if training.bf16 else torch.float32,
        )
    # Train all weights in float32 and compute in bf16: weights kept in bf16 lose small steps.
    dtype = "auto" if args.lora or args.qlora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        args.model, config=config, dtype=dtype, attn_implementation="sdpa", **quantized
    )

    adapter = None
    if args.lora or args.qlora:
        from peft import LoraConfig

        # A new RoPE needs the norms trained too, not only the projections (LongLoRA).
        norms = [name for name, _ in model.named_modules() if name.endswith(("layernorm", "norm"))]
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=norms or None)

    trainer = SFTTrainer(
        model,
        args=training,
        train_dataset=load_dataset("json", data_files=str(args.data), split="train"),
        processing_class=tokenizer,
        # (2) The collator draws positions from the whole target.
        data_collator=PoSECollator(
            tokenizer,
            target_length=args.target_length,
            train_length=args.train_length,
            rope=args.rope,
            sampler=args.sampler,
            content=args.content,
        ),
        peft_config=adapter,
    )
    main_process = trainer.is_world_process_zero()
    if args.evaluate and main_process:
        print("passkey before:", passkey_table(trainer.model, tokenizer, args), flush=True)
    trainer.accelerator.wait_for_everyone()

    trainer.train()
    trainer.save_model(args.output)

    if args.evaluate and main_process:
        trained = trainer.accelerator.unwrap_model(trainer.model)
        print("passkey after: ", passkey_table(trained, tokenizer, args), flush=True)
    trainer.accelerator.wait_for_everyone()
    if main_process:
        print(f"saved to {args.output}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
