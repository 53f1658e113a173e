"""Text Generation Inference reads the keys of transformers 4, which are in the same config.json. Not run."""

from __future__ import annotations

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export.common import Export, as_full_model
from pose_plugin.export.engines import ignored_keys, require_kind


def export(saved: Saved) -> Export:
    """Return the line that starts a server.

    Raises:
        PoSEError: TGI does not compute this rope.
    """
    require_kind("tgi", saved)
    lines, folder = as_full_model(saved)
    notes = ["do not add --rope-scaling: it would be applied in addition to config.json"]
    notes += ignored_keys("tgi", saved)
    if not saved.older:
        notes.append(
            "TGI runs on transformers 4, which cannot load a tokenizer that transformers 5 saved: use the folder "
            "written by `pose-plugin export … --engine tgi --form 4 --output FOLDER`"
        )
    return Export(
        [
            *lines,
            f"text-generation-launcher --model-id {folder} --max-input-tokens {saved.maximum - 1} "
            f"--max-total-tokens {saved.maximum}",
        ],
        notes,
    )
