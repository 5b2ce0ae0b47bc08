"""Sizes of channels, or of batches of one text, are no sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.map_datasets import Samples
from torchbudget import BudgetedIterableDataset, PaddedCost, sizes_of
from torchbudget.errors import OtherSizesWarning, SizesError

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
        (
            [{"pair": (torch.ones(n), torch.ones(9))} for n in LENGTHS],
            "pair",
            r"2, .* axis 1, .* len\(sample\['pair'\]\[0\]\);",
        ),
    ],
)
def test_another_axis_is_ragged(samples: list[Any], key: Any, message: str) -> None:
    """Whether samples are read, or their lengths are known without, or come in a stream."""
    for dataset in (samples, Samples(samples)):
        with pytest.raises(SizesError, match=f"the size of every sample is {message}"):
            sizes_of(dataset, key, progress=False)
    cost = PaddedCost(unit_bytes=[1] * len(key) if isinstance(key, tuple) else 1)
    for workers in (0, 1):
        stream = BudgetedIterableDataset([samples * 4], cost, 1000, size=key)
        with pytest.raises(SizesError, match=f"(?s)the size of every sample is {message}"):
            list(DataLoader(stream, batch_size=None, num_workers=workers))


@pytest.mark.parametrize(
    ("samples", "key", "message"),
    [
        ([np.ones((n, 9 - n, 3)) for n in LENGTHS], None, r"samples, .* axis 1 .* 4 to 6 long"),
        ([{"x": torch.ones(1 + n % 2, n)} for n in (4, 5, 6)], "x", r"'x', .* axis 1 .* 4 to 6 "),
        (
            [(torch.ones(n), torch.ones(n, n + 9 * (n % 2))) for n in LENGTHS],
            (0, 1),
            "field 1, .* axis 1",
        ),
        ([torch.ones(n, m) for n, m in ((2, 3), (2, 4), (3, 5))], None, "axis 1 .* 3 to 5"),
    ],
)
def test_a_later_axis_is_ragged_by_itself(samples: list[Any], key: Any, message: str) -> None:
    """Of arrays that are short in the first axis one may be long in it."""
    for dataset in (samples, Samples(samples)):
        with pytest.warns(OtherSizesWarning, match=f"the first axis of .*{message}") as caught:
            sizes_of(dataset, key, progress=False)
        assert caught[0].filename == __file__
    assert len(sizes_of(samples, id)) == len(samples)  # a function: it is meant


@pytest.mark.parametrize(
    ("samples", "key"),
    [
        ([{"x": torch.ones(1, n)} for n in range(2, 12)], lambda sample: len(sample["x"])),
        ([(1, {"x": [[7] * n]}) for n in range(2, 12)], lambda sample: (len(sample[1]["x"]), 5)),
        ([torch.ones(2, n) for n in range(2, 12)], len),
    ],
)
def test_a_function_that_takes_the_length_of_channels(samples: list[Any], key: Any) -> None:
    message = r"first axis of sample.*, whose axis 1 is 2 to 11 long: if"
    for dataset in (samples, Samples(samples)):
        with pytest.warns(OtherSizesWarning, match=rf"{message} key takes") as caught:
            sizes_of(dataset, key, progress=False)
        assert caught[0].filename == __file__
    axes = np.shape(key(samples[0]))
    stream = BudgetedIterableDataset(
        [samples], PaddedCost(unit_bytes=[1, 1] if axes else 1), 1000, size=key, collate_fn=list
    )
    with pytest.warns(OtherSizesWarning, match=rf"{message} size takes"):
        list(stream)


@pytest.mark.parametrize("form", [torch.ones, np.ones])
def test_an_int_is_no_axis(form: Any) -> None:
    """Of arrays it picks a row."""
    samples = [form((n, 80)) for n in LENGTHS]
    for key in (0, 1, (0, 1)):
        with pytest.raises(SizesError, match=r"row \d of each sample, .* axis 0, which is 3 to 5 "):
            sizes_of(samples, key, progress=False)
    recordings = [form((2, n)) for n in LENGTHS]
    assert sizes_of(recordings, 0, progress=False).tolist() == list(LENGTHS)


@pytest.mark.parametrize(
    ("samples", "key"),
    [
        ([torch.ones(2, 4)] * 3, None),
        ([torch.ones(2, n) for n in (5,)], None),
        ([torch.ones(n, n + 1) for n in LENGTHS], None),
        ([torch.ones(n, n // 2) for n in (2, 3, 4, 4)], None),
        ([torch.ones(0, n) for n in (2, 3)], None),
        ([torch.ones(n, 5 - n) for n in (0, 1)], None),
        (
            [{"x": torch.ones(3, n, 8), "s": "ab"} for n in range(2, 12)],
            lambda sample: sample["x"].shape[2],
        ),
        ([(torch.ones(8, 4), [1] * n) for n in range(2, 12)], lambda sample: len(sample[0])),
        ([{"x": [[1] * m] * n} for n, m in ((2, 3), (3, 2))], "x"),
        ([torch.ones(1, n) for n in LENGTHS], lambda sample: sample.shape[0]),
        ([[1, 2], [3, 4], [5, 6]], None),
        (["ab", "cd"], None),
        ([[], []], None),
        ([torch.ones(2), torch.ones(2, 3), torch.ones(2, 4)], None),
        ([{"words": ["a" * n, "b"]} for n in LENGTHS], "words"),
        ([(torch.ones(4), n) for n in LENGTHS], 0),
    ],
)
def test_others_are_taken(samples: list[Any], key: Any) -> None:
    """Samples of one shape, of which the first axis is ragged too, or whose key says the axis."""
    for dataset in (samples, Samples(samples)):
        assert len(sizes_of(dataset, key, progress=False)) == len(samples)


def test_few_samples_of_a_stream_may_be_alike_by_chance() -> None:
    """As in a small window; with more of them in memory they are compared."""
    samples = [torch.ones(4, n) for n in (3, 5, 4)] + [torch.ones(n, n) for n in range(1, 40)]
    stream = BudgetedIterableDataset([samples], PaddedCost(unit_bytes=1), 1000, window=3)
    assert sum(len(batch.data) for batch in stream) == len(samples)
