"""What an adapter leaves frozen that a large stretch needs trained."""

from __future__ import annotations

from typing import Any

from pose_plugin.rope.read import RECORD_KEY, lookup, text_config

# LongLoRA (arXiv 2309.12307) stretched Llama 2 eight times: no rank of LoRA alone came near to full training, LoRA with
# embeddings and norms did.
LARGE = 8.0


def frozen_parts(model: Any) -> list[str]:
    """What an adapter trains none of: "embeddings", "norms". Empty for a model without an adapter."""
    if not getattr(model, "peft_config", None):
        return []
    embeddings = model.get_input_embeddings()
    trained = any(parameter.requires_grad for parameter in embeddings.parameters())
    norms = [
        parameter
        for name, module in model.named_modules()
        # Of all families: LlamaRMSNorm, LayerNorm, Gemma3RMSNorm, …
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    ]
    found = [] if trained else ["embeddings"]
    return found if any(parameter.requires_grad for parameter in norms) or not norms else [*found, "norms"]


def warning_of_frozen_parts(model: Any, target_length: int) -> str | None:
    """A sentence for the log where the stretch is large, else None."""
    text = text_config(model.config)
    original = (lookup(text, RECORD_KEY) or {}).get("original_length")
    frozen = frozen_parts(model)
    if not original or not frozen or target_length / original < LARGE:
        return None
    norms = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and next(module.parameters(recurse=False), None) is not None
        }
    )
    embedding = next(
        (
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if module is model.get_input_embeddings() and name
        ),
        "embed_tokens",
    )
    names = ", ".join([embedding] * ("embeddings" in frozen) + norms * ("norms" in frozen))
    return (
        f"the adapter leaves {' and '.join(frozen)} frozen, and {original} → {target_length} tokens is a stretch by "
        f"{target_length / original:g}: LongLoRA (arXiv 2309.12307) needed them trained at 8. Add "
        f"modules_to_save=[{names}] (Axolotl: lora_modules_to_save)"
    )
