"""A few logits of the trained model, saved beside it: what a reload is held against.

32 tokens at positions that begin at 0, pass the old window and end at the target's last position; of each the logits of
64 tokens of the vocabulary. Some 20 kB, and one short forward a save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pose_plugin.checkpoints.reload_worker import measure, weight_type
from pose_plugin.rope.read import RECORD_KEY, lookup, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import write_whole

PROBE = "pose_probe.json"
_TOKENS, _KEPT = 32, 64
_KEYS = ("ids", "positions", "vocabulary", "logits", "frequencies", "dtype", "compute", "quantization")


def probe_inputs(vocabulary: int, original_length: int, target_length: int) -> dict[str, list[int]]:
    """The same for the same three numbers.

    Args:
        vocabulary: size of the vocabulary.
        original_length, target_length: the old and the new window, in tokens.

    Returns:
        `ids` and `positions`, n each (n ≤ 32, positions rising, three pieces: from 0, from the old window, up to the
        target), and `vocabulary`, the token ids whose logits are kept.
    """
    near, last = 12, 8
    old = min(original_length, target_length)
    pieces = [range(near), range(old, old + _TOKENS - near - last), range(target_length - last, target_length)]
    positions = sorted({position for piece in pieces for position in piece if 0 <= position < target_length})
    # Low and special ids are left out where there are enough others.
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
    """Asks the trained model.

    Args:
        model: the live model, unwrapped (a PEFT model counts as such).
        target_length: L_t, tokens.
        compute: the type it computes in, where autocast lets that differ from its weights', e.g. "bfloat16".
        forward: what is called in its place; under FSDP and ZeRO-3 the wrapped model, on every rank.
        device: of the input; default: that of the embeddings.
    """
    text = text_config(model.config)
    original = (lookup(text, RECORD_KEY) or {}).get("original_length") or text.max_position_embeddings
    probe: dict[str, Any] = probe_inputs(int(text.vocab_size), int(original), target_length)
    dtype = weight_type(model)
    if compute is None and dtype == "float32" and _in_tf32(model):
        compute = "tf32"
    how = {"dtype": dtype, "compute": compute or dtype, "quantization": quantization(model.config)}
    return probe | how | measure(model, probe, forward, device)


def read_probe(folder: str | Path) -> dict[str, Any] | None:
    """What was asked and answered, or None where a folder holds no probe.

    Raises:
        PoSEError: the file is not JSON, or lacks what is compared.
    """
    file = Path(folder) / PROBE
    if not file.is_file():
        return None
    try:
        probe = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PoSEError(f"{file} is not valid JSON ({error}); save the model again") from None
    lacking = [key for key in _KEYS if key not in probe]
    if lacking or not probe["logits"]:
        raise PoSEError(f"{file} lacks {', '.join(lacking) or 'logits'}, so nothing can be compared; save again")
    return probe


def write_probe(folder: str | Path, probe: Mapping[str, Any]) -> None:
    write_whole(Path(folder) / PROBE, json.dumps(probe) + "\n")


def quantization(config: Any) -> dict[str, Any] | None:
    """How the weights were loaded, as JSON; None where they are not quantised."""
    found = lookup(config, "quantization_config")
    if found is None:
        return None
    values = dict(found) if isinstance(found, Mapping) else found.to_dict()
    return json.loads(json.dumps(values, default=str))


def _in_tf32(model: Any) -> bool:
    import torch

    return torch.backends.cuda.matmul.allow_tf32 and any(each.is_cuda for each in model.parameters())
