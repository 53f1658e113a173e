"""Find the model inside its wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def unwrap(model: Any) -> Any:
    """Return the transformers model inside DDP, FSDP, DeepSpeed, torch.compile and PEFT wrappers, in any order."""
    *_, inner = shells(model)
    return inner


def embeddings_and_norms(model: Any) -> dict[str, list[str]]:
    """Return the paths of the modules that LongLoRA (arXiv 2309.12307) trains in addition to LoRA, by their kind.

    Norms are those with weights. All families name their classes so: LlamaRMSNorm, LayerNorm, Gemma3RMSNorm, …
    """
    table = model.get_input_embeddings()
    return {
        "embeddings": [path for path, module in model.named_modules() if module is table],
        "norms": [
            path
            for path, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and next(module.parameters(recurse=False), None) is not None
        ],
    }


def last_names(paths: Iterable[str]) -> list[str]:
    """Return the last parts of paths, each once, e.g. ["norm"] for model.norm and model.layers.0.norm."""
    return sorted({path.rsplit(".", 1)[-1] for path in paths})


def shells(model: Any) -> Iterator[Any]:
    """Yield a model, then what each wrapper holds, down to the transformers model.

    Example:
        >>> [type(each).__name__ for each in shells(DistributedDataParallel(get_peft_model(llama, LoraConfig())))]
        ['DistributedDataParallel', 'PeftModel', 'LoraModel', 'LlamaForCausalLM']
    """
    while True:
        yield model
        if hasattr(model, "get_base_model"):
            # Wrappers pass attributes on, so `model` may be a wrapper of the PEFT model: the answer is the same.
            yield model.base_model
            inner = model.get_base_model()
        else:
            # Not `or`: the truth of a compiled model is its length, which it does not have.
            inner = getattr(model, "module", getattr(model, "_orig_mod", None))
        if inner is None or inner is model:
            return
        model = inner
