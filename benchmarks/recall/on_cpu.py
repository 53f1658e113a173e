"""An Axolotl plugin that allows `bf16: true` on a CPU, which transformers refuses unless `use_cpu` is set."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class OnCPU(BasePlugin):
    """Sets `use_cpu`, for which Axolotl has no key."""

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return arguments that Axolotl hands to the trainer."""
        return {"use_cpu": True}
