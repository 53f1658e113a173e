"""What else is done to a model with beacons: other adapters, a resized vocabulary."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.layer import BeaconLayer, Router, rows_of
from pose_plugin.utils.errors import PoSEError

ALONE = (
    "Beacon projections stand beside the base's own and are saved without any other adapter. Merge that one first: "
    "model = other.merge_and_unload(), then get_peft_model(model, BeaconConfig(…))"
)


class Configs(dict[str, Any]):
    """A tuner's configurations by adapter name. PEFT hands it to a tuner that is put on top, which would overwrite."""

    def __setitem__(self, name: str, config: Any) -> None:
        if not isinstance(config, BeaconConfig):
            raise PoSEError(
                f"adapter: {name!r} has a {type(config).__name__}, but the model has Beacon adapters {sorted(self)}. "
                + ALONE
            )
        super().__setitem__(name, config)

    def update(self, *others: Any, **named: Any) -> None:
        for name, config in dict(*others, **named).items():
            self[name] = config


def check_alone(model: nn.Module) -> None:
    """
    Raises:
        PoSEError: the model has adapters already.
    """
    layers = [type(module) for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(issubclass(layer, BeaconLayer) for layer in layers):
        raise PoSEError(
            "model: it has Beacon layers already. Add another Beacon adapter with model.add_adapter(name, config) on "
            "the PEFT model that has them, take the base back with its unload(), or load the base again"
        )
    if layers or isinstance(model, PeftModel):
        found = layers[0].__module__.split(".")[-2] if layers else type(model).__name__
        raise PoSEError(f"model: it has an adapter of another kind ({found}). {ALONE}")


def resize(router: Router, *args: Any, **kwargs: Any) -> nn.Module:
    """The model's own resize_token_embeddings, which knows no wrapped embedding.

    Args:
        router: of the model's Beacon layers.
        args, kwargs: as there.

    Returns:
        The input embedding, as there.

    Raises:
        PoSEError: the tuner is gone.
    """
    tuner = router.driver()
    model, wrapped = tuner.model, tuner.embedding
    model.set_input_embeddings(wrapped.base_layer)
    try:
        type(model).resize_token_embeddings(model, *args, **kwargs)
    finally:
        wrapped.base_layer = model.get_input_embeddings()
        wrapped.sentinel = rows_of(wrapped.base_layer)
        model.set_input_embeddings(wrapped)
    return wrapped
