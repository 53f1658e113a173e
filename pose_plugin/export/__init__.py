"""How to serve a saved folder: one file per engine, with `export(saved) -> Export`.

To add an engine, write its file, add its name to `ENGINES`, and add what it derives by itself to `RULES` in engines.py.
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
    "mlx": "mlx",
    "tgi": "tgi",
}

# These read, or may read, the keys of transformers 4 only.
OLDER_READERS = ("llama.cpp", "ollama", "mlx", "tgi")


def exporter(engine: str) -> Callable[[Saved], Export]:
    """Return the `export` function of an engine."""
    export: Callable[[Saved], Export] = import_module(f"{__name__}.{ENGINES[engine]}").export
    return export
