"""Move rotated keys to other positions.

A key rotated to position p becomes the key of position q by one more rotation, of q − p. Its cosines and sines come
*without* the attention factor of YaRN, because the key contains that factor already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pose_plugin.beacon.layout import RAW, Pass, Scheme
from pose_plugin.beacon.views import IntervalView
from pose_plugin.utils.errors import PoSEError

# The frequencies of these kinds change once positions pass a limit. A key rotated before cannot be moved after that.
CHANGING = ("dynamic", "longrope")


def rotate(keys: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return keys moved by `shift` positions, computed in fp32.

    Args:
        keys: rotated keys, (batch, heads, length, head size), halves convention (i is paired with i + rotary/2).
        shift: new − old position, (length,).
        inv_freq: frequencies in radians per position, (rotary size / 2,).

    Returns:
        Tensor of the same shape and dtype.
    """
    # In half precision, the angles of long shifts would be wrong by whole turns.
    angle = shift.to(inv_freq.device, torch.float32)[:, None] * inv_freq.float()[None]
    cos, sin = angle.cos().to(keys.device), angle.sin().to(keys.device)
    half = inv_freq.shape[0]
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.cat(parts, dim=-1).to(keys.dtype)
    return torch.cat([turned, keys[..., 2 * half :]], dim=-1) if keys.shape[-1] > 2 * half else turned


def find_rotary(model: nn.Module) -> Any:
    """Return the one module that rotates queries and keys.

    Raises:
        PoSEError: the model has none, or several with different frequencies.
    """
    found: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    # A model with a RoPE per kind of layer names its buffers differently, so none is found.
    kinds = {str(getattr(module, "rope_type", "default")) for module in found}
    if not found or len(kinds) != 1 or len({tuple(module.inv_freq.shape) for module in found}) != 1:
        raise PoSEError(
            f"model: {type(model).__name__} has {len(found)} rotary embeddings (rope kinds {sorted(kinds)}); Beacon "
            "needs a decoder with one RoPE for all layers, as in Llama, Mistral, Qwen2 and Qwen3"
        )
    return found[0]


def changing_limit(rotary: Any) -> int | None:
    """Return the length after which the frequencies change; None if they never do."""
    if getattr(rotary, "rope_type", "default") not in CHANGING:
        return None
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return int(original or rotary.config.max_position_embeddings)


@torch.no_grad()
def rotating_layers(call: Callable[..., Any], cache_key: str, rotary: Any, modules: list[nn.Module]) -> list[bool]:
    """Return which layers rotate their keys, measured on the model itself.

    A single token attends only to itself, so its hidden states are the same at every position, and its keys differ only
    by the rotation. Some tokens are read at two positions; `rotate` must turn one into the other.

    Args:
        call: the model's forward.
        cache_key: its name for the cache.
        rotary: see `find_rotary`.
        modules: of the model; dropout is switched off meanwhile.

    Returns:
        Per layer that writes to its cache, whether it rotates (NoPE layers do not).

    Raises:
        PoSEError: keys differ in another way, e.g. interleaved pairs, or a RoPE per layer.
    """
    device = rotary.inv_freq.device
    # Modules with weights keep their mode: on some CPUs, a forward in eval mode makes bitsandbytes pack 4-bit weights.
    training = [module for module in modules if module.training and not list(module.parameters(recurse=False))]
    for module in training:
        module.training = False
    try:
        first, second = (_keys_at(call, cache_key, place, device) for place in (7, 3))
    finally:
        for module in training:
            module.training = True
    found = []
    for layer, keys in sorted(first.items()):
        size = keys.abs().max().item()
        at_once = (keys - second[layer]).abs().max().item()
        moved = (rotate(keys, torch.tensor([-4]), rotary.inv_freq) - second[layer]).abs().max().item()
        tolerance = size * (1e-4 if keys.dtype == torch.float32 else 0.03)
        if moved > tolerance and at_once > tolerance:
            raise PoSEError(
                f"model: layer {layer} rotates keys in a way that cannot be moved to other positions (error "
                f"{moved:.2g} of {size:.2g}). Beacon needs RoPE with the halves convention, as in Llama, Mistral, "
                "Qwen2 and Qwen3"
            )
        found.append(moved <= at_once)
    return found


def _keys_at(call: Callable[..., Any], cache_key: str, place: int, device: torch.device) -> dict[int, torch.Tensor]:
    view = IntervalView(Pass(0, (), (RAW,), Scheme(1)), [])
    call(
        # Several tokens, since one may be a padding token, with an embedding of zeros and so with keys of zeros.
        input_ids=torch.arange(8, device=device)[:, None],
        position_ids=torch.tensor([[place]], device=device),
        use_cache=False,
        **{cache_key: view},
    )
    return {layer: keys for layer, (keys, _) in view.seal().items()}
