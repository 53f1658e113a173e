"""Axolotl's `evaluate`: it measures what base_model and lora_model_dir name, and not what the run trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pose_plugin.checkpoints.saved import is_adapter, read_record
from pose_plugin.frameworks.axolotl_beacon import is_beacon, untrained
from pose_plugin.utils.log import log


class WatchUntrained(TrainerCallback):
    """Refuses to measure a new Beacon adapter that nothing has trained; warns of others, and of the base.

    Axolotl does not tell plugins which command runs. But only in `evaluate` a model predicts before it trains.
    """

    def __init__(self, cfg: Any) -> None:
        self._cfg, self._watches = cfg, True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watches = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._watches:
            return
        self._watches = False
        if self._cfg.get("adapter") and not self._cfg.get("lora_model_dir"):
            if is_beacon(self._cfg):
                raise untrained(self._cfg)
            if state.is_world_process_zero:
                # This may be meant: a new adapter of LoRA changes nothing.
                log.warning(
                    "lora_model_dir=None: a new, untrained adapter (%s) is measured, so the scores are the base's. For "
                    "the trained one, add --lora-model-dir %s",
                    self._cfg.get("adapter"),
                    self._cfg.get("output_dir") or "FOLDER",
                )
        elif state.is_world_process_zero and self._trained_elsewhere():
            log.warning(
                "base_model=%s is measured, and not the model that this config trained. For the trained one, add "
                "--base-model %s",
                self._cfg.get("base_model"),
                self._cfg.get("output_dir"),
            )

    def _trained_elsewhere(self) -> bool:
        """Whether output_dir holds a trained model, and base_model names another one."""
        output, base = self._cfg.get("output_dir"), self._cfg.get("base_model")
        if not output or not base or is_adapter(output) or Path(base).resolve() == Path(output).resolve():
            return False
        return bool(read_record(output))
