"""Small optimizer steps on bf16 weights: a bf16 number has 8 bits, so smaller steps are rounded away.

A norm weight of 1 moves in steps of 0.004 or more, an embedding weight of 0.01 in steps of 0.00006. Models are loaded
in bf16, so:

- Whole modules that are trained next to an adapter are cast to float32. PEFT copies them as they are, although it keeps
  the adapter's weights in float32.
- If all weights are trained in bf16, float32 would double their memory. That is the user's decision, so the run only
  logs how much is lost.

DeepSpeed keeps float32 weights, and accelerate's FSDP makes them; Axolotl's FSDP2 does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from pose_plugin.utils.log import log

# Weights of each tensor that are tested.
SAMPLE = 4096
# Up to this share of lost steps there is no warning, unless a tensor loses all.
LITTLE = 0.05
# An optimizer that rounds up or down at random, so that steps are right on average, and its argument.
ROUNDING = "adamw_torch_8bit", "bf16_stochastic_round"


def watch_small_steps(trainer: Any) -> None:
    """Add `LostSteps` to a trainer, once."""
    if not any(isinstance(each, LostSteps) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(LostSteps(trainer))


def keep_small_steps(trainer: Any) -> int:
    """Cast half-precision copies of `modules_to_save` to float32; the type of their outputs stays.

    Call it before the optimizer is made. DeepSpeed and FSDP take no mixture of types, so nothing is cast there.
    `LostSteps` checks what remains in half precision.

    Returns:
        the number of tensors that were cast.
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
        log.info("modules_to_save: %d tensors are trained in float32, so that small steps are not rounded away", cast)
    return cast


def _giving(half: Any) -> Any:
    """Return a hook that casts a module's output to the type it had with weights of type `half`.

    That is the wider type of input and weights: norms get float32 inputs and return float32.
    """
    import torch

    def cast(module: Any, args: Any, output: Any) -> Any:
        given = args[0].dtype if args and args[0].is_floating_point() else half
        return output.to(torch.promote_types(given, half))

    return cast


class LostSteps(TrainerCallback):
    """Log a warning before the first step if steps as large as the learning rate are rounded away."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        # DeepSpeed's optimizer steps on float32 weights and copies them.
        if optimizer is None or self.trainer.is_deepspeed_enabled or not state.is_world_process_zero:
            return
        warning = warning_of_lost_steps(self.trainer, optimizer)
        if warning:
            log.warning(warning)


def warning_of_lost_steps(trainer: Any, optimizer: Any) -> str | None:
    """Return a sentence for the log if the optimizer's steps are rounded away, else None.

    Nothing is lost with float32 weights, large steps, or an optimizer that keeps remainders (see `keeps_remainders`).
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if keeps_remainders(optimizer):
        return None
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    halves = [(names.get(id(weight), ""), weight, step) for weight, step in _half_precision(optimizer)]
    if not halves:
        return None
    shares = [(name, weight.numel(), lost_share(weight, step)) for name, weight, step in halves]
    lost = sum(size * share for _, size, share in shares) / max(sum(size for _, size, _ in shares), 1)
    still = [name for name, _, share in shares if share == 1]
    if lost < LITTLE and not still:
        return None
    dtype = str(halves[0][1].dtype).removeprefix("torch.")
    entirely = f", in {len(still)} tensors entirely ({still[0]})" if still else ""
    cause, fixes = _cause_and_fixes(trainer, all("beacon_" in name for name, *_ in halves))
    return (
        f"{cause} the trained weights are in {dtype} without a float32 copy, and a step as large as "
        f"learning_rate={max(step for *_, step in halves):g} is rounded away in {lost:.0%} of them{entirely}. "
        f"Use {fixes}"
    )


def _cause_and_fixes(trainer: Any, beacons: bool) -> tuple[str, str]:
    name, argument = ROUNDING
    if beacons:
        return (
            "beacon.dtype=None:",
            "dtype: float32 in the `beacon:` block (BeaconConfig(dtype='float32')), or DeepSpeed",
        )
    args = trainer.args
    if type(trainer).__module__.startswith("axolotl"):
        cause = f"bf16={getattr(args, 'bf16', None)}:"
        rounding = f"optimizer: {name} with optim_args: {{{argument}: true}}"
        if trainer.is_fsdp_enabled:
            return cause, f"deepspeed: …/zero3.json instead of FSDP, or {rounding} and fp32_norms: true"
        return cause, f"deepspeed: …/zero2.json (works on one GPU), or {rounding}, or bf16: false, or an adapter"
    return f"the model was loaded in half precision (bf16={getattr(args, 'bf16', None)}):", (
        "dtype=torch.float32 when loading it and bf16=True for computing, or "
        f"optim='{name}' with optim_args='{argument}=True', or DeepSpeed, or an adapter"
    )


def _half_precision(optimizer: Any) -> Iterator[tuple[Any, float]]:
    """Yield trained weights in half precision, each with the largest learning rate it will have."""
    import torch

    for group in optimizer.param_groups:
        # Schedulers keep the peak as initial_lr. Adafactor without a learning rate computes its steps itself.
        step = float(group.get("initial_lr", group.get("lr")) or 0.0)
        for parameter in group["params"] if step else ():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                yield parameter, step


def lost_share(weight: Any, step: float) -> float:
    """Return the share of a tensor's weights that do not change by a step of this size, neither up nor down.

    Args:
        weight: a tensor in half precision; of a sharded one, this rank's part is tested.
        step: its size; AdamW's steps are about as large as the learning rate.
    """
    weight = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().flatten()
    if not weight.numel():
        return 0.0
    # An odd stride, as an even one could stay in one column of a matrix.
    some = weight[:: weight.numel() // SAMPLE | 1]
    wide = some.float()
    stays = ((wide + step).to(some.dtype) == some) & ((wide - step).to(some.dtype) == some)
    return float(stays.float().mean())


def keeps_remainders(optimizer: Any) -> bool:
    """Return whether an optimizer's small steps reach weights in half precision.

    That is so with torchao's stochastic rounding, Kahan summation in optimi (its default) and in AnyPrecisionAdamW, and
    FlashOptim's weights in two parts.
    """
    if getattr(optimizer, ROUNDING[1], False):
        return True
    return any(
        group.get("kahan_sum", False) is not False
        or bool(group.get("use_kahan_summation"))
        or bool(group.get("master_bytewidth"))
        for group in optimizer.param_groups
    )
