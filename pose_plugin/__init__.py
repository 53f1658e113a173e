"""Extend a language model's context window inside Axolotl and TRL.

    # Axolotl YAML                      # TRL
    sequence_len: 2048                  config = extend_context(config, target_length=32768, rope="yarn")
    plugins: [pose_plugin]              SFTTrainer(…, data_collator=PoSECollator(tokenizer, target_length=32768))
    pose:
      target_length: 32768

Names are imported when they are first used: `import pose_plugin` alone imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pose_plugin._version import __version__ as __version__

if TYPE_CHECKING:
    from pose_plugin.beacon import BeaconCache, BeaconConfig, condensing
    from pose_plugin.checkpoints.load import load_extended
    from pose_plugin.config import PoSESettings, RopeSettings
    from pose_plugin.frameworks.axolotl import PosePlugin
    from pose_plugin.frameworks.trl import PoSECollator
    from pose_plugin.positions import coverage
    from pose_plugin.rope import extend_context, verify_rope
    from pose_plugin.selftest import self_test
    from pose_plugin.utils.errors import PoSEError, RopeMismatchError, SelfTestError


_HOME = {
    "BeaconCache": "beacon",
    "BeaconConfig": "beacon",
    "PoSECollator": "frameworks.trl",
    "PoSEError": "utils.errors",
    "PoSESettings": "config",
    "PosePlugin": "frameworks.axolotl",
    "RopeMismatchError": "utils.errors",
    "RopeSettings": "config",
    "SelfTestError": "utils.errors",
    "condensing": "beacon",
    "coverage": "positions",
    "extend_context": "rope",
    "load_extended": "checkpoints.load",
    "self_test": "selftest",
    "verify_rope": "rope",
}

__all__ = [
    "BeaconCache",
    "BeaconConfig",
    "PoSECollator",
    "PoSEError",
    "PoSESettings",
    "PosePlugin",
    "RopeMismatchError",
    "RopeSettings",
    "SelfTestError",
    "condensing",
    "coverage",
    "extend_context",
    "load_extended",
    "self_test",
    "verify_rope",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ImportError as error:
        if name != "PosePlugin":
            raise
        # Axolotl 0.19 logs an ImportError of a plugin and trains on without it.
        raise RuntimeError(f"pose_plugin could not be loaded, so training would run without it: {error}") from error


def __dir__() -> list[str]:
    return sorted(__all__)
