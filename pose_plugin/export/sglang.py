"""SGLang reads config.json through transformers; its rules are in engines.py. Not run."""

from __future__ import annotations

from functools import partial

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import common
from pose_plugin.export.common import Export
from pose_plugin.export.engines import rules_of, taken
from pose_plugin.utils.errors import PoSEError


def export(saved: Saved) -> Export:
    """Return the line that starts a server.

    Raises:
        PoSEError: another length in config.json is below the maximum.
    """
    notes = []
    for rule in rules_of("sglang"):
        found = taken(rule, saved)
        if found.most < saved.maximum:
            raise PoSEError(
                f"SGLang would allow {found.most} tokens of max_position_embeddings={saved.maximum}: another length in "
                "config.json is lower. `pose-plugin check` names it"
            )
        if found.default != saved.maximum:
            notes.append(f"without --context-length SGLang would take {found.default}, not {saved.maximum}")
    changes, more = common.own_scale(saved, "SGLang", "SGLang", attention_factor=saved.extra_attention)
    notes += more
    start, limit = "python -m sglang.launch_server --model-path", f"--context-length {saved.maximum}"
    passed = partial(common.overrides, saved, "--json-model-override-args", changes)
    return common.serve(
        saved,
        full=lambda folder: f"{start} {folder} {limit}{passed()}",
        lora=lambda base: (
            f"{start} {base}{common.revision(saved)} --enable-lora --lora-paths {common.lora_named(saved)}"
            f"{common.tokenizer(saved, '--tokenizer-path')} {limit}{passed(True)}"
        ),
        notes=notes,
        # sgl-project/sglang#40835
        refused="the adapter has use_rslora=true, whose scale SGLang leaves out"
        if saved.adapter and saved.adapter.use_rslora
        else None,
    )
