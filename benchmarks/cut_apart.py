"""An Axolotl plugin that takes away the mask which keeps PoSE chunks together: the silent fault, for the table."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class CutApart(BasePlugin):
    """Listed behind pose_plugin, with `self_test: false`, since the self-test stops exactly this."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        collator = trainer.data_collator
        finish = collator._finish

        def without_mask(*args: Any, **kwargs: Any) -> dict[str, Any]:
            batch = finish(*args, **kwargs)
            batch.pop("attention_mask")
            return batch

        collator._finish = without_mask
