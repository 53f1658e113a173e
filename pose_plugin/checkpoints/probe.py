"""A few logits of the trained model, saved next to it, with which a reload is compared.

32 tokens at positions that begin at 0, pass the old window and end at the target's last position; for each the logits
of 64 tokens of the vocabulary. About 20 kB, and one short forward per save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.checkpoints.reload_worker import measure, weight_type
from pose_plugin.checkpoints.schema import Probe, read
from pose_plugin.rope.read import lookup, original_length, text_config
from pose_plugin.utils.files import Stage

PROBE = "pose_probe.json"
_TOKENS, _KEPT = 32, 64


def probe_inputs(vocabulary: int, original_length: int, target_length: int) -> dict[str, list[int]]:
    """Return the inputs of a probe; they depend on these three numbers only.

    Args:
        vocabulary: its size.
        original_length, target_length: the old and the new window, in tokens.

    Returns:
        `ids` and `positions`, n each (n ≤ 32, positions rising, three pieces: from 0, from the old window, up to the
        target), and `vocabulary`, the token ids whose logits are kept.
    """
    near, last = 12, 8
    old = min(original_length, target_length)
    pieces = [range(near), range(old, old + _TOKENS - near - last), range(target_length - last, target_length)]
    positions = sorted({position for piece in pieces for position in piece if 0 <= position < target_length})
    # Low ids, which are often special, are left out if there are enough others.
    ids = np.random.default_rng(0).integers(min(32, vocabulary // 2), vocabulary, len(positions))
    kept = np.unique(np.linspace(0, vocabulary - 1, _KEPT).astype(int))
    return {"ids": ids.tolist(), "positions": positions, "vocabulary": kept.tolist()}


def take_probe(
    model: Any,
    target_length: int,
    *,
    compute: str | None = None,
    forward: Callable[..., Any] | None = None,
    device: Any = None,
) -> dict[str, Any]:
    """Ask the trained model.

    Args:
        model: the live model, a PEFT model included.
        target_length: L_t, tokens.
        compute: the type it computes in, if autocast makes that differ from its weights', e.g. "bfloat16".
        forward: called instead of the model; under FSDP and ZeRO-3 the wrapped model, on every rank.
        device: of the input; default: that of the embeddings.

    Returns: what `read_probe` returns.
    """
    text = text_config(model.config)
    original = original_length(text) or text.max_position_embeddings
    probe: dict[str, Any] = probe_inputs(int(text.vocab_size), int(original), target_length)
    dtype = weight_type(model)
    if compute is None and dtype == "float32" and _in_tf32(model):
        compute = "tf32"
    how = {"dtype": dtype, "compute": compute or dtype, "quantization": quantization(model.config)}
    return probe | how | measure(model, probe, forward, device)


def read_probe(folder: str | Path) -> dict[str, Any] | None:
    """Return the inputs, answers and types of a folder's probe; None without a probe.

    Raises:
        PoSEError: the file is not JSON, or lacks something that is compared.
    """
    file = Path(folder) / PROBE
    return read(file, Probe).model_dump(exclude_unset=True) if file.is_file() else None


def stage_probe(stage: Stage, probe: Mapping[str, Any] | None) -> None:
    """Write a probe into a folder, or remove that of an earlier model, with which this one must not be compared."""
    if probe is None:
        stage.remove(PROBE)
    else:
        stage.write(PROBE, json.dumps(probe) + "\n")


def quantization(config: Any) -> dict[str, Any] | None:
    """Return how the weights were quantised when loaded, as JSON values, or None."""
    found = lookup(config, "quantization_config")
    if found is None:
        return None
    values = dict(found) if isinstance(found, Mapping) else found.to_dict()
    return json.loads(json.dumps(values, default=str))


def _in_tf32(model: Any) -> bool:
    import torch

    return torch.backends.cuda.matmul.allow_tf32 and any(each.is_cuda for each in model.parameters())
