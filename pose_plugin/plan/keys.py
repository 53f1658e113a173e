"""Single keys of an Axolotl YAML: numbers, nested blocks, and misspelt keys."""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.utils.errors import PoSEError


def number(
    cfg: Mapping[str, Any], key: str, default: Any, least: float = 1, whole: bool = True, most: float = math.inf
) -> Any:
    """Return a number of the YAML, or `default` if the key is missing.

    Raises:
        PoSEError: the value is not a number, not whole, below `least` or above `most`.
    """
    value = cfg.get(key)
    if value is None:
        return default
    try:
        # YAML reads 1e-5 as text, and true would otherwise count as 1.
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not least <= found <= most or found == math.inf or (whole and found != int(found)):
        limit = f" and at most {int(most)}" if most < math.inf else ""
        raise PoSEError(
            f"{key}={value!r} cannot work: it must be a {'whole ' * whole}number of at least {least:g}{limit}"
        )
    return int(found) if whole else found


def block(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the values of a nested block, empty if it is missing.

    Raises:
        PoSEError: the value is not a block.
    """
    value = cfg.get(key) or {}
    if not isinstance(value, Mapping):
        raise PoSEError(f"{key}={value!r} is not a block of keys; write them indented below `{key}:`")
    return value


def unknown_keys(cfg: Mapping[str, Any]) -> list[str]:
    """Return a warning for each top-level key that the installed Axolotl would silently drop.

    Nothing is reported if Axolotl is not installed, or if another plugin may add keys.
    """
    plugins = cfg.get("plugins") or []
    known = known_keys()
    ours = set(PoSESettings.model_fields) - known
    if not known or any(str(name).partition(".")[0] not in ("pose_plugin", "axolotl") for name in plugins):
        return []
    warnings = []
    for key in map(str, cfg):
        # Keys that begin with x- or a dot hold YAML anchors, by custom.
        if key in known or key.startswith(("x-", ".", "_")):
            continue
        close = difflib.get_close_matches(key, known | ours, n=1)
        block = " in the `pose:` block" if close and close[0] in ours else ""
        hint = f". Did you mean {close[0]}{block}?" if close else ""
        warnings.append(f"{key}: Axolotl does not know this key and drops it silently{hint}")
    return warnings


def known_keys() -> set[str]:
    """Return the keys that the sources of the installed Axolotl's schema name; empty if there is no Axolotl.

    The sources are searched, because importing the schema takes seconds and leaves out old names, which validators
    look up as strings. A key counts as known if it is a field of some class, or a string: too many rather than too few.
    """
    spec = importlib.util.find_spec("axolotl")
    if spec is None or not spec.submodule_search_locations:
        return set()
    root = Path(spec.submodule_search_locations[0])
    found = {"pose", "beacon"}
    for path in (*root.glob("utils/schemas/*.py"), *root.glob("integrations/**/args.py")):
        names = re.findall(r"^    (\w+):|[\"'](\w+)[\"']", path.read_text(encoding="utf-8"), re.M)
        found |= {field or text for field, text in names}
    return found
