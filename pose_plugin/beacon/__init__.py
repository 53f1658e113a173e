"""Activation Beacon: a frozen model reads texts many times its window by condensing past keys and values.

    model = peft.get_peft_model(base, BeaconConfig(interval=1024))      # train it like any PEFT adapter
    context = model.condense(document_ids)                              # read once
    answer = model.generate(question_ids, context=context)                # ask often
    with condensing(model, ratio=8): …

Importing this package registers the method with PEFT; import it before loading an adapter.
Source: Zhang et al., arXiv 2401.03462.
"""

from __future__ import annotations

try:
    import peft as _peft  # noqa: F401
except ImportError as error:  # pragma: no cover - every environment of the tests has PEFT
    raise ImportError('pose_plugin.beacon needs PEFT 0.20 or later: pip install "peft>=0.20"') from error

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.layer import BeaconEmbedding, BeaconLayer, BeaconLinear
from pose_plugin.beacon.leaving import save_cartridge
from pose_plugin.beacon.model import BeaconModel, condensing
from pose_plugin.beacon.register import find_tuner, register
from pose_plugin.beacon.training import (
    IntervalSampler,
    beacon_gradient_norm,
    check_beacon_gradients,
    group_by_intervals,
    interval_count,
    set_ratio_step,
)

__all__ = [
    "BeaconCache",
    "BeaconConfig",
    "BeaconEmbedding",
    "BeaconLayer",
    "BeaconLinear",
    "BeaconModel",
    "IntervalSampler",
    "beacon_gradient_norm",
    "check_beacon_gradients",
    "condensing",
    "find_tuner",
    "group_by_intervals",
    "interval_count",
    "save_cartridge",
    "set_ratio_step",
]

register(BeaconConfig, BeaconModel)
