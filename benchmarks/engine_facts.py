"""Read again what inference engines do with a saved folder, from the source in their wheels, into engine_facts.json.

Wheels are unpacked in memory and never installed or imported. Download them first:

    pip download --no-deps -d WHEELS vllm==0.33.0   # and vllm==0.29.0, sglang==0.5.23, mlx-lm==0.32.2
    python benchmarks/engine_facts.py WHEELS

`tests/export/test_engines.py` compares pose_plugin/export/engines.py with the result.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "engine_facts.json"


def facts(wheel: Path) -> dict[str, Any]:
    """Return the facts of one wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]

        def source(ending: str) -> str:
            return next((archive.read(name).decode() for name in names if name.endswith(ending)), "")

        return READERS[wheel.name.split("-")[0]](source)


def vllm(source: Any) -> dict[str, Any]:
    window = function(source("vllm/config/model.py"), "_get_and_verify_max_len")
    rope = source("rotary_embedding/__init__.py")
    model = source("transformers_utils/model_arch_config_convertor.py")
    lengths = next(found for found in tuples(model + "\n" + window) if "n_positions" in found)
    return {
        "as written": sorted(next(found for found in tuples(window) if "longrope" in found)),
        "yarn from original": 'rp["original_max_position_embeddings"]' in window,
        "tokenizer counts": "tokenizer_model_max_length" in window,
        "length keys": list(lengths),
        "yarn keys": yarn_keys(rope, "yarn"),
        "kinds": kinds(rope),
        "no DoRA": "does not yet support DoRA" in source("vllm/lora/peft_helper.py"),
        "nested overrides": "_apply_dict_overrides" in source("vllm/config/model.py"),
    }


def sglang(source: Any) -> dict[str, Any]:
    common = source("utils/hf_transformers/common.py")
    rope = source("srt/layers/rotary_embedding/factory.py")
    window = function(common, "get_context_length")
    return {
        "as written": ["llama3"] if "llama3" in window else [],
        "original window counts as factor 1": '"original_max_position_embeddings" in rope_scaling' in window,
        "length keys": list(next(found for found in tuples(common) if "max_seq_len" in found)),
        "yarn keys": yarn_keys(rope, "yarn"),
        "kinds": kinds(rope),
        "no DoRA": "doesn't support DoRA" in source("srt/lora/lora_manager.py"),
        "nested overrides": "isinstance(current, PretrainedConfig)" in source("utils/hf_transformers/config.py"),
    }


def mlx_lm(source: Any) -> dict[str, Any]:
    rope = source("models/rope_utils.py")
    return {
        "yarn keys": sorted(set(next(found for found in tuples(rope) if "beta_fast" in found)) - {ORIGINAL}),
        "kinds": sorted(set(re.findall(r'"([a-z0-9]+)"', "".join(re.findall(r"rope_type (?:==|in) .*", rope))))),
        "llama reads rope_parameters": "rope_parameters" in source("models/llama.py"),
    }


ORIGINAL = "original_max_position_embeddings"
READERS = {"vllm": vllm, "sglang": sglang, "mlx_lm": mlx_lm}


def function(source: str, name: str) -> str:
    """Return the text of a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(source, node) or ""
    return ""


def tuples(source: str) -> Iterator[list[str]]:
    """Yield every tuple and list of texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List):
            values = [
                each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            if values:
                yield values


def yarn_keys(source: str, kind: str) -> list[str]:
    """Return the optional keys that the branch of a kind of rope passes on."""
    branch = source.split(f'scaling_type == "{kind}"')[1].split("scaling_type ==")[0]
    listed = set(re.findall(r'"([a-z_]+)"', branch.split("if k")[1].split("}")[0]))
    return sorted(listed | ({"truncate"} if '"truncate"' in branch else set()))


def kinds(source: str) -> list[str]:
    return sorted(set(re.findall(r'scaling_type == "([a-z0-9_]+)"', source)))


if __name__ == "__main__":
    found = {}
    for wheel in sorted(Path(sys.argv[1]).rglob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        found[f"{name} {version}"] = facts(wheel)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    print(RESULT.read_text())
