"""Read the small files of any model or adapter folder without judging them. Needs neither torch nor transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.lengths import GENERATION, TOKENIZER
from pose_plugin.checkpoints.saved import ADAPTER, NEED_ORIGINAL, RECORD
from pose_plugin.rope.kinds import ALIASES
from pose_plugin.rope.read import FULL, far_rope, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import Finding, Severity

CONFIG = "config.json"
# A model that is only a name is looked up here; these are all files that the checks read.
FILES = (CONFIG, ADAPTER, TOKENIZER, GENERATION, RECORD)
REMOVED = object()
# Ratios of lengths that differ less than this are the same.
SAME = 0.01
Changes = Mapping[str, Mapping[tuple[str, ...], Any]]


@dataclass(frozen=True)
class Problem:
    """A finding in a folder, and how a repaired copy differs.

    Attributes:
        cause: a short name, the same for the same cause, e.g. "maximum not raised".
        finding: key, value, what happens, fix and severity.
        changes: by file, the new value of each key path; `REMOVED` removes a key. Empty if no change is certain to be
            right.
    """

    cause: str
    finding: Finding
    changes: Changes = field(default_factory=dict)


def problem(
    cause: str,
    key: str,
    value: Any,
    happens: str,
    fix: str = "",
    severity: Severity = "warning",
    changes: Changes | None = None,
) -> Problem:
    """Return a problem from the values of its finding."""
    return Problem(cause, Finding(key, value, happens, fix, severity), changes or {})


@dataclass(frozen=True)
class Folder:
    """A model or an adapter on disk.

    Attributes:
        path: its folder.
        files: the values of each JSON file that is there and holds an object.
        damaged: what is wrong with each of the other files.
        base: the folder of the model before training, if it is on this machine: an adapter names its base.
    """

    path: Path
    files: dict[str, dict[str, Any]]
    damaged: dict[str, str]
    base: Folder | None = None

    @property
    def is_adapter(self) -> bool:
        return ADAPTER in self.files or ADAPTER in self.damaged

    @cached_property
    def nested(self) -> tuple[str, ...]:
        """The key path of the decoder's config inside config.json: () or ("text_config",)."""
        config = self.files.get(CONFIG, {})
        return () if text_config(config) is config else ("text_config",)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The decoder's config; {} without a config.json."""
        return dict(text_config(self.files.get(CONFIG, {})))

    @cached_property
    def new_form(self) -> dict[str, Any] | None:
        """rope_parameters of the layers that see far, the form of transformers 5; None if the config has none."""
        return far_rope(self.text.get("rope_parameters")) or None

    @cached_property
    def old_form(self) -> dict[str, Any] | None:
        """rope_scaling of the layers that see far, the form of transformers 4; None if the config has none."""
        return far_rope(self.text.get("rope_scaling")) or None

    @cached_property
    def rope(self) -> dict[str, Any]:
        """The rope as transformers 5 reads it: rope_scaling replaces rope_parameters, or updates one of several."""
        found = dict(self.old_form or self.new_form or {})
        if self.new_form and FULL in self.text["rope_parameters"]:
            found = {**self.new_form, **found}
        found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
        if found.get("rope_theta") is None:
            found["rope_theta"] = self.text.get("rope_theta")
        original = self.text.get("original_max_position_embeddings")
        # In a damaged file it may be of any type.
        kind = str(found["rope_type"])
        if original is not None and ALIASES.get(kind, kind) in NEED_ORIGINAL:
            found["original_max_position_embeddings"] = original
        return found

    @property
    def kind(self) -> str:
        kind = str(self.rope["rope_type"])
        return ALIASES.get(kind, kind)

    @cached_property
    def maximum(self) -> int | None:
        """max_position_embeddings, tokens, if it is a whole number in any spelling."""
        return whole(self.text.get("max_position_embeddings"))

    @cached_property
    def factor(self) -> float | None:
        return number(self.rope.get("factor"))

    @cached_property
    def original(self) -> int | None:
        """The window before stretching that the config states, tokens."""
        return whole(self.rope.get("original_max_position_embeddings"))

    @property
    def before(self) -> int | None:
        """The window before the extension, tokens, by any file."""
        recorded = self.files.get(RECORD, {}).get("model")
        noted = self.text.get("pose_plugin")
        found = [each.get("original_length") for each in (recorded, noted) if isinstance(each, dict)]
        return self.original or next((whole(each) for each in found if whole(each)), None)

    @property
    def stretched(self) -> bool:
        """Whether one factor stretches this rope."""
        return self.kind in ("linear", "yarn") and (self.factor or 0) > 1

    @property
    def reached(self) -> int | None:
        """factor × original, tokens, if both are known and the kind's window is that product."""
        if self.kind != "yarn" or not self.factor or not self.original:
            return None
        return round(self.factor * self.original)

    @property
    def rotary_dim(self) -> int | None:
        """The rotated dimensions of a head, if the config states what is needed."""
        if latent := whole(self.text.get("qk_rope_head_dim")):
            return latent  # DeepSeek's and MiniCPM3's attention rotates this part only
        heads, hidden = whole(self.text.get("num_attention_heads")), whole(self.text.get("hidden_size"))
        width = whole(self.text.get("head_dim")) or (hidden // heads if heads and hidden else None)
        share = number(self.rope.get("partial_rotary_factor") or self.text.get("partial_rotary_factor")) or 1.0
        return int(width * share) // 2 * 2 if width else None

    def place(self, *keys: str) -> tuple[str, ...]:
        """Return the path of a key of the decoder's config inside config.json."""
        return (*self.nested, *keys)

    def forms(self) -> list[str]:
        """Return the names of the rope dicts that the config has."""
        both = {"rope_parameters": self.new_form, "rope_scaling": self.old_form}
        return [name for name, value in both.items() if value is not None]


def read_folder(folder: str | Path, base: str | Path | None = None) -> Folder:
    """Read a folder, or the cached files of a model on the Hugging Face hub.

    Args:
        folder: a path, or a hub name whose files are in the local cache. Nothing is downloaded.
        base: the model before training; default for an adapter: what its adapter_config.json names.

    Raises:
        PoSEError: no such folder, and no such model in the cache.
    """
    path = _located(folder)
    if path is None:
        if Path(folder).is_file():
            raise PoSEError(f"{folder} is a file; name its folder, {Path(folder).parent}")
        raise PoSEError(
            f"{folder} is neither a folder nor a model in the local Hugging Face cache; give a folder, or download the "
            f"model's small files first: hf download {folder} --include '*.json'"
        )
    files, damaged = _read(path)
    above = None
    named = base or files.get(ADAPTER, {}).get("base_model_name_or_path")
    if named:
        place = _located(str(named), path)
        if base and place is None:
            raise PoSEError(f"--base {base} is neither a folder nor a model in the local Hugging Face cache")
        # Its base is not read: two adapters may name each other.
        above = Folder(place, *_read(place)) if place and place != path else None
    return Folder(path, files, damaged, above)


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the values of each file, and what is wrong with each of the damaged ones."""
    files: dict[str, dict[str, Any]] = {}
    damaged: dict[str, str] = {}
    for name in FILES:
        try:
            values = json.loads((path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            damaged[name] = str(error)
            continue
        if isinstance(values, dict):
            files[name] = values
        else:
            damaged[name] = f"holds a {type(values).__name__} instead of an object"
    return files, damaged


def _located(name: str | Path, near: Path | None = None) -> Path | None:
    """Return the folder of a path or of a cached hub name.

    Args:
        name: the path or the hub name.
        near: a relative path may start at this folder or above it, as a base does that was named where training ran.
    """
    for start in (Path(), *((near.resolve(), *near.resolve().parents) if near else ())):
        if (start / name).is_dir():
            return start / name
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(name), CONFIG) or try_to_load_from_cache(str(name), ADAPTER)
    except (ImportError, ValueError):  # not installed, or not a possible name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def number(value: Any) -> float | None:
    """Return a value as a finite number, also if it is written as a string; None if it is not one."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Return a value as a whole number above 0, also if it is written as 4096.0 or "4096"; None if it is not one."""
    found = number(value)
    return int(found) if found is not None and found >= 1 and found == int(found) else None
