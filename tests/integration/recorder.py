"""A second Axolotl plugin, for runs in processes of their own: it writes down what the model received.

One file a rank, `$POSE_TEST_RECORD.<rank>`, one JSON line a training batch.
"""

from __future__ import annotations

import json
import os
from typing import Any

from axolotl.integrations.base import BasePlugin

from tests.integration.axolotl_runs import in_this_process


class FSDPOnCPU(BasePlugin):
    """What FSDP2 needs if accelerate takes the CPU for a GPU (see `distributed.on_cpu`); the plugin refuses it."""

    def register(self, cfg: Any) -> None:
        import torch

        # 0.21 asks every run of several ranks about its GPUs, and torch 2.14 raises where there are none.
        torch.cuda.can_device_access_peer = lambda *devices: True

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        # The first hook behind the place where Axolotl decides on devices: it numbers them by rank.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            cfg.device_map = {"": "cpu"}


class NoNetwork(BasePlugin):
    """A network that answers nothing: what Axolotl's telemetry sends is never acknowledged."""

    def register(self, cfg: Any) -> None:
        import time

        from posthog.consumer import Consumer

        Consumer.request = lambda self, batch: time.sleep(1e6)


class Recorder(BasePlugin):
    def register(self, cfg: Any) -> None:
        in_this_process()

    def post_model_load(self, cfg: Any, model: Any) -> None:
        model.register_forward_pre_hook(_write, with_kwargs=True)


def _write(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    import torch

    path = os.environ.get("POSE_TEST_RECORD")
    if path is None or not torch.is_grad_enabled():
        return
    mask = kwargs["attention_mask"].bool()
    documents = [
        (tokens[used].tolist(), positions[used].tolist())
        for tokens, positions, used in zip(kwargs["input_ids"], kwargs["position_ids"], mask, strict=True)
    ]
    with open(f"{path}.{os.environ.get('RANK', '0')}", "a") as file:
        file.write(json.dumps(documents) + "\n")
