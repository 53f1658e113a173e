"""Check every strategy on real GPUs in bf16, with TRL and Axolotl: losses, frequencies and saved files.

    python benchmarks/gpu/distributed.py                        # all GPUs of the machine; one is enough to start
    python benchmarks/gpu/distributed.py --only zero3,fsdp2     # some strategies
    python benchmarks/gpu/distributed.py --only ddp --cpu --processes 2    # only shows that it runs

It repeats what the tests do on two CPU processes in float32, with bf16, NCCL and the GPU's kernels. Losses must agree
with those of one process. Each run takes about a minute and prints one JSON line with `"verdict": "verified"` or what
is wrong. The script exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.integration.distributed import saved_tensors  # noqa: E402

CONFIGS = ROOT / "example_configs"
BASE = CONFIGS / "quickstart" / "base"
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
STEPS, TARGET, WINDOW = 20, 2048, 128
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STRATEGIES), help="strategies, separated by commas")
    parser.add_argument("--frameworks", default="trl,axolotl", help="separated by commas")
    parser.add_argument("--processes", type=int, help="default: the number of GPUs")
    parser.add_argument("--cpu", action="store_true", help="without a GPU; for ddp only")
    args = parser.parse_args()
    processes = args.processes or _gpus()
    if not processes:
        print("no GPU found; --cpu --only ddp shows that the script runs", file=sys.stderr)
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        # Rows per step, the same for one process and for many.
        rows = math.lcm(8, processes)
        _data(home / "rows.jsonl", STEPS * rows)
        for framework, adapters in {"trl": ("full", "lora"), "axolotl": ("full", "lora", "qlora")}.items():
            for adapter in adapters if framework in args.frameworks.split(",") else ():
                alone: list[float] = []
                for strategy in ("single", *args.only.split(",")):
                    many = 1 if strategy == "single" else processes
                    found = _run(home, framework, Run(strategy, adapter, many, rows // many, args.cpu))
                    alone = alone or found["losses"]
                    problems = _problems(found, alone)
                    wrong += bool(problems)
                    line = {"losses": found["losses"], "tensors": len(found["tensors"]), "seconds": found["seconds"]}
                    case = {"framework": framework, "strategy": strategy, "adapter": adapter, "processes": processes}
                    print(json.dumps(case | line | {"verdict": "; ".join(problems) or "verified"}), flush=True)
    return int(wrong > 0)


class Run(NamedTuple):
    strategy: str
    adapter: str
    processes: int
    batch: int  # rows per step and process
    cpu: bool


def _run(home: Path, framework: str, run: Run) -> dict[str, Any]:
    out = home / f"{framework}-{run.strategy}-{run.adapter}"
    command = (_trl if framework == "trl" else _axolotl)(home, out, run)
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(run))
    output = done.stdout + done.stderr
    (home / f"{out.name}.log").write_text(output)
    return {
        "code": done.returncode,
        "end": output[-1500:],
        "tested": output.count("[pose_plugin] self-test passed"),
        "losses": [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)],
        "tensors": saved_tensors(out),
        "config": json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {},
        "adapter": run.adapter,
        "seconds": round(time.monotonic() - began),
    }


def _problems(found: dict[str, Any], alone: list[float]) -> list[str]:
    if found["code"]:
        return [f"exit code {found['code']}: {found['end']}"]
    problems = []
    if found["tested"] != 1:
        problems.append(f"the self-test was reported {found['tested']} times")
    losses = found["losses"]
    # bf16 rounds each logit by up to 2^-9, and ranks add in a different order.
    if not losses or len(losses) != len(alone) or max(abs(a - b) for a, b in zip(losses, alone, strict=True)) > 0.02:
        problems.append(f"losses {losses}, in one process {alone}")
    tensors = found["tensors"]
    if not tensors or not all(tensors.values()):
        problems.append(f"no or empty tensors were saved: {[name for name, size in tensors.items() if not size]}")
    if found["adapter"] != "full" and not any("lora_B" in name for name in tensors):
        problems.append("no adapter was saved")
    if found["config"].get("max_position_embeddings") != TARGET:
        problems.append("the saved config is not the extended one")
    return problems


def _trl(home: Path, out: Path, run: Run) -> list[str]:
    script = [str(CONFIGS / "trl" / "sft.py"), "--data", str(home / "rows.jsonl"), "--output", str(out)]
    script += ["--steps", str(STEPS), "--batch-size", str(run.batch), "--target-length", str(TARGET)]
    script += ["--lora"] * (run.adapter == "lora")
    if run.strategy == "single":
        return [sys.executable, *script]
    file = CONFIGS / "accelerate" / f"{run.strategy}.yaml"
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        "--main_process_port",
        "0",
    ]
    return [*launch, "--num_processes", str(run.processes), *["--mixed_precision", "no"] * run.cpu, *script]


def _axolotl(home: Path, out: Path, run: Run) -> list[str]:
    values: dict[str, Any] = {
        "base_model": str(BASE),
        "plugins": ["pose_plugin"],
        "pose": {"target_length": TARGET, "train_length": WINDOW, "rope": "yarn", "content": "skip"},
        "datasets": [{"path": str(home / "rows.jsonl"), "ds_type": "json", "type": None}],
        "sequence_len": 256,
        "output_dir": str(out),
        "dataset_prepared_path": str(out) + "-prepared",
        "micro_batch_size": run.batch,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 10,
        "seed": 42,
        "attn_implementation": "sdpa",
        "bf16": not run.cpu,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": not run.cpu,
    }
    if run.adapter != "full":
        values |= {
            "adapter": run.adapter,
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "lora_target_linear": True,
        }
        values |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
    if run.adapter == "qlora":
        # ZeRO-3 and FSDP shard weights of one type only, so 4-bit weights are stored in the type of the others.
        storage = "float32" if run.cpu else "bfloat16"
        values |= {"load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_storage": storage}}
    if run.strategy.startswith("zero"):
        values["deepspeed"] = str(CONFIGS / "deepspeed" / f"{run.strategy}.json")
    if run.strategy == "fsdp2":
        values |= FSDP2
    path = home / f"{out.name}.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    train = [sys.executable, "-m", "axolotl.cli.main", "train", str(path), "--launcher"]
    if run.strategy == "single":
        return [*train, "python"]
    return [
        *train,
        "torchrun",
        "--",
        f"--nproc_per_node={run.processes}",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
    ]


def _data(path: Path, rows: int) -> None:
    """Write rows of one length in which each token follows from the one before, so that there is something to learn."""
    picker = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            start, step = picker.randrange(500), picker.choice((3, 7))
            ids = [(start + i * step) % 500 + 2 for i in range(200)]
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}) + "\n")


def _environment(run: Run) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    # Axolotl finds torchrun on PATH.
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if run.cpu:
        return variables | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    # One process would split its batch over all visible GPUs.
    return variables | ({"CUDA_VISIBLE_DEVICES": "0"} if run.strategy == "single" else {})


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
