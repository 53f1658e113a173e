"""Makes PEFT know the method: the one place that reaches into PEFT's list of methods.

`PeftType` is a closed enum, and `register_peft_method` wants the member to exist, so the member is added first.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from peft.utils import PeftType, register_peft_method

from pose_plugin.utils.errors import PoSEError

# Where the package is not imported, PEFT fails with KeyError: 'POSE_PLUGIN_BEACON'. So the name says what to import.
NAME = "POSE_PLUGIN_BEACON"
PREFIX = "beacon_"


def peft_type() -> Any:
    """The member of PeftType, added when it is first asked for.

    Raises:
        PoSEError: PEFT's enum no longer works like this.
    """
    if NAME not in PeftType.__members__:
        member = str.__new__(PeftType, NAME)
        member._name_ = NAME
        member._value_ = NAME
        # Python 3.12 finds members as attributes of the class, earlier versions in the map; the enum forbids setting
        # an attribute that names a member, so the attribute comes first.
        type.__setattr__(PeftType, NAME, member)
        PeftType._member_map_[NAME] = member
        PeftType._member_names_.append(NAME)
        PeftType._value2member_map_[NAME] = member
    found = PeftType.__members__[NAME]
    if not (PeftType(NAME) is found is getattr(PeftType, NAME, None) and found == NAME and NAME in list(PeftType)):
        raise PoSEError(
            f"peft: adding {NAME} to PeftType failed, so this PEFT cannot hold the Beacon adapter. Tested are PEFT "
            "0.20 and 0.21; please report the version."
        )
    return found


def register(config_cls: type, model_cls: type) -> None:
    """Tells PEFT the configuration and tuner classes. A second call changes nothing."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=PREFIX)


def find_tuner(model: Any) -> Any:
    """The BeaconModel of a PEFT model (wrapped by accelerate, DDP or a trainer, too).

    Raises:
        PoSEError: there is none.
    """
    seen = model
    for _ in range(8):
        if isinstance(seen, BaseTuner) and seen.prefix == PREFIX:
            return seen
        following = next((getattr(seen, key) for key in ("module", "_orig_mod", "base_model") if _has(seen, key)), None)
        if following is None or following is seen:
            break
        seen = following
    raise PoSEError(
        f"model: {type(model).__name__} has no Beacon adapter; make one with get_peft_model(model, BeaconConfig(…))"
    )


def _has(module: Any, key: str) -> bool:
    return key in getattr(module, "_modules", {}) or key in getattr(module, "__dict__", {})
