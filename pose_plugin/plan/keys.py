"""Top-level keys of an Axolotl YAML that no version of it here reads: Axolotl drops them without a word.

To import its schema takes many times longer than to read its files, as torch is behind it. They tell the same names:
fields are annotations in classes, and old names are looked up by string before the fields are filled.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_OWN = frozenset({"pose", "beacon"})


def unknown_keys(cfg: Mapping[str, Any]) -> list[str]:
    """A sentence for each key of a YAML that is read by nothing; none where Axolotl is not installed, or where a
    plugin that is not Axolotl's own may bring keys.

    Args:
        cfg: the values of the YAML.
    """
    plugins = cfg.get("plugins") or []
    names = [str(name) for name in plugins] if isinstance(plugins, list) else [str(plugins)]
    if any(name.partition(".")[0] not in ("pose_plugin", "axolotl") for name in names):
        return []
    known = known_keys()
    if not known:
        return []
    said = []
    for key in cfg:
        # Keys that begin with x- or a dot hold YAML anchors, by custom.
        if key in known or str(key).startswith(("x-", ".", "_")):
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        said.append(
            f"{key}={_short(cfg[key])}: Axolotl knows no such key and will drop it without a word"
            + (f". Is {close[0]} meant?" if close else "")
        )
    return said


def known_keys() -> frozenset[str]:
    """Names that the installed Axolotl's schema reads at the top level of a YAML; empty where there is none."""
    spec = importlib.util.find_spec("axolotl")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    return _read(Path(next(iter(spec.submodule_search_locations))))


@functools.cache
def _read(root: Path) -> frozenset[str]:
    schemas = root / "utils" / "schemas"
    trees = {path.name: tree for path in sorted(schemas.glob("*.py")) if (tree := _parsed(path))}
    classes = {node.name: node for tree in trees.values() for node in _classes(tree)}
    found = set(_fields("AxolotlInputConfig", classes))
    if not found:
        return frozenset()
    for name in ("config.py", "validation.py", "deprecated.py"):
        found |= set(_looked_up(trees[name])) if name in trees else set()
    # What Axolotl's own plugins add.
    for path in sorted((root / "integrations").rglob("args.py")):
        for node in _classes(tree) if (tree := _parsed(path)) else ():
            found |= set(_annotated(node)) if node.name.endswith(("Args", "Config")) else set()
    return frozenset(found) | _OWN


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Of a class and of the classes it is made from."""
    node = classes.get(name)
    if node is None:
        return
    yield from _annotated(node)
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from _fields(base.id, classes)


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
            if isinstance(part.value, ast.Call):
                # Other names of the field.
                for word in part.value.keywords:
                    if word.arg in ("alias", "validation_alias"):
                        yield from filter(None, map(_text, ast.walk(word.value)))


def _looked_up(tree: ast.Module) -> Iterator[str]:
    """Names in `data.get("…")`, `data.pop("…")`, `data["…"]` and `"…" in data`: what validators read of the YAML."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop") and _is_data(node.func.value):
                name = _text(node.args[0])
        elif isinstance(node, ast.Subscript) and _is_data(node.value):
            name = _text(node.slice)
        elif isinstance(node, ast.Compare) and any(map(_is_data, node.comparators)):
            name = _text(node.left)
        if name:
            yield name


def _is_data(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "data"


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
