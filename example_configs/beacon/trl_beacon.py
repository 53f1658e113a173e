"""Train Activation Beacon with TRL: a frozen model learns to read texts many times its window. One file to copy.

    python example_configs/quickstart/make_data.py
    python example_configs/beacon/trl_beacon.py                    # the tiny base of the quick start, on CPU

    # A real model and rows of {"text": …} longer than an interval.
    python example_configs/beacon/trl_beacon.py --model HuggingFaceTB/SmolLM2-1.7B-Instruct --data texts.jsonl \\
        --interval 1024 --ratios 2 4 8 16 32 --max-length 16384 --batch-size 1 --learning-rate 5e-5

Only the line marked (1) differs from other SFTTrainer scripts. Under DeepSpeed ZeRO-3, use `--no-checkpointing`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from pose_plugin import BeaconConfig

QUICKSTART = Path(__file__).parents[1] / "quickstart"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(QUICKSTART / "base"), help="name or folder of the base model")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "train.jsonl", help="a JSONL file")
    parser.add_argument("--interval", type=int, default=32, help="tokens that are condensed together")
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4, 8, 16], help="raw tokens per beacon")
    parser.add_argument("--max-length", type=int, default=384, help="longest text, in tokens")
    parser.add_argument("--output", default="outputs/trl_beacon", help="folder to save to")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step and process")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="5e-5 for a large model")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="sdpa")
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            max_length=args.max_length,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            gradient_checkpointing=not args.no_checkpointing,
            logging_steps=10,
            save_strategy="no",
            bf16=gpu,
            use_cpu=not gpu,
            report_to=[],
        ),
        train_dataset=load_dataset("json", data_files=str(args.data), split="train"),
        processing_class=tokenizer,
        # In float32, since in bf16 small steps would be lost to rounding.
        peft_config=BeaconConfig(interval=args.interval, ratios=args.ratios, headroom=0, dtype="float32"),  # (1)
    )
    trainer.train()
    trainer.save_model()
    print(f"saved to {args.output}: peft.PeftModel.from_pretrained(base, {args.output!r})")


if __name__ == "__main__":
    main()
