"""Whole modules that are trained beside an adapter: kept in float32, as PEFT keeps the adapter's own weights.

Models are loaded in bf16, and PEFT copies such modules as they are. A bf16 number has 8 bits: a norm of 1 moves in
steps of 0.004 or more, an embedding of 0.01 in steps of 0.00006, and an optimizer's smaller steps are rounded away.
"""

from __future__ import annotations

import sys
from typing import Any

from pose_plugin.log import log


def keep_small_steps(trainer: Any) -> int:
    """Casts half-precision copies of `modules_to_save` to float32; what they give out stays in the type it had.

    To be called before the optimizer is made. DeepSpeed and FSDP2 keep float32 weights of their own, and no mixture.

    Returns:
        how many weights were cast.
    """
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
