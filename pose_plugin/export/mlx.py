"""MLX (mlx-lm) reads the keys of transformers 4 in the same config.json; see engines.py. Not run."""

from __future__ import annotations

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export.common import Export, as_full_model
from pose_plugin.export.engines import ignored_keys, require_kind


def export(saved: Saved) -> Export:
    """Return the line that starts a server; an adapter of PEFT is merged first.

    Raises:
        PoSEError: MLX does not compute this rope.
    """
    require_kind("mlx", saved)
    notes = ["MLX has no limit on the window; it computes what config.json says at any length"]
    notes += ignored_keys("mlx", saved)
    lines, folder = as_full_model(saved)
    return Export([*lines, f"mlx_lm.server --model {folder}"], notes)
