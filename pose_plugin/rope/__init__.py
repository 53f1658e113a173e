"""Rotary frequencies: the kinds of scaling, planning, writing and verifying them.

Names are imported on first use, so that the closed forms need neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pose_plugin.rope.apply import (
        apply_plan,
        extend_context,
        legacy_copies,
        merge_overrides,
        rope_overrides,
    )
    from pose_plugin.rope.findings import base_findings
    from pose_plugin.rope.kinds import inverse_frequencies, ntk_base
    from pose_plugin.rope.plan import RopePlan, plan_rope
    from pose_plugin.rope.theory import retrieval_base
    from pose_plugin.rope.verify import RopeReport, restore_rope, verify_rope

_HOME = {
    "RopePlan": "plan",
    "RopeReport": "verify",
    "apply_plan": "apply",
    "base_findings": "findings",
    "extend_context": "apply",
    "inverse_frequencies": "kinds",
    "legacy_copies": "apply",
    "merge_overrides": "apply",
    "ntk_base": "kinds",
    "plan_rope": "plan",
    "restore_rope": "verify",
    "retrieval_base": "theory",
    "rope_overrides": "apply",
    "verify_rope": "verify",
}

__all__ = [
    "RopePlan",
    "RopeReport",
    "apply_plan",
    "base_findings",
    "extend_context",
    "inverse_frequencies",
    "legacy_copies",
    "merge_overrides",
    "ntk_base",
    "plan_rope",
    "restore_rope",
    "retrieval_base",
    "rope_overrides",
    "verify_rope",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
