"""Published models: each base is read as its class reads it.

The models are tiny, with the published head dimensions, frequencies, windows and kinds of layers (tests/published.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from pose_plugin.rope import plan_rope, verify_rope
from pose_plugin.utils.errors import PoSEError
from tests.published import MESSAGES, Published, build, published, shrunken

BASES = published()
# Bases that are still read wrongly.
PENDING = {
    "hunyuan_v1_dense": "its alpha is not read",
    "lmsys/vicuna-7b-v1.5-16k": "its maximum is that before the scaling",
    "qwen3_5": "refused, although its text model takes one position per token",
    "qwen3_5_moe": "refused, although its text model takes one position per token",
    "nemotron_h": "has rope_theta, but no RoPE",
    "granitemoehybrid": "has rope_theta, but no RoPE",
    "llama4": "its far layers have no RoPE",
    "exaone4": "its far layers have no RoPE",
    "ministral3": "keys of its rope dict are dropped",
    "mistral3": "keys of its rope dict are dropped",
    "meta-llama/Llama-3.2-1B": "stretched less than the base is",
    "meta-llama/Llama-3.2-3B": "stretched less than the base is",
    "gemma4": "its slowest pair is stretched less than asked for",
}


def cases() -> list[Any]:
    found = []
    for base in BASES:
        reason = PENDING.get(base.model) or PENDING.get(base.model_type)
        marks = [pytest.mark.xfail(reason=reason)] if reason else []
        found.append(pytest.param(base, id=base.model, marks=marks))
    return found


@pytest.fixture(params=cases())
def base(request) -> Published:
    return request.param


def test_the_corpus_is_large():
    assert len(BASES) >= 110
    assert len({base.model_type for base in BASES}) >= 65
    assert len({base.model for base in BASES}) == len(BASES)


def test_a_base_is_read_as_its_class_reads_it(base):
    """The closed form of what is read equals the frequencies that the class computes from the published fields."""
    if base.refused:
        with pytest.raises(PoSEError, match=MESSAGES[base.refused]):
            plan_rope(base.full, 8 * (base.window or 2048))
        return
    report = verify_rope(build(shrunken(base.full)))
    plan = plan_rope(base.full, base.window, "none")
    assert {check.rope_type for check in report.checks} >= {plan.current["rope_type"]}
    assert plan.original_length == base.original
