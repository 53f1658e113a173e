"""vLLM: which window it takes depends on its version, see engines.py. Not run."""

from __future__ import annotations

from functools import partial

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export import common
from pose_plugin.export.common import Export
from pose_plugin.export.engines import rules_of, taken
from pose_plugin.utils.errors import PoSEError

# vLLM accepts these ranks only.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def export(saved: Saved) -> Export:
    """Return the line that starts a server.

    Raises:
        PoSEError: the rope's factor or the tokenizer's limit does not reach the maximum.
    """
    notes = []
    # A plain base would be read by its own tokenizer, but --tokenizer gives the adapter's.
    for rule in rules_of("vllm"):
        found = taken(rule, saved)
        if found.most < saved.maximum:
            where = (
                "rope's factor × original length"
                if saved.kind in rule.from_original
                else ("tokenizer's model_max_length, or another length in config.json,")
            )
            raise PoSEError(
                f"vLLM {rule.versions} would allow {found.most} tokens of max_position_embeddings={saved.maximum}: the "
                f"{where} is lower. `pose-plugin check` names what differs"
            )
        if found.default != saved.maximum:
            notes.append(
                f"without --max-model-len vLLM {rule.versions} would take {found.default}, not {saved.maximum}"
            )
    _require_table(saved)
    changes, more = common.own_scale(
        saved, "vLLM", "vLLM before 0.30", attention_factor=saved.extra_attention, mscale=saved.mscale_attention
    )
    notes += more
    rank = saved.adapter.r if saved.adapter and saved.adapter.r else 16
    refused = f"the adapter has r={rank}, and vLLM takes ranks up to {_RANKS[-1]}" if rank > _RANKS[-1] else None
    if saved.base is not None and not (refused or common.needs_merging(saved)):
        if saved.has_tokenizer:
            notes.append(
                "the tokenizer of the base may have a lower limit, which would also count, so --tokenizer is given"
            )
        notes.append("vLLM before 0.24 on transformers 4 reads rope_scaling and rope_theta instead of rope_parameters")
        if saved.nested:
            notes.append("vLLM before 0.14 does not take values for text_config; merge the adapter for it")
    limit, passed = f"--max-model-len {saved.maximum}", partial(common.overrides, saved, "--hf-overrides", changes)
    return common.serve(
        saved,
        full=lambda folder: f"vllm serve {folder} {limit}{passed()}",
        lora=lambda base: (
            f"vllm serve {base}{common.revision(saved)} --enable-lora --lora-modules {_lora_module(saved)} "
            f"--max-lora-rank {next(size for size in _RANKS if size >= rank)}"
            f"{common.tokenizer(saved, '--tokenizer')} {limit}{passed(True)}"
        ),
        notes=list(dict.fromkeys(notes)),
        refused=refused,
    )


def _require_table(saved: Saved) -> None:
    """Raise PoSEError if vLLM's table of cos and sin does not reach the maximum."""
    reach = saved.factor * int(saved.rope.get("original_max_position_embeddings") or 0)
    if saved.kind == "yarn" and reach < 0.999 * saved.maximum:
        raise PoSEError(
            f"vLLM's table of cos and sin has {reach:.0f} rows (the rope's factor × original length), below "
            f"max_position_embeddings={saved.maximum}. A rope.factor given by hand must be target / original"
        )


def _lora_module(saved: Saved) -> str:
    """Return the adapter's name and folder as one shell word; vLLM takes NAME=FOLDER without more = or commas."""
    if not set("=,") & set(str(saved.shown)):
        return common.lora_named(saved)
    return common.as_json({"name": common.served_name(saved), "path": str(saved.shown)})
