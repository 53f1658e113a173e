"""What docs/compared.md says about Axolotl's built-in `use_pose`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from tests.forked import CaseError, forked
from tests.integration.axolotl_runs import base_yaml, run

pytestmark = pytest.mark.axolotl

BUILT_IN = {"plugins": None, "pose": None, "use_pose": True, "pose_max_context_len": 512}


@pytest.fixture(scope="module")
def yaml(tmp_path_factory):
    home = tmp_path_factory.mktemp("built_in")

    def values(**changes: Any) -> dict[str, Any]:
        return base_yaml(home, **BUILT_IN, **changes)

    return values


def test_without_packing_it_changes_neither_positions_nor_frequencies(yaml):
    values = yaml()
    batches = forked(run, values).value.of("train")
    assert batches
    for batch in batches:
        plain = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
        assert batch.positions is None or np.array_equal(np.where(batch.mask, batch.positions, plain), plain)
    saved = AutoConfig.from_pretrained(values["output_dir"])
    assert (saved.max_position_embeddings, saved.rope_parameters["rope_type"]) == (64, "default")


def test_with_packing_it_stops_before_the_first_step(yaml):
    with pytest.raises(CaseError, match="ValueError"):
        forked(run, yaml(sample_packing=True, sequence_len=128))
