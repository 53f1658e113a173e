"""vLLM reads config.json through transformers and derives its maximum from three places.

Read in https://github.com/vllm-project/vllm, `_get_and_verify_max_len` of vllm/config/model.py at
18ec6629253632af0a384f2ffbb8c6b28af322e7 and vllm/model_executor/layers/rotary_embedding at
0cd5784803d83f81fac0794b82cb592d4317d4bf. Not run.
"""

from __future__ import annotations

import shlex
from typing import Any

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import common
from pose_plugin.export.common import Export
from pose_plugin.utils.errors import PoSEError

# vLLM takes their maximum as it is, and multiplies that of the others by the factor.
_AS_WRITTEN = ("su", "longrope", "llama3")


def derived_maximum(
    rope: dict[str, Any], maximum: int, tokenizer_maximum: int | None = None, model_type: str = ""
) -> int:
    """Return the largest --max-model-len that vLLM accepts.

    Args:
        rope: the flat rope dict of the layers that see far.
        maximum: max_position_embeddings.
        tokenizer_maximum: the tokenizer's model_max_length, which counts if it is smaller.
        model_type: vLLM makes an exception for Gemma 3.
    """
    length = float(min(maximum, tokenizer_maximum or maximum))
    kind = rope["rope_type"]
    if kind in _AS_WRITTEN or "gemma3" in model_type:
        return int(length)
    if kind == "yarn":
        length = float(rope["original_max_position_embeddings"])
    return int(length * float(rope.get("factor") or 1.0))


def default_maximum(
    rope: dict[str, Any],
    maximum: int,
    tokenizer_maximum: int | None = None,
    model_type: str = "",
    top_original: int | None = None,
) -> int:
    """Return what vLLM takes without --max-model-len: for longrope the old window, if it is at the config's top."""
    if rope["rope_type"] == "longrope" and top_original:
        return top_original
    return derived_maximum(rope, maximum, tokenizer_maximum, model_type)


def export(saved: Saved) -> Export:
    """Return the line that starts a server.

    Raises:
        PoSEError: the rope's factor or the tokenizer's limit does not reach the maximum.
    """
    most = derived_maximum(saved.rope, saved.maximum, saved.tokenizer_maximum, saved.model_type)
    if most < saved.maximum:
        where = "tokenizer's model_max_length" if saved.kind != "yarn" else "rope's factor × original length"
        raise PoSEError(
            f"vLLM would allow {most} tokens of max_position_embeddings={saved.maximum}: the {where} is lower. "
            "`pose-plugin check` names what differs; a rope.factor given by hand must be target / original"
        )
    top = saved.text.get("original_max_position_embeddings")
    taken = default_maximum(saved.rope, saved.maximum, saved.tokenizer_maximum, saved.model_type, top)
    notes = []
    if taken != saved.maximum:
        notes.append(f"without --max-model-len vLLM would take {taken}, not {saved.maximum}")
    overrides = common.longrope_scale(saved)
    if overrides:
        notes.append("vLLM computes longrope's scale of cos and sin by its own formula unless long_mscale is given")
    if abs(saved.extra_attention - 1) > 1e-6:
        notes.append(
            f"attention_factor={saved.rope['attention_factor']:g} is not YaRN's own; vLLM from before 2026 ignores it"
        )
    if saved.base is not None and common.needs_merging(saved) is None:
        notes.append(
            "the tokenizer of the base may have a lower limit, which would also count, so --tokenizer is given"
        )
        notes.append("vLLM before 0.24 on transformers 4 reads rope_scaling and rope_theta instead of rope_parameters")
    limit = f"--max-model-len {saved.maximum}"
    extra = f" --hf-overrides {common.as_json(overrides)}" if overrides else ""
    return common.serve(
        saved,
        full=lambda folder: f"vllm serve {folder} {limit}{extra}",
        lora=lambda base: (
            f"vllm serve {shlex.quote(base.name)} --enable-lora --lora-modules {common.lora_named(saved)} "
            f"--max-lora-rank {_rank(saved)} --tokenizer {common.quoted(saved)} {limit} "
            f"--hf-overrides {common.as_json(saved.overrides | overrides)}"
        ),
        notes=notes,
    )


def _rank(saved: Saved) -> int:
    # vLLM accepts these ranks only.
    rank = int(saved.adapter.get("r") or 16)
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
