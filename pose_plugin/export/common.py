"""What the engines have in common."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.rope import legacy_copies
from pose_plugin.utils.errors import PoSEError

# Starts of LoRA that PEFT subtracts from the base's weights, also when it loads the adapter. Engines do not.
_OFF_THE_BASE = ("pissa", "olora", "corda")
# Of LoRA: vLLM refuses all but the patterns, which older versions do not read; SGLang 0.5 leaves all of them out.
_PARTLY_READ = ("bias", "lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices")
# Virtual tokens and others that change no weights of the base.
_NOT_MERGEABLE = ("PROMPT", "P_TUNING", "PREFIX", "MULTITASK_PROMPT", "ADAPTION_PROMPT", "CPT", "CARTRIDGE", "XLORA")


@dataclass
class Export:
    """What to run, what to know, what to write.

    Attributes:
        lines: commands or code, in order.
        notes: sentences, printed as comments.
        files: contents by file name, for the output folder.
    """

    lines: list[str]
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"# {note}" for note in self.notes)])


def serve(
    saved: Saved,
    full: Callable[[str], str],
    lora: Callable[[str], str],
    notes: list[str],
    refused: str | None = None,
) -> Export:
    """Return the lines of an engine that runs full models and adapters.

    Args:
        saved: a model or an adapter.
        full: gives the line for the folder of a full model, one shell word.
        lora: gives the line for the adapter on this base, one shell word.
        notes: of the engine, about either.
        refused: why this engine cannot load the adapter, if it is one.
    """
    why = needs_merging(saved) or refused
    if saved.base is not None and why is None:
        return Export(
            [lora(shlex.quote(saved.base_name))],
            [*notes, "the base's config lacks the extension, so it is passed on the command line"],
        )
    lines, folder = as_full_model(saved)
    return Export([*lines, full(folder)], [*notes, f"{why}, so it is merged"] if lines else notes)


def as_full_model(saved: Saved) -> tuple[list[str], str]:
    """Return the lines that merge an adapter, none for a full model, and the full model's folder as one shell word.

    Raises:
        PoSEError: PEFT cannot merge an adapter of this kind.
    """
    if saved.adapter is None:
        return [], quoted(saved)
    kind = str(saved.adapter.peft_type)
    if kind.startswith(_NOT_MERGEABLE):
        raise PoSEError(
            f"{saved.path} has peft_type={kind}, which no engine loads and PEFT cannot merge into the base. Load it "
            "with transformers and PEFT: --engine transformers"
        )
    merged = str(saved.shown / "merged")
    code = (
        f"from pose_plugin import load_extended; load_extended({str(saved.shown)!r}).merge_and_unload()"
        f".save_pretrained({merged!r})"
    )
    lines = [
        f'python -c "{code}"' if not set(code) & set('"$`\\!') else f"python -c {shlex.quote(code)}",
        f"pose-plugin check {shlex.quote(merged)} --like {quoted(saved)} --repair",
    ]
    return lines, shlex.quote(merged)


def needs_merging(saved: Saved) -> str | None:
    """Return why an engine cannot load this adapter on its base, or None."""
    adapter = saved.adapter
    if adapter is None:
        return None
    if adapter.peft_type not in (None, "LORA"):
        return f"the adapter has peft_type={adapter.peft_type}, and engines load LoRA only"
    if adapter.modules_to_save:
        return f"the adapter has modules_to_save={adapter.modules_to_save}, which engines do not load"
    if adapter.use_dora:
        return "the adapter has use_dora=true, and engines load no DoRA adapters"
    start = adapter.init_lora_weights
    if isinstance(start, str) and start.startswith(_OFF_THE_BASE):
        return f"the adapter has init_lora_weights={start}, which takes a part out of the base's weights"
    for name in _PARTLY_READ:
        if (value := getattr(adapter, name)) and value != "none":
            return f"the adapter has {name}={value}, which engines refuse or leave out"
    return None


def revision(saved: Saved) -> str:
    """Return the option that names the revision of an adapter's base on the hub, "" without one."""
    found = saved.base.revision if saved.base is not None else None
    return f" --revision {shlex.quote(found)}" if found else ""


def require_older_form(saved: Saved, engine: str) -> None:
    """Check that a full model's config.json has the keys that this engine reads.

    Raises:
        PoSEError: it has not, as in a checkpoint, from which transformers 5 could otherwise not resume.
    """
    if saved.older:
        return
    wanted = legacy_copies(saved.rope, saved.model_type).get("rope_scaling")
    if saved.base is None and wanted is not None and saved.text.get("rope_scaling") is None:
        raise PoSEError(
            f"{saved.path}/config.json has no rope_scaling, which some readers of {engine} need: they would use the "
            "base's frequencies. Checkpoints leave it out, so that training can resume. Export the run's final folder, "
            "or a copy of this one: add --form 4 --output FOLDER"
        )


def own_scale(saved: Saved, engine: str, versions: str, **unread: float) -> tuple[dict[str, Any], list[str]]:
    """Return the rope override that gives vLLM or SGLang the folder's scale of cos and sin, if needed, and a note.

    Args:
        saved: a model or an adapter.
        engine: its name, for the note. It computes longrope's scale itself.
        versions: of it that do not read the keys of `unread`.
        unread: for each key of a yarn rope that they do not read, what it multiplies yarn's own scale by.
    """
    scale = saved.rope.get("attention_factor")
    if saved.kind == "longrope" and scale and not saved.rope.get("long_mscale"):
        note = f"{engine} computes longrope's scale of cos and sin by its own formula unless long_mscale is given"
        return {"rope_parameters": saved.rope_with(long_mscale=scale, short_mscale=scale)}, [note]
    for key, factor in unread.items():
        if abs(factor - 1) > 1e-6:
            note = f"{versions} does not read {key}; attn_factor={factor:g} multiplies its own scale, 0.1·ln s + 1"
            return {"rope_parameters": saved.rope_with(attn_factor=factor)}, [note]
    return {}, []


def overrides(saved: Saved, option: str, changes: dict[str, Any], adapter: bool = False) -> str:
    """Return the option that changes values of a config, under text_config if the engine finds the rope there.

    Args:
        saved: a model or an adapter.
        option: its name.
        changes: of the rope.
        adapter: add what a plain base's config lacks.
    """
    base = {"rope_parameters": saved.rope_parameters, "max_position_embeddings": saved.maximum} if adapter else {}
    values = base | changes
    return f" {option} {as_json({'text_config': values} if saved.nested else values)}" if values else ""


def tokenizer(saved: Saved, option: str) -> str:
    """Return the option that names an adapter's folder as its tokenizer, "" if none is there."""
    return f" {option} {quoted(saved)}" if saved.has_tokenizer else ""


def missing_tokenizer(saved: Saved) -> list[str]:
    """Return a sentence if the folder holds no tokenizer."""
    if saved.has_tokenizer:
        return []
    base = "the base's is used, whose limit may be lower" if saved.base else "an engine cannot load the folder"
    return [f"{saved.shown} has no tokenizer, so {base}: save the tokenizer of the training there"]


def quoted(saved: Saved) -> str:
    """Return the folder as one shell word."""
    return shlex.quote(str(saved.shown))


def as_json(values: dict[str, Any]) -> str:
    """Return values as one shell word."""
    return shlex.quote(json.dumps(values))


def served_name(saved: Saved) -> str:
    """Return the folder's name in characters that every engine takes in the name of a model."""
    return re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", saved.name).strip("-.")[:80] or "model"


def lora_named(saved: Saved) -> str:
    """Return NAME=FOLDER as one shell word."""
    return shlex.quote(f"{served_name(saved)}={saved.shown}")
