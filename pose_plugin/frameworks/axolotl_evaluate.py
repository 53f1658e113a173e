"""Axolotl's `evaluate`: it measures the adapter in lora_model_dir, and without this key a new one, silently."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from pose_plugin.frameworks.axolotl_beacon import is_beacon, untrained
from pose_plugin.utils.log import log


class WatchNewAdapter(TrainerCallback):
    """Refuses to measure a new Beacon adapter that nothing has trained; warns of one of another kind.

    Axolotl does not tell plugins which command runs. But only in `evaluate` a model predicts before it trains.
    """

    def __init__(self, cfg: Any) -> None:
        self._cfg, self._new = cfg, bool(cfg.get("adapter")) and not cfg.get("lora_model_dir")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._new = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._new and is_beacon(self._cfg):
            raise untrained(self._cfg)
        if self._new and state.is_world_process_zero:
            # This may be meant: a new adapter of LoRA changes nothing.
            log.warning(
                "lora_model_dir=None: a new, untrained adapter (%s) is measured, so the scores are the base's. For the "
                "trained one, add --lora-model-dir %s",
                self._cfg.get("adapter"),
                self._cfg.get("output_dir") or "FOLDER",
            )
        self._new = False
