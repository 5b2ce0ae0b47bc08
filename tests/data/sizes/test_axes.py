"""Sizes of channels, or of batches of one text, are no sizes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.map_datasets import Samples, of
from torchbudget import BudgetedIterableDataset, PaddedCost
from torchbudget.errors import OtherSizesWarning, SizesError

LENGTHS = (3, 5, 4)


def stream_of(samples: list[Any], key: Any, axes: int | None = None) -> Any:
    cost = PaddedCost(unit_bytes=[1] * axes if axes else 1)
    return BudgetedIterableDataset([samples], cost, 1000, size=key, collate_fn=list)


@pytest.mark.parametrize(
    ("samples", "key", "message"),
    [
        ([{"ids": torch.ones(1, n)} for n in LENGTHS], "ids", "axis 1 is 3 to 5 .*return_tensors"),
        ([np.ones((2, n)) for n in LENGTHS], None, r"axis 1 .* sample: sample\.shape\[1\]"),
        ([(torch.ones(n), torch.ones(1, n)) for n in LENGTHS], (0, 1), r"sample\[1\], .* axis 1"),
        ([{"x": (torch.ones(n), torch.ones(9))} for n in LENGTHS], "x", r"\['x'\], 2 .* axis 1"),
        ([torch.ones(n, 80) for n in LENGTHS], 0, "an array has no fields, and 0 is a row of it"),
    ],
)
def test_sizes_of_an_axis_that_is_the_same_raise(samples: Any, key: Any, message: str) -> None:
    """Whether samples are read, or their lengths are known without, or come in a stream."""
    for dataset in (samples, Samples(samples)):
        with pytest.raises(SizesError, match=message):
            of(dataset, key)
    stream = stream_of(samples * 4, key, len(key) if isinstance(key, tuple) else None)
    for workers in (0, 1):
        with pytest.raises(SizesError, match=f"(?s){message}"):
            list(DataLoader(stream, batch_size=None, num_workers=workers))


@pytest.mark.parametrize(
    ("samples", "key", "message"),
    [
        ([np.ones((n, 9 - n, 3)) for n in LENGTHS], None, "axis 1 is 4 to 6 long"),
        ([{"x": torch.ones(1 + n % 2, n)} for n in (4, 5, 6)], "x", r"\['x'\].* axis 1 is 4 to 6"),
        ([torch.ones(n, m) for n, m in ((2, 3), (2, 4), (3, 5))], None, "axis 1 is 3 to 5"),
    ],
)
def test_an_axis_that_is_ragged_by_itself_warns(samples: Any, key: Any, message: str) -> None:
    for dataset in (samples, Samples(samples)):
        with pytest.warns(OtherSizesWarning, match=message) as caught:
            of(dataset, key)
        assert len(caught) == 1


@pytest.mark.parametrize(
    ("samples", "key"),
    [
        ([torch.ones(2, 4)] * 3, None),
        ([torch.ones(n, n // 2) for n in (2, 3, 4, 4)], None),
        ([torch.ones(0, n) for n in (2, 3)], None),
        ([torch.ones(n, 5 - n) for n in (0, 1)], None),
        ([torch.ones(n, 9 - n) for n in LENGTHS], len),
        ([torch.ones(2, n) for n in LENGTHS], len),
        ([{"x": torch.ones(3, n, 8)} for n in range(2, 12)], lambda sample: sample["x"].shape[2]),
        ([{"x": [[1] * m] * n} for n, m in ((2, 3), (3, 2))], "x"),
        ([[1, 2], [3, 4], [5, 6]], None),
        ([{"words": ["a" * n, "b"]} for n in LENGTHS], "words"),
        ([(torch.ones(4), n) for n in LENGTHS], 0),
    ],
)
def test_others_are_taken(samples: list[Any], key: Any) -> None:
    """Samples of one shape, or that grow along all axes together, or whose key says the axis."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dataset in (samples, Samples(samples)):
            assert len(of(dataset, key)) == len(samples)
