"""How to serve a saved folder: one file per engine, with `export(saved) -> Export`.

To add an engine, write its file and add its name to `ENGINES`. What an engine derives by itself was read in its source,
which its file names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export.common import Export

ENGINES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama_cpp",
    "ollama": "ollama",
    "tgi": "tgi",
}

# These read, or may read, the keys of transformers 4 only.
OLDER_READERS = ("llama.cpp", "ollama", "tgi")


def exporter(engine: str) -> Callable[[Saved], Export]:
    """Return the `export` function of an engine."""
    export: Callable[[Saved], Export] = import_module(f"{__name__}.{ENGINES[engine]}").export
    return export
