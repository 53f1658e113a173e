"""SGLang reads config.json through transformers; its maximum is the config's, sometimes times the factor.

Read in https://github.com/sgl-project/sglang: `get_context_length` of python/sglang/srt/utils/hf_transformers,
`_derive_context_length` of python/sglang/srt/configs/model_config.py at 001adf564fd332c285397a46a034ee2f93ba7515, and
python/sglang/srt/layers/rotary_embedding at 108c36c008291c3a1ea524342837056c503c5724. Not run.
"""

from __future__ import annotations

import shlex
from typing import Any

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import common
from pose_plugin.export.common import Export


def derived_maximum(rope: dict[str, Any], maximum: int) -> int:
    """Return the largest --context-length that SGLang accepts, which is also its default.

    It multiplies the maximum by the factor, unless the rope has its original length or is Llama 3's.
    """
    if "original_max_position_embeddings" in rope or rope["rope_type"] == "llama3":
        return maximum
    return int(maximum * float(rope.get("factor") or 1.0))


def export(saved: Saved) -> Export:
    """Return the line that starts a server."""
    notes = []
    taken = derived_maximum(saved.rope, saved.maximum)
    if taken != saved.maximum:
        notes.append(f"without --context-length SGLang would take {taken}, not {saved.maximum}")
    overrides = common.longrope_scale(saved)
    if overrides:
        notes.append("SGLang computes longrope's scale of cos and sin by its own formula unless long_mscale is given")
    if abs(saved.extra_attention - 1) > 1e-6:
        overrides = {"rope_parameters": saved.rope_with(attn_factor=saved.extra_attention)}
        notes.append("SGLang does not read attention_factor; attn_factor multiplies its own 0.1·ln s + 1")
    start, limit = "python -m sglang.launch_server --model-path", f"--context-length {saved.maximum}"
    extra = f" --json-model-override-args {common.as_json(overrides)}" if overrides else ""
    return common.serve(
        saved,
        full=lambda folder: f"{start} {folder} {limit}{extra}",
        lora=lambda base: (
            f"{start} {shlex.quote(base.name)} --enable-lora --lora-paths {common.lora_named(saved)} "
            f"--tokenizer-path {common.quoted(saved)} {limit} "
            f"--json-model-override-args {common.as_json(saved.overrides | overrides)}"
        ),
        notes=notes,
    )
