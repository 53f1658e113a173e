"""An Axolotl plugin that removes the mask which keeps PoSE chunks together: the silent fault, for the table."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class CutApart(BasePlugin):
    """To list after pose_plugin with `self_test: false`, because the self-test stops exactly this fault."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        collator = trainer.data_collator
        finish = collator._finish

        def without_mask(*args: Any, **kwargs: Any) -> dict[str, Any]:
            batch = finish(*args, **kwargs)
            batch.pop("attention_mask")
            return batch

        collator._finish = without_mask
