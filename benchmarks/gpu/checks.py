"""Check on a real GPU, with real kernels and in bf16, what docs/verified.md states for CPUs.

    benchmarks/gpu/run.sh                                  # everything, about ten minutes on one GPU
    python benchmarks/gpu/checks.py --device cpu --quick   # only shows that it runs

Each line is a check: "verified", what is wrong, or which package is missing. Installed kernels are used: flash-attn,
flash-attn-4, xformers, the one inside PyTorch (Axolotl's sdpa_varlen), Liger, Unsloth. The script writes
results/gpu.json with the GPU's name, and exits with 1 if anything is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The tests hide GPUs unless this is set before they are imported.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import arguments, machine, places  # noqa: E402

from tests.forked import CaseError, forked  # noqa: E402
from tests.integration import matrix  # noqa: E402

KERNELS = {
    "sdpa": None,
    "eager": None,
    "flex_attention": None,
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}


def trl(device: str, folder: Path, route: str, batch: int, backend: str) -> list[str]:
    """Run one step of SFTTrainer in bf16 and probe it with every kind of checkpointing."""
    from tests.integration import trl_runs

    on = {"use_cpu": True} if device == "cpu" else {"use_cpu": False, "bf16": True}
    trainer = trl_runs.sft(
        folder,
        attention=backend,
        per_device_train_batch_size=batch,
        eval_strategy="no",
        max_steps=1,
        gradient_checkpointing=False,
        shape=WIDE,
        **on,
        **matrix.TRL[route],
    )
    probe = matrix.Probe((backend,))
    probe.watch(trainer.model, trainer)
    trainer.train()
    return sorted({seen.verdict() for seen in probe.effects.values()})


def axolotl(device: str, folder: Path, **yaml: Any) -> list[str]:
    """Run one step of `axolotl train` in bf16 and probe it."""
    from tests.integration import axolotl_runs

    folder.mkdir(parents=True)
    axolotl_runs.make_base(folder / "base", **WIDE)
    probe = matrix.Probe((yaml["attn_implementation"],))
    values = axolotl_runs.base_yaml(folder, max_steps=1, bf16=device != "cpu", **yaml)
    axolotl_runs.train(values, probe.watch)
    return sorted({seen.verdict() for seen in probe.effects.values()})


def far_positions(device: str) -> list[str]:
    """Check that a bf16 model distinguishes positions 131069, 131070 and 131071."""
    import torch

    from pose_plugin.rope import extend_context, verify_rope
    from tests.models import make_llama

    config = extend_context(make_llama(**WIDE).config, 131072, "yarn")
    model = type(make_llama())._from_config(config, dtype=torch.bfloat16).to(device)
    verify_rope(model)
    ids = torch.arange(8, 24, device=device)[None]
    near = torch.arange(16, device=device)[None].clone()
    answers = []
    for last in (131069, 131070, 131071):
        near[0, -1] = last
        with torch.no_grad():
            answers.append(model(ids, position_ids=near, attention_mask=torch.ones_like(ids)).logits[0, -1])
    apart = not torch.equal(answers[0], answers[1]) and not torch.equal(answers[1], answers[2])
    return ["verified" if apart else "positions beyond 131069 look the same"]


def unsloth(folder: Path) -> list[str]:
    """Train one step with FastLanguageModel on an extended base, and check that its own scaling is refused."""
    import unsloth  # first, because it replaces parts of the others
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from pose_plugin import PoSECollator
    from pose_plugin.frameworks.unsloth import extended_base
    from tests.integration.trl_runs import texts
    from tests.models import make_llama, save

    save(make_llama(**WIDE), folder / "base")
    base = extended_base(folder / "base", folder / "extended", target_length=512)
    ended = []
    for longest in (64, 1024):
        model, tokenizer = unsloth.FastLanguageModel.from_pretrained(base, max_seq_length=longest, load_in_4bit=False)
        model = unsloth.FastLanguageModel.get_peft_model(model, r=8)
        trainer = SFTTrainer(
            model,
            args=SFTConfig(output_dir=str(folder / "out"), max_steps=1, max_length=64, report_to=[], bf16=True),
            train_dataset=Dataset.from_list(texts()),
            processing_class=tokenizer,
            data_collator=PoSECollator(tokenizer, target_length=512, train_length=64),
        )
        try:
            trainer.train()
            ended.append("trained")
        except Exception as error:
            ended.append(f"{type(error).__name__}: {error}"[:300])
    good = ended[0] == "trained" and "PoSEError" in ended[1] and "max_seq_length" in ended[1]
    return ["verified" if good else f"max_seq_length 64: {ended[0]}; 1024: {ended[1]}"]


# Kernels need heads of at least 64.
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def checks(device: str, quick: bool, home: Path) -> dict[str, tuple[str | None, Callable[[], list[str]]]]:
    """Return each check by its name, with the package that it needs."""
    found: dict[str, tuple[str | None, Callable[[], list[str]]]] = {}
    backends = {"sdpa": None} if quick else KERNELS
    for backend, package in backends.items():
        for route in ("packing_strategy: bfd", "padding_free") if quick else matrix.TRL:
            for batch in (2,) if quick else matrix.BATCHES:
                name = f"TRL, {route}, batch {batch}, {backend}"
                folder = home / str(len(found))
                found[name] = (package, lambda f=folder, r=route, b=batch, k=backend: trl(device, f, r, b, k))
    attentions = {"sdpa": None, "flash_attention_2": "flash_attn", "xformers": "xformers"}
    for backend, package in {"sdpa": None}.items() if quick else attentions.items():
        for route, keys in list(matrix.AXOLOTL.items())[: 1 if quick else None]:
            if "evaluation" in route or (backend == "xformers" and not keys.get("sample_packing")):
                continue
            folder = home / str(len(found))
            yaml = {**keys, "attn_implementation": backend}
            found[f"Axolotl, {route}, batch 2, {backend}"] = (
                package or "axolotl",
                lambda f=folder, y=yaml: axolotl(device, f, **y),
            )
    if not quick:
        liger = {
            "plugins": ["axolotl.integrations.liger.LigerPlugin", "pose_plugin"],
            "attn_implementation": "sdpa",
            **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation"), True),
            "liger_fused_linear_cross_entropy": True,
        }
        found["Axolotl, Liger's kernels"] = ("liger_kernel", lambda: axolotl(device, home / "liger", **liger))
        found["Unsloth"] = ("unsloth", lambda: unsloth(home / "unsloth"))
    found["bf16 at position 131071"] = (None, lambda: far_positions(device))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (package, check) in checks(args.device, args.quick, Path(folder)).items():
            if package is not None and not _is_there(package):
                verdicts[name] = f"not run: {package} is not installed"
            else:
                try:
                    # Each in its own process: CUDA does not work in a fork of a process that used it.
                    verdicts[name] = "; ".join(forked(check, timeout=600).value)
                except CaseError as error:
                    verdicts[name] = "wrong: " + str(error).splitlines()[0][:300]
                except Exception:
                    verdicts[name] = "wrong: " + traceback.format_exc().splitlines()[-1]
            print(f"{verdicts[name]:<12} {name}", flush=True)
    card = forked(_card, args.device).value
    results, _ = places(args.output)
    lines = {"machine": machine("torch", "transformers") | {"card": card}, "checks": verdicts}
    (results / "gpu.json").write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return int(any(verdict != "verified" and not verdict.startswith("not run") for verdict in verdicts.values()))


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _card(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(0) if device != "cpu" else "none"


if __name__ == "__main__":
    raise SystemExit(main())
