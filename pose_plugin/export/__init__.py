"""How each engine is told about the extension. One file an engine; adding one is a file and a line here.

Each has `export(saved) -> Export`. What an engine derives by itself was read in its source, which its file
names.
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

# Those that read, or may read, the keys of transformers 4 only.
OLDER_READERS = ("llama.cpp", "ollama", "tgi")


def exporter(engine: str) -> Callable[[Saved], Export]:
    """The engine's `export`."""
    return import_module(f"{__name__}.{ENGINES[engine]}").export
