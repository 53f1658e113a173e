"""Give a condensed text to programs that do not have this package.

Memory, overlap and open interval are ordinary keys and values at positions 0, 1, 2, …, so the plain base model can read
on behind them. Nothing is condensed any more, so what follows must fit the window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from pose_plugin.beacon.views import KeysValues, join
from pose_plugin.utils.errors import PoSEError


def rows_of(cache: Any) -> list[KeysValues]:
    """Return all keys and values of a stream, layer by layer, (batch, heads, memory + overlap + open rows, head size).

    Raises:
        PoSEError: the cache is empty.
    """
    if not cache.tokens:
        raise PoSEError("cache: it is empty; condense a text first, context = model.condense(ids)")
    parts = [*cache.pieces, *(layers for layers in (cache.overlap, cache.open) if layers)]
    return [(join(p[at][0] for p in parts), join(p[at][1] for p in parts)) for at in range(len(parts[0]))]


def dynamic_cache(cache: Any) -> DynamicCache:
    """Return a stream as a DynamicCache, for the `generate` of the base model without any adapter.

    Until the open interval is full, the logits are bit for bit those of the Beacon model.

    Examples:
        >>> past = context.to_dynamic_cache()
        >>> mask = torch.ones(1, past.get_seq_length() + question_ids.shape[1], dtype=torch.long)
        >>> answer = base.generate(question_ids, attention_mask=mask, past_key_values=past)

    Raises:
        PoSEError: the cache is empty.
    """
    found = DynamicCache()
    for layer, (keys, values) in enumerate(rows_of(cache)):
        found.update(keys.detach(), values.detach(), layer)
    return found


def save_cartridge(cache: Any, model: Any, folder: str | Path) -> None:
    """Write a stream as a PEFT Cartridge: a prefix of keys and values, which PEFT ≥ 0.20 loads without this package.

    Examples:
        >>> save_cartridge(context, model, "document")
        >>> model = PeftModel.from_pretrained(base, "document")
        >>> answer = model.generate(input_ids=question_ids)

    Args:
        cache: the stream, of one text.
        model: the Beacon model that condensed it, for the name of its base.
        folder: to write `adapter_config.json` and `adapter_model.safetensors` to.

    Raises:
        PoSEError: the cache is empty or holds several texts.
    """
    from peft import CartridgeConfig
    from safetensors.torch import save_file

    from pose_plugin.beacon.register import find_tuner

    layers = rows_of(cache)
    if cache.batch_size != 1:
        raise PoSEError(f"cache: it holds {cache.batch_size} texts, a Cartridge one; condense each by itself")
    base = find_tuner(model).model
    keys = layers[0][0]
    config = CartridgeConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(base, "name_or_path", None),
        inference_mode=True,
        num_virtual_tokens=keys.shape[2],
        num_frozen_tokens=0,
        num_layers=len(layers),
        num_attention_heads=keys.shape[1],
        token_dim=keys.shape[1] * keys.shape[3],
    )
    # PEFT's order: (virtual tokens, layers × (keys, values) × heads × head size).
    flat = torch.stack([side[0].transpose(0, 1).flatten(1) for pair in layers for side in pair], dim=1).flatten(1)
    config.save_pretrained(str(folder))
    save_file({"prompt_embeddings": flat.detach().contiguous()}, str(Path(folder) / "adapter_model.safetensors"))
