"""Making a built model's rotary buffers anew, where something between building and training spoilt them.

They are in no checkpoint, so nothing else brings them back: DeepSpeed in bf16 or fp16 casts the whole module, FSDP 1
casts buffers in its first forward, and `to_empty` leaves whatever was in memory.
"""

from __future__ import annotations

from typing import Any

_COARSE = ("torch.bfloat16", "torch.float16")


def restore_rope(model: Any, only_coarse: bool = False) -> list[str]:
    """Makes the buffers of every rotary module anew from the module's config, in float32 and on the same device.

    Args:
        model: a transformers model, wrapped (PEFT, DDP, DeepSpeed, FSDP) or not. Only rotary buffers are touched.
        only_coarse: leaves buffers alone whose type is fine, whatever their values.

    Returns: the names of the buffers that were made anew. A module that cannot be built from its config alone is left
        alone: `verify_rope` tells.
    """
    restored = []
    home = next((p.device for p in model.parameters() if p.device.type != "meta"), "cpu")
    for name, module in model.named_modules():
        old = {key: buffer for key, buffer in module.named_buffers(recurse=False) if key.endswith("inv_freq")}
        if only_coarse:
            old = {key: buffer for key, buffer in old.items() if str(buffer.dtype) in _COARSE}
        if not old or not hasattr(module, "config"):
            continue
        try:
            fresh = type(module)(module.config)
        except Exception:
            continue
        for key, buffer in old.items():
            new = getattr(fresh, key, None)
            if new is not None and new.shape == buffer.shape:
                setattr(module, key, new.detach().float().to(home if buffer.is_meta else buffer.device))
                restored.append(f"{name}.{key}" if name else key)
    return restored
