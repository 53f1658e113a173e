"""llama.cpp's converter writes the rope into the GGUF file, from which its programs read it.

Read in the source within PyPI's llama-cpp-python 0.3.36 (ggml-org/llama.cpp at 0c1e57098, conversion/base.py,
conversion/llama.py, src/llama-context.cpp), and run with it: logits of a tiny model past its old window agree with
transformers' for linear, ntk, base, yarn and llama3 (benchmarks/engines.py).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export.common import Export, as_full_model
from pose_plugin.export.engines import ignored_keys, require_kind
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import atomic_file

CONVERTER = "convert_hf_to_gguf.py"
# Their converters write frequency lists; the others drop them silently.
_WITH_LISTS = ("phi3", "phimoe", "minicpm", "minicpm3")
# Their converter always writes that nothing is scaled (conversion/command_r.py).
_UNSCALED = ("cohere", "cohere2", "cohere2_moe")


def export(saved: Saved) -> Export:
    """Return the lines that convert a full model (an adapter is merged first) and start a server.

    Raises:
        PoSEError: a rope that the GGUF file cannot hold for this model.
    """
    if saved.kind == "longrope" and saved.model_type not in _WITH_LISTS:
        raise PoSEError(
            f"llama.cpp's converter writes no frequency list for model type {saved.model_type!r}, so "
            f"rope_type={saved.kind} would be served at the base's frequencies. Train with rope: yarn, or serve with "
            "transformers, vLLM or SGLang"
        )
    if saved.model_type in _UNSCALED and saved.kind != "default":
        raise PoSEError(
            f"llama.cpp's converter writes no scaling for model type {saved.model_type!r}, so rope_type={saved.kind} "
            "would be served at the base's frequencies. Train with rope: ntk or base, or serve with transformers, vLLM "
            "or SGLang"
        )
    if saved.model_type == "ministral3" and saved.kind != "yarn":
        raise PoSEError(
            f"llama.cpp's converter stops at model type {saved.model_type!r} with rope_type={saved.kind}. Train with "
            "rope: yarn, or serve with transformers, vLLM or SGLang"
        )
    require_kind("llama.cpp", saved)
    notes = [f"the file contains the rope; {same_as_flags(saved)}"]
    notes += ignored_keys("llama.cpp", saved)
    lines, folder = as_full_model(saved)
    file = gguf_file(saved)
    return Export(
        [
            *lines,
            f"python {CONVERTER} {folder} --outfile {shlex.quote(file)}",
            f"llama-server -m {shlex.quote(file)} -c {saved.maximum}",
        ],
        notes,
    )


def gguf_file(saved: Saved) -> str:
    """Return where the converter writes."""
    return str(saved.gguf or saved.shown / f"{saved.name}.gguf")


def same_as_flags(saved: Saved) -> str:
    """Return the flags that a GGUF of the plain base would need; with this file they change nothing."""
    if saved.kind == "llama3":
        return "Llama 3's scaling is a tensor in it, for which there are no flags"
    if saved.kind == "longrope":
        return "the frequency lists are tensors in it, for which there are no flags"
    flags = [f"--rope-freq-base {saved.rope['rope_theta']:.17g}"]
    if saved.kind in ("linear", "yarn"):
        flags = [f"--rope-scaling {saved.kind}", f"--rope-scale {saved.factor:g}"]
    if saved.kind == "yarn":
        flags.append(f"--yarn-orig-ctx {saved.rope['original_max_position_embeddings']}")
    return f"a GGUF of the plain base would need {' '.join(flags)}"


def find_converter(home: str | None) -> Path:
    """Return the path of llama.cpp's converter.

    Args:
        home: folder of llama.cpp, or None for the PATH.

    Raises:
        PoSEError: it is not there.
    """
    if home is None:
        found = shutil.which(CONVERTER)
        if found is None:
            raise PoSEError(
                f"{CONVERTER} is not on the PATH; add --llama-cpp DIR, the folder of llama.cpp, or run the printed "
                "lines yourself"
            )
        return Path(found)
    path = Path(home)
    path = path / CONVERTER if path.is_dir() else path
    if not path.is_file():
        raise PoSEError(f"--llama-cpp {home} has no {CONVERTER}; name the folder of a llama.cpp checkout")
    return path


def convert(saved: Saved, home: str | None, arguments: list[str] | None = None) -> Path:
    """Run llama.cpp's converter on a full model.

    Returns: the GGUF file.

    Raises:
        PoSEError: an adapter, no converter, or one that failed, with its last lines.
    """
    made = export(saved)
    if saved.base is not None:
        raise PoSEError(f"{saved.path} is an adapter; merge it first:\n  " + "\n  ".join(made.lines[:2]))
    converter = find_converter(home)
    file = Path(gguf_file(saved))
    if file.is_dir():
        raise PoSEError(f"--output {file} is a folder; name the GGUF file in it")
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as part:
        command = [sys.executable, str(converter), str(saved.path), "--outfile", str(part), *(arguments or [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not part.is_file():
            last = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise PoSEError(f"{converter} failed with code {done.returncode}:\n{last}")
    return file
