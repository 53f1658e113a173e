"""What engines have in common."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError


@dataclass
class Export:
    """What to type, what to know, what to write.

    Attributes:
        lines: commands or code, in order.
        notes: sentences.
        files: contents by file name, for the output folder.
    """

    lines: list[str]
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"# {note}" for note in self.notes)])


def merge_lines(saved: Saved, output: str) -> list[str]:
    """From an adapter to a full model, for engines that want one."""
    code = (
        f"from pose_plugin import load_extended; load_extended({str(saved.path)!r}).merge_and_unload()"
        f".save_pretrained({output!r})"
    )
    return [
        f'python -c "{code}"' if not set(code) & set('"$`\\!') else f"python -c {shlex.quote(code)}",
        f"pose-plugin check {shlex.quote(output)} --like {quoted(saved)} --repair",
    ]


def require_older_form(saved: Saved, engine: str) -> None:
    """Checks that a full model's config.json holds the keys that this engine's readers look at.

    Raises:
        PoSEError: it does not, as in a checkpoint, whose config must have the newer form alone to be resumed.
    """
    wanted = legacy_copies(saved.rope, saved.model_type).get("rope_scaling")
    if saved.base is None and wanted is not None and saved.text.get("rope_scaling") is None:
        raise PoSEError(
            f"{saved.path}/config.json has no rope_scaling, the form of the rope that some readers of {engine} need: "
            "they would serve the base's frequencies. Checkpoints are saved so, to be resumed. Export the run's final "
            "folder, or a copy of this one: add --form 4 --output FOLDER"
        )


def quoted(saved: Saved) -> str:
    """The folder as one shell word."""
    return shlex.quote(str(saved.path))


def needs_merging(saved: Saved) -> str | None:
    """Why an engine cannot put this adapter on its base, or None."""
    if saved.adapter.get("modules_to_save"):
        return f"the adapter has modules_to_save={saved.adapter['modules_to_save']}, which engines do not load"
    if saved.composite:
        return "the base's rope sits in its text_config, where an override on the command line does not reach"
    return None


def merged_path(saved: Saved) -> str:
    return str(saved.path / "merged")


def as_json(values: dict[str, Any]) -> str:
    """One shell word."""
    return shlex.quote(json.dumps(values))


def lora_named(saved: Saved) -> str:
    """NAME=FOLDER, as one shell word."""
    return shlex.quote(f"{saved.path.resolve().name}={saved.path}")
