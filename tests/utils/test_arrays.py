from __future__ import annotations

import numpy as np
import pytest
import torch

from pose_plugin.utils.arrays import counting, int_array


@pytest.mark.parametrize(
    "values",
    [
        [0, -100, 2**31, 2**63 - 1, -(2**63)],
        [],
        (1, 2),
        [True, np.int32(3), torch.tensor(4)],
        [1.7, 2.0],
        [[1, 2], [3, 4]],
        np.arange(3, dtype=np.uint8),
        torch.tensor([5, 6], dtype=torch.int32),
    ],
    ids=str,
)
def test_numbers_are_those_of_numpy(values):
    found = int_array(values)
    expected = np.asarray(values, dtype=np.int64)
    assert found.dtype == np.int64 and found.shape == expected.shape and found.tolist() == expected.tolist()


def test_numbers_beyond_64_bits_raise():
    with pytest.raises(OverflowError):
        int_array([2**63])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1024, 1025])
def test_counting(size):
    assert counting(size).tolist() == list(range(size))
    with pytest.raises(ValueError, match="read-only"):
        counting(size)[...] = 7
