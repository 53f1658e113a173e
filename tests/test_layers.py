"""The rooms of the package depend on each other in one direction only, so that each can be read without those above."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pose_plugin"
# From the bottom up. A room imports from rooms further down only; rooms on one line do not import each other.
LAYERS = [
    {"_version", "utils"},
    {"positions", "rope.kinds"},
    {"rope.read", "rope.theory"},
    {"rope.live", "rope.reach"},
    {"rope.source"},
    {"rope.stretch"},
    # The settings know which samplers and kinds of RoPE exist; the rest of rope/ reads the settings.
    {"config"},
    {"rope"},
    {"attention", "checkpoints", "features", "selftest_layers"},
    {"collator"},
    {"selftest"},
    {"evaluation", "export", "synthesize"},
    {"training"},
    {"beacon"},
    {"frameworks"},
    {"doctor", "plan"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# `import pose_plugin` offers names of every room and loads them on first use; the hook of torch patches other packages.
FACE = {"__init__", "__main__", "_autoload", "_editable", "_top"}


def room_of(parts) -> str:
    """The room of a module such as ("rope", "kinds"): the file where LAYERS names it, else its folder."""
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LEVEL else parts[0]


def imports():
    """(file, line, its room, the room that it imports from), imports inside functions included."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pose_plugin":
                for alias in node.names:
                    found = (*node.module.split(".")[1:], alias.name)
                    yield name, node.lineno, room_of(name.with_suffix("").parts), room_of(found)


def test_imports_point_downwards():
    upwards = [
        f"{file}:{line}: {room} imports from {found}"
        for file, line, room, found in imports()
        if room not in FACE and found != room and not LEVEL.get(found, 99) < LEVEL[room]
    ]
    assert not upwards, "\n".join(upwards)


def test_functions_are_short_and_take_few_arguments():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                arguments = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                if lines > 60 or arguments > 8:
                    found.append(f"{file.name}:{node.lineno}: {node.name} has {lines} lines, {arguments} arguments")
    assert not found, "\n".join(found)


def test_benchmarks_and_examples_import_names_that_exist():
    """Some of them need a GPU or another engine, so that no test runs them."""
    missing = []
    for folder in ("benchmarks", "example_configs"):
        for file in sorted((PACKAGE.parent / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("pose_plugin"):
                    continue
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name) and not find_spec(f"{node.module}.{alias.name}"):
                        missing.append(f"{file.name}:{node.lineno}: {node.module}.{alias.name}")
    assert not missing
