"""Ollama runs llama.cpp's GGUF file, with a short context unless a Modelfile sets it. Not run."""

from __future__ import annotations

import shlex
from pathlib import Path

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import llama_cpp
from pose_plugin.export.common import Export, served_name


def export(saved: Saved) -> Export:
    """Return the lines that convert, create and run the model, and its Modelfile.

    Raises:
        PoSEError: see llama_cpp.py.
    """
    conversion = llama_cpp.export(saved)
    file = Path(llama_cpp.gguf_file(saved))
    # Ollama looks for a relative path from the Modelfile on.
    source = file.resolve() if saved.gguf else f"./{file.name}"
    modelfile = f"FROM {source}\nPARAMETER num_ctx {saved.maximum}\n"
    name = served_name(saved)
    return Export(
        [
            *conversion.lines[:-1],
            f"ollama create {name} -f {shlex.quote(str(saved.shown / 'Modelfile'))}",
            f"ollama run {name}",
        ],
        [*conversion.notes, "without num_ctx Ollama serves a few thousand tokens of any model"],
        {"Modelfile": modelfile},
    )
