"""What each rank of a distributed run does and sees. Two ranks are forked children of the test process on CPU (gloo).

The strategies are those of `example_configs/accelerate` and `example_configs/deepspeed`, by accelerate's own reading of
these files. What a CPU needs beside them is in `on_cpu`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "example_configs"


# Axolotl's own keys; it reads no accelerate file.
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
    },
}


class Case(NamedTuple):
    framework: str
    strategy: str
    adapter: str

    def __str__(self) -> str:
        return "-".join(self)


CASES = [
    Case(framework, strategy, adapter)
    for framework, strategies in {
        "trl": ("ddp", "zero2", "zero3", "fsdp2"),
        "axolotl": ("ddp", "zero2", "zero3", "fsdp2"),
        "loop": ("fsdp2",),
    }.items()
    for strategy in strategies
    for adapter in ("full", "lora", "qlora")
    # FSDP2 and 4-bit weights: Axolotl's way there wants a GPU.
    if adapter != "qlora" or (framework == "axolotl" and strategy != "fsdp2")
]


def twin(case: Case) -> Case:
    """The same run in one process."""
    return Case(case.framework, "single", "lora_only" if case == NO_MODULES else case.adapter)


# Axolotl cannot save modules_to_save under FSDP2: KeyError, once the training is done.
NO_MODULES = Case("axolotl", "fsdp2", "lora")


def whole_modules(case: Case) -> list[str]:
    """What is trained in full beside an adapter."""
    if case == NO_MODULES or case.adapter in ("full", "lora_only"):
        return []
    return ["norm"] if case.adapter == "qlora" else ["norm", "embed_tokens"]


def environment(case: Case) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets for a strategy's example, on two CPU processes."""
    if case.framework == "loop":
        return {}
    device = {"fsdp2": {"ACCELERATE_TORCH_DEVICE": "cpu"}, "ddp": {"ACCELERATE_USE_CPU": "true"}}.get(case.strategy, {})
    if case.framework == "axolotl":  # torchrun's own are enough
        return device if case.strategy == "fsdp2" else {}
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    line = ["--config_file", str(CONFIGS / "accelerate" / f"{case.strategy}.yaml"), "--num_processes", "2"]
    # No bf16, so that losses can be compared; port 0 is any.
    line += ["--mixed_precision", "no", "--main_process_port", "0", "script.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(line))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config or ())
    found = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    names = [name for name in found if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]
    return {name: found[name] for name in names} | device


@contextmanager
def taken_port() -> Iterator[str]:
    """For `accelerate launch --main_process_port`: a port on which somebody listens.

    Asked for any (0), the launcher looks a free one up and releases it, and it may be another's by the time that rank 0
    listens there. Told of a taken one, it lets torchrun bind one itself.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def import_frameworks() -> None:
    """Import what the ranks need, so that `forked` imports the rest of it once for all of them."""
    for name in ("deepspeed", "peft", "trl", "axolotl"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def on_cpu(strategy: str) -> None:
    """Called first by each rank: what the strategy needs where there is no GPU.

    - The examples name the DeepSpeed file relative to the root of the repository.
    - DeepSpeed compiles a shared-memory kernel for all-reduce on CPU, a minute with g++; gloo does without.
    - Without `use_cpu` accelerate finds no backend, and would run each rank alone. With it, accelerate would run DDP in
      place of FSDP. So FSDP gets a GPU whose name is "cpu" and backend gloo; no launch line does this.
    """
    import torch

    os.chdir(ROOT)
    if strategy in ("ddp", "single"):
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    prepare = PartialState._prepare_backend

    def prepare_backend(state: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        backend, kind = prepare(state, *args, **kwargs)
        return backend or "gloo", DistributedType.MULTI_GPU if strategy == "fsdp2" else kind

    PartialState._prepare_backend = prepare_backend
    if strategy == "fsdp2":
        from transformers import training_args

        torch.cuda.set_device = lambda device: None  # Axolotl
        training_args.is_torch_bf16_gpu_available = lambda: True
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def frequencies(model: Any) -> dict[str, tuple[str, list[float]]]:
    """Name → (dtype, values) of every inv_freq, exactly."""
    return {
        name.rsplit("rotary_emb")[-1]: (str(buffer.dtype), buffer.double().tolist())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq")
    }


def seen(trainer: Any, model: Any) -> dict[str, Any]:
    """What a rank has seen of its run, in a form that passes between processes."""
    import torch

    from tests.integration.records import logits_far_out

    history = trainer.state.log_history
    return {
        "world": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "kind": trainer.accelerator.distributed_type.value,
        "stage": stage(trainer),
        "divided": divided(model),
        "dtype": str(next(model.parameters()).dtype),
        "wrapped": type(trainer.model_wrapped).__name__,
        "losses": [line["loss"] for line in history if "loss" in line],
        "eval_losses": [line["eval_loss"] for line in history if "eval_loss" in line],
        "measured": [line for line in history if "passkey/k_max" in line],
        "frequencies": frequencies(model),
        # bitsandbytes' layers on CPU cannot leave training mode.
        "logits": [] if getattr(model, "is_loaded_in_4bit", False) else logits_far_out(model),
    }


def stage(trainer: Any) -> int | None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return plugin.zero_stage if plugin is not None else None


def divided(model: Any) -> bool:
    """Whether at least one weight is, outside of a forward, not whole on this rank."""
    return any(
        (hasattr(p, "ds_status") and p.numel() == 0) or (hasattr(p, "to_local") and p.to_local().numel() < p.numel())
        for p in model.parameters()
    )


def completeness(trainer: Any) -> list[bool]:
    """For each save, filled in later: whether our record was there when this rank left it.

    Where every rank takes part in a save, writing it takes a while.
    """
    from pose_plugin.training.callback import PoSECallback
    from pose_plugin.training.saving import weights_are_divided

    ours = next(each for each in trainer.callback_handler.callbacks if isinstance(each, PoSECallback))
    complete, save_model = ours.complete, trainer.save_model
    found: list[bool] = []
    while_others_wait = 0.5 if weights_are_divided(trainer) else 0.0

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(while_others_wait)
        complete(*args, **kwargs)

    def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        save_model(output_dir, *args, **kwargs)
        found.append((Path(output_dir or trainer.args.output_dir) / "pose.json").exists())

    ours.complete, trainer.save_model = late, save
    return found


def fault_of(name: str) -> Any:
    """A callback that spoils the run of rank 1, and of no other, when training begins."""
    from transformers import TrainerCallback

    class Fault(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1":
                FAULTS[name](kwargs["model"])

    return Fault()


def lose_the_mask(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__ == "LlamaModel":
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
            )


def spoil_the_frequencies(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(2)


FAULTS = {"mask": lose_the_mask, "frequencies": spoil_the_frequencies}


def lora() -> Any:
    from peft import LoraConfig

    # Norms and embeddings are trained along; without dropout, since masks differ with the number of ranks.
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["norm", "embed_tokens"])


def trl(
    folder: Path, case: Case, resume: str | None = None, out: str = "out", fault: str | None = None, **config: Any
) -> dict[str, Any]:
    """One rank, or the single process, of a TRL run: four steps of two rows, checkpoints, and a saved model."""
    from tests.integration import trl_runs

    on_cpu(case.strategy)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    values = {
        "output_dir": str(folder / out),
        "per_device_train_batch_size": 2 // world,
        "per_device_eval_batch_size": 2 // world,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "num_train_epochs": 1,
        "use_cpu": case.strategy != "fsdp2",
        **config,
    }
    trainer = trl_runs.sft(folder, peft=lora() if case.adapter == "lora" else None, **values)
    divided_at_birth = divided(trainer.model)
    if fault is not None:
        trainer.callback_handler.callbacks.insert(0, fault_of(fault))
    complete = completeness(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return {**seen(trainer, trainer.model), "divided_at_birth": divided_at_birth, "complete": complete}


def axolotl(folder: Path, case: Case, resume: str | None = None, out: str = "out", **config: Any) -> dict[str, Any]:
    """One rank, or the single process, of `axolotl train`: four steps of two rows, checkpoints, and a saved model."""
    from transformers import TrainerCallback

    from tests.integration import axolotl_runs

    # All that DDP and DeepSpeed need on a CPU is set by the plugin itself.
    on_cpu("fsdp2" if case.strategy == "fsdp2" else "ddp")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # Rows of one length: Axolotl takes the mean of the ranks' losses, not of all tokens.
    axolotl_runs.make_rows(folder / "rows.jsonl", low=40, high=41)
    lora = {**axolotl_runs.LORA, "lora_dropout": 0.0, "lora_modules_to_save": whole_modules(case) or None}
    adapters = {
        "full": {},
        "lora": lora,
        "lora_only": lora,
        "qlora": {
            **lora,
            "adapter": "qlora",
            "load_in_4bit": True,
            # ZeRO-3 gathers weights of one type only: 4-bit weights are kept as the others are.
            "bnb_config_kwargs": {"bnb_4bit_quant_storage": "float32"},
        },
    }
    values = axolotl_runs.base_yaml(
        folder,
        plugins=["pose_plugin", *["tests.integration.recorder.FSDPOnCPU"] * (case.strategy == "fsdp2")],
        pose={"target_length": 512, "rope": "yarn"},
        output_dir=str(folder / out),
        micro_batch_size=2 // world,
        max_steps=4,
        save_steps=2,
        dataloader_num_workers=0,
        resume_from_checkpoint=resume,
        deepspeed=str(CONFIGS / "deepspeed" / f"{case.strategy}.json") if case.strategy.startswith("zero") else None,
        **adapters[case.adapter],
        **(FSDP2 if case.strategy == "fsdp2" else {}),
        **config,
    )
    found: dict[str, Any] = {}

    def on_setup(model: Any, trainer: Any) -> None:
        found["divided_at_birth"] = divided(model)
        found["complete"] = completeness(trainer)

        class Look(TrainerCallback):
            def on_train_end(self, *args: Any, **kwargs: Any) -> None:
                # While all ranks are here.
                found.update(seen(trainer, trainer.model))

        trainer.add_callback(Look())

    axolotl_runs.train(values, on_setup)
    return found


def loop(folder: Path, case: Case) -> dict[str, Any]:
    """One rank, or the single process, of a training loop without a trainer."""
    from tests.integration.fully_sharded import train

    return train(folder, case)


def main() -> None:
    """`-m tests.integration.distributed zero3 script.py …`: the script with what a CPU needs, for real launchers."""
    import runpy
    import sys

    on_cpu(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def saved_tensors(folder: Path) -> dict[str, int]:
    """Name → number of values, of everything in a folder's safetensors files."""
    import math

    from safetensors import safe_open

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found[name] = math.prod(file.get_slice(name).get_shape())
    return found


def saved_values(folder: Path) -> dict[str, Any]:
    """Name → values, of everything in a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor.tolist() for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def reloaded(folder: Path, adapter: str) -> dict[str, Any]:
    """The saved model, loaded as anybody would load it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.integration.records import logits_far_out

    config = AutoConfig.from_pretrained(folder / "out")
    if adapter == "lora":
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(folder / "base", config=config)
        model: Any = PeftModel.from_pretrained(base, folder / "out")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "out")
    return {"frequencies": frequencies(model), "logits": logits_far_out(model)}


if __name__ == "__main__":
    main()
