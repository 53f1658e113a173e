"""Moving a rotated key to another position.

A key that was rotated to position p becomes the key of position q by one more rotation of q − p, with cosines and
sines *without* the attention factor of YaRN: the key carries that factor already, and would carry it twice.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from pose_plugin.errors import PoSEError

# The frequencies of these kinds change once positions pass a limit, and a key rotated before cannot be moved after.
CHANGING = ("dynamic", "longrope")


def rotate(keys: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keys moved by `shift` positions, computed in fp32.

    Args:
        keys: rotated keys, (batch, heads, length, head size), halves convention (i turns with i + rotary/2).
        shift: new − old position, (length,).
        inv_freq: frequencies in radians per position, (rotary size / 2,).

    Returns:
        Tensor of the same shape and dtype.
    """
    angle = shift.to(inv_freq.device, torch.float32)[:, None] * inv_freq.float()[None]
    cos, sin = angle.cos().to(keys.device), angle.sin().to(keys.device)
    half = inv_freq.shape[0]
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.cat(parts, dim=-1).to(keys.dtype)
    return torch.cat([turned, keys[..., 2 * half :]], dim=-1) if keys.shape[-1] > 2 * half else turned


def find_rotary(model: nn.Module) -> Any:
    """The one module that rotates queries and keys.

    Raises:
        PoSEError: none, or several with different frequencies.
    """
    found: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    # A model with a RoPE for each kind of layer has a dict here, and buffers of other names.
    kinds = {str(getattr(module, "rope_type", "default")) for module in found}
    if not found or len(kinds) != 1 or len({tuple(module.inv_freq.shape) for module in found}) != 1:
        raise PoSEError(
            f"model: {type(model).__name__} has {len(found)} rotary embeddings (rope kinds {sorted(kinds)}); Beacon "
            "needs a decoder with one RoPE for all layers, such as Llama, Mistral, Qwen2, Qwen3"
        )
    return found[0]


def changing_limit(rotary: Any) -> int | None:
    """The positions after which the frequencies change; None where they never do."""
    if getattr(rotary, "rope_type", "default") not in CHANGING:
        return None
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return int(original or rotary.config.max_position_embeddings)


@torch.no_grad()
def check_convention(rotary: Any, attention: nn.Module) -> None:
    """Compares `rotate` with the model's own rotation on a random key.

    Raises:
        PoSEError: the model rotates in another way (interleaved pairs, several axes, no public function).
    """
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    size = int(getattr(attention, "head_dim", 2 * rotary.inv_freq.shape[0]))
    device = rotary.inv_freq.device
    key = torch.linspace(-1, 1, size, device=device).reshape(1, 1, 1, size)
    error: object = "its module has no apply_rotary_pos_emb"
    if apply is not None and device.type != "meta":
        try:
            at = [apply(key.clone(), key.clone(), *rotary(key, torch.tensor([[p]], device=device)))[1] for p in (7, 3)]
            error = (rotate(at[0], torch.tensor([-4]), rotary.inv_freq) - at[1]).abs().max().item()
        except (TypeError, ValueError, RuntimeError, IndexError) as problem:
            error = problem
    if isinstance(error, float) and error < 1e-3:
        return
    raise PoSEError(
        f"model: {type(attention).__name__} rotates keys in a way that cannot be moved to other positions ({error}); "
        "Beacon knows RoPE with the halves convention, such as Llama, Mistral, Qwen2, Qwen3"
    )
