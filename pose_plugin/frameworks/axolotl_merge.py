"""Axolotl's merge-lora: complete the merged folder, which Axolotl leaves with the base's window.

Its memory-efficient method copies the base's config.json, and no method sets the limits of tokenizer and generation.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints import complete_folder, read_record
from pose_plugin.checkpoints.merge import complete_merged, is_tied, trains_embeddings_apart
from pose_plugin.checkpoints.saved import Saved
from pose_plugin.config import PoSESettings
from pose_plugin.export.card import write_card
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log, show_log


def complete_merge(cfg: Any, settings: PoSESettings) -> None:
    """Complete `output_dir/merged` after a merge whose YAML has the `pose:` block."""
    folder = Path(cfg.output_dir) / "merged"
    adapter = Path(cfg.get("lora_model_dir") or cfg.output_dir)
    if read_record(adapter):
        complete_merged(folder, adapter)
        write_card(folder)
        log.info("%s has the extension; compare it with the trained model: pose-plugin check %s", folder, folder)
        return
    from axolotl.loaders.utils import load_model_config

    config = load_model_config(cfg)
    if cfg.get("merge_method") != "legacy":
        # The legacy method saves the live model's config, with the override and the merged dtype.
        config.save_pretrained(folder)
    complete_folder(folder, config, settings)


def require_right_merge(cfg: Any) -> None:
    """Check that a merge gives the model that was trained.

    The default method of Axolotl 0.19 and 0.21 copies the base's config, so it ties input and output embeddings again.

    Raises:
        PoSEError: the adapter trained one of them apart from the other.
    """
    adapter = Saved(Path(cfg.get("lora_model_dir") or cfg.output_dir)).adapter
    trained = trains_embeddings_apart(adapter.model_dump()) if adapter is not None else []
    if cfg.get("merge_method") != "legacy" and trained and is_tied(cfg.base_model):
        raise PoSEError(
            f"merge_method={cfg.get('merge_method') or 'memory_efficient'} would tie {', '.join(trained)} to the other "
            "embedding again, but the adapter trained only one of the two: the merged model would differ from the "
            "trained one. Set merge_method: legacy"
        )


def complete_next_merge(settings: PoSESettings) -> None:
    """Complete the one merge of this process: a substitute for the hook `post_lora_merge` in Axolotl before 0.21."""
    from axolotl.cli import merge_lora as module

    merge = module.do_merge_lora

    @functools.wraps(merge)
    def merge_and_complete(*, cfg: Any) -> None:
        module.do_merge_lora = merge
        merge(cfg=cfg)
        complete_merge(cfg, settings)

    module.do_merge_lora = merge_and_complete


def complete_forgotten(folder: str | Path, adapter: str | Path) -> None:
    """Complete a merge whose YAML lacks the `pose:` block, with which the adapter was trained; log a warning."""
    show_log()
    try:
        complete_merged(folder, adapter)
        write_card(folder)
    except (PoSEError, OSError) as error:
        log.warning(
            "%s has the base's window: the config of this merge has no `pose:` block, but the adapter in %s was "
            "trained with one, and completing the merged model failed (%s). Repeat that: pose-plugin check %s --like "
            "%s --repair",
            folder, adapter, error, folder, adapter,
        )  # fmt: skip
        return
    log.warning(
        "the config of this merge has no `pose:` block, but %s was trained with one: the merged model was given the "
        "adapter's RoPE settings, window and record. Compare the two models: pose-plugin check %s",
        adapter,
        folder,
    )
