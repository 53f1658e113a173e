"""Ollama runs llama.cpp's GGUF file; its context is short unless a Modelfile says otherwise. Not run here."""

from __future__ import annotations

import shlex
from pathlib import Path

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import llama_cpp
from pose_plugin.export.common import Export


def export(saved: Saved) -> Export:
    """
    Raises:
        PoSEError: see llama.cpp.
    """
    conversion = llama_cpp.export(saved)
    file = Path(llama_cpp.gguf_file(saved))
    modelfile = f"FROM ./{file.name}\nPARAMETER num_ctx {saved.maximum}\n"
    name = shlex.quote(saved.path.resolve().name)
    return Export(
        [
            *conversion.lines[:-1],
            f"ollama create {name} -f {shlex.quote(str(file.with_name('Modelfile')))}",
            f"ollama run {name}",
        ],
        [*conversion.notes, "without num_ctx Ollama serves a few thousand tokens, whatever the file says"],
        {"Modelfile": modelfile},
    )
