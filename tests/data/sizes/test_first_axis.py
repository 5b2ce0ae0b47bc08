"""Sizes of channels, or of batches of one text, are no sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.map_datasets import Samples
from torchbudget import sizes_of
from torchbudget.errors import SizesError

LENGTHS = (3, 5, 4)


@pytest.mark.parametrize(
    ("samples", "key", "message"),
    [
        (
            [{"ids": torch.ones(1, n)} for n in LENGTHS],
            "ids",
            r"1, .* field 'ids', .* axis 1, .* 3 to 5",
        ),
        (
            [np.ones((2, n)) for n in LENGTHS],
            None,
            r"2, .* the sample, .*sample: sample\.shape\[1\]",
        ),
        ([torch.ones(3, 8, n) for n in LENGTHS], None, "3, .* axis 2, which is 3 to 5 long"),
        ([{"ids": [[7] * n]} for n in LENGTHS], "ids", "1, .* axis 1, .*return_tensors"),
        ([(torch.ones(n), torch.ones(1, n)) for n in LENGTHS], (0, 1), "1, .* field 1, .* axis 1"),
    ],
)
def test_another_axis_is_ragged(samples: list[Any], key: Any, message: str) -> None:
    """Whether samples are read, or their lengths are known without."""
    for dataset in (samples, Samples(samples)):
        with pytest.raises(SizesError, match=f"the size of every sample is {message}"):
            sizes_of(dataset, key, progress=False)


@pytest.mark.parametrize(
    ("samples", "key"),
    [
        ([torch.ones(2, 4)] * 3, None),
        ([torch.ones(2, n) for n in (5,)], None),
        ([torch.ones(n, n + 1) for n in LENGTHS], None),
        ([torch.ones(1, n) for n in LENGTHS], lambda sample: sample.shape[0]),
        ([[1, 2], [3, 4], [5, 6]], None),
        (["ab", "cd"], None),
        ([[], []], None),
        ([torch.ones(2), torch.ones(2, 3), torch.ones(2, 4)], None),
    ],
)
def test_others_are_taken(samples: list[Any], key: Any) -> None:
    """Samples of one shape, of which the first axis is ragged too, or whose key says the axis."""
    for dataset in (samples, Samples(samples)):
        assert len(sizes_of(dataset, key, progress=False)) == len(samples)
