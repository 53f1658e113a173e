"""Small steps and weights in bf16: a bf16 number has 8 bits, and an optimizer's smaller steps are rounded away.

A norm of 1 moves in steps of 0.004 or more, an embedding of 0.01 in steps of 0.00006. Models are loaded in bf16, so:

- whole modules that are trained beside an adapter, which PEFT copies as they are, are kept in float32, as PEFT keeps
  the adapter's own weights;
- where all weights are trained in bf16, twice the memory is the user's to decide on: the run says what is lost.

DeepSpeed keeps float32 weights of its own, and accelerate's FSDP makes them; Axolotl's FSDP2 does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from pose_plugin.utils.log import log

# Weights of each tensor that are looked at.
SAMPLE = 4096
# Lost in fewer of all weights, and in no tensor entirely, a step is as good as taken.
LITTLE = 0.05
ROUNDING = "adamw_torch_8bit", "bf16_stochastic_round"


def watch_small_steps(trainer: Any) -> None:
    """Adds `LostSteps` to a trainer, once."""
    if not any(isinstance(each, LostSteps) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(LostSteps(trainer))


def keep_small_steps(trainer: Any) -> int:
    """Casts half-precision copies of `modules_to_save` to float32; what they give out stays in the type it had.

    To be called before the optimizer is made. DeepSpeed and FSDP2 take no mixture. What remains in half precision is
    looked at when training begins, see `LostSteps`.

    Returns:
        how many weights were cast.
    """
    watch_small_steps(trainer)
    if "peft" not in sys.modules or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return 0
    import torch
    from peft.utils.other import ModulesToSaveWrapper

    cast = 0
    for wrapper in trainer.model.modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for copy in wrapper.modules_to_save.values():
            for weight in copy.parameters():
                if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16):
                    copy.register_forward_hook(_giving(weight.dtype))
                    weight.data = weight.data.float()
                    cast += 1
    if cast:
        log.info("modules_to_save: %d weights are trained in float32, so that small steps are not rounded away", cast)
    return cast


def _giving(half: Any) -> Any:
    """Gives out what the module gave with weights of that type: its input's type where that is wider, as in norms."""
    import torch

    def cast(module: Any, args: Any, output: Any) -> Any:
        given = args[0].dtype if args and args[0].is_floating_point() else half
        return output.to(torch.promote_types(given, half))

    return cast


class LostSteps(TrainerCallback):
    """Warns once, before the first step, where steps as long as the learning rate are rounded away."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        # DeepSpeed's optimizer steps on float32 weights and copies them.
        if optimizer is None or self.trainer.is_deepspeed_enabled or not state.is_world_process_zero:
            return
        said = warning_of_lost_steps(self.trainer, optimizer)
        if said:
            log.warning(said)


def warning_of_lost_steps(trainer: Any, optimizer: Any) -> str | None:
    """What is lost and the ways out; None where nothing is: float32 weights, long steps, or an optimizer that keeps
    the remainder (Kahan summation) or rounds by chance, so that steps are taken in the mean."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if keeps_remainders(optimizer):
        return None
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    halves = [(names.get(id(p), ""), p, step) for p, step in _steps(optimizer)]
    if not halves:
        return None
    shares = [(name, p.numel(), lost_share(p, step)) for name, p, step in halves]
    lost = sum(size * share for _, size, share in shares) / max(sum(size for _, size, _ in shares), 1)
    still = [name for name, _, share in shares if share == 1]
    if lost < LITTLE and not still:
        return None
    dtype = str(halves[0][1].dtype).removeprefix("torch.")
    entirely = f", in {len(still)} tensors entirely ({still[0]})" if still else ""
    how, ways = _ways_out(trainer, all("beacon_" in name for name, *_ in halves))
    return (
        f"{how} the trained weights are kept in {dtype}, with no float32 copy of them, and a step as long as "
        f"learning_rate={max(step for *_, step in halves):g} is rounded away in {lost:.0%} of them{entirely}. "
        f"Ways out: {ways}"
    )


def _ways_out(trainer: Any, beacons: bool) -> tuple[str, str]:
    name, argument = ROUNDING
    if beacons:
        return (
            "beacon.dtype=None:",
            "dtype: float32 in the `beacon:` block (BeaconConfig(dtype='float32')), or DeepSpeed",
        )
    args = trainer.args
    if type(trainer).__module__.startswith("axolotl"):
        how = f"bf16={getattr(args, 'bf16', None)}:"
        rounding = f"optimizer: {name} with optim_args: {{{argument}: true}}"
        if trainer.is_fsdp_enabled:
            return how, f"deepspeed: …/zero3.json in the place of FSDP, or {rounding} and fp32_norms: true"
        return how, f"deepspeed: …/zero2.json, on one GPU too, or {rounding}, or bf16: false, or an adapter"
    how = f"the model was loaded in half precision (bf16={getattr(args, 'bf16', None)}):"
    return how, (
        "load it with dtype=torch.float32 and compute in bf16 (bf16=True), or "
        f"optim='{name}' with optim_args='{argument}=True', or DeepSpeed, or an adapter"
    )


def _steps(optimizer: Any) -> Iterator[tuple[Any, float]]:
    """Trained weights in half precision, each with the longest learning rate it will have."""
    import torch

    for group in optimizer.param_groups:
        # A scheduler keeps the peak beside what it begins with. Without any, Adafactor finds its steps by itself.
        step = float(group.get("initial_lr", group.get("lr")) or 0.0)
        for parameter in group["params"] if step else ():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                yield parameter, step


def lost_share(weight: Any, step: float) -> float:
    """The share of a tensor's weights that a step of that length, up or down, leaves where they are.

    Args:
        weight: a tensor in half precision; of a divided one, this rank's part is looked at.
        step: its length; AdamW's steps are as long as the learning rate.
    """
    weight = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().flatten()
    if not weight.numel():
        return 0.0
    # An odd stride does not stay in one column of a matrix.
    some = weight[:: weight.numel() // SAMPLE | 1]
    wide = some.float()
    stays = ((wide + step).to(some.dtype) == some) & ((wide - step).to(some.dtype) == some)
    return float(stays.float().mean())


def keeps_remainders(optimizer: Any) -> bool:
    """Whether small steps reach weights in half precision: torchao's stochastic rounding, Kahan summation in optimi
    (which it does by itself, unless told not to) and AnyPrecisionAdamW, weights split in two in FlashOptim."""
    if getattr(optimizer, ROUNDING[1], False):
        return True
    return any(
        group.get("kahan_sum", False) is not False
        or bool(group.get("use_kahan_summation"))
        or bool(group.get("master_bytewidth"))
        for group in optimizer.param_groups
    )
