"""Register the method with PEFT, and find its tuner in a wrapped model.

This is the one place that changes PEFT's own tables. `PeftType` is a closed enum without a way to add a member from
outside, and `register_peft_method` accepts only names of members. So the member is added first, by hand. This can be
deleted once PEFT's `register_peft_method` accepts names that are not in `PeftType`, or `PeftType` becomes open.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from peft.utils import PeftType, register_peft_method

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import shells

# If the package is not imported, PEFT raises KeyError: 'POSE_PLUGIN_BEACON'. So the name says what to import.
NAME = "POSE_PLUGIN_BEACON"
PREFIX = "beacon_"


def peft_type() -> Any:
    """Return the member of PeftType, and add it on the first call.

    Raises:
        PoSEError: PEFT's enum does not accept the member.
    """
    if NAME not in PeftType.__members__:
        # What Enum's metaclass does for each member of a class body, which is over by now.
        member = str.__new__(PeftType, NAME)
        member._name_ = NAME
        member._value_ = NAME
        # Python 3.12 finds members as attributes of the class, earlier versions in the map. The enum forbids setting
        # an attribute that names a member, so the attribute comes first.
        type.__setattr__(PeftType, NAME, member)
        PeftType._member_map_[NAME] = member
        PeftType._member_names_.append(NAME)
        PeftType._value2member_map_[NAME] = member
    found = PeftType.__members__[NAME]
    # Every way in which PEFT looks up a method; a half-added member would fail only when an adapter is loaded.
    if not (PeftType(NAME) is found is getattr(PeftType, NAME, None) and found == NAME and NAME in list(PeftType)):
        raise PoSEError(
            f"peft: {NAME} cannot be added to PeftType, so this PEFT cannot hold a Beacon adapter. Install PEFT 0.20 "
            "or 0.21, which are tested, and report the version that failed"
        )
    return found


def register(config_cls: type, model_cls: type) -> None:
    """Register the configuration and tuner classes with PEFT. A second call changes nothing."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=PREFIX)


def find_tuner(model: Any) -> Any:
    """Return the BeaconModel of a PEFT model, also if accelerate, DDP or torch.compile wrapped it.

    Raises:
        PoSEError: the model has no Beacon adapter.
    """
    for each in shells(model):
        # By prefix, since importing the class here would close a circle.
        if isinstance(each, BaseTuner) and each.prefix == PREFIX:
            return each
    raise PoSEError(
        f"model: {type(model).__name__} has no Beacon adapter; make one with get_peft_model(model, BeaconConfig(…))"
    )
