"""`sizes_of` reads each sample once, by position, in this process or in workers."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset

from tests.support.map_datasets import WHY, Samples, of
from tests.support.map_datasets import example as rows_of
from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.data.sizes.sizes_of import SizeDataset, sizes_of
from torchbudget.errors import SizesError


class Streams(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def length_of_text(sample):
    return len(sample["text"])


@pytest.mark.parametrize("largest", [0, 2**31 - 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 100])
def test_the_array_is_as_narrow_as_the_sizes_allow(largest, position):
    """int32 up to 2**31 - 1, int64 from there, wherever the largest stands; nothing wraps."""
    values = [1] * 150
    values[position] = largest
    sizes = of(Samples(values), int)
    assert sizes.dtype == (np.int32 if largest < 2**31 else np.int64)
    assert sizes.tolist() == values


@pytest.mark.parametrize("samples", [[], Samples([])])
def test_an_empty_dataset_has_empty_sizes(samples):
    assert sizes_of(samples).shape == (0,)
    assert sizes_of(samples, ("a", "b")).shape == (0, 2)
    assert sizes_of(samples, len).dtype == np.int32


@pytest.mark.parametrize("dataset", [Streams(), iter([]), 5, None])
def test_what_is_no_map_style_dataset_is_refused(dataset):
    with pytest.raises(SizesError, match="map-style"):
        sizes_of(dataset)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_find_what_one_process_finds():
    """In order, over several chunks; a sample that cannot be read is named."""
    samples = [{"text": "x" * (i % 50)} for i in range(1000)]
    assert of(Samples(samples), length_of_text, num_workers=2).tolist() == [
        i % 50 for i in range(1000)
    ]
    samples[150] = RuntimeError("torn file")
    with pytest.raises(SizesError, match=r"sample 150 cannot be read: RuntimeError: torn file"):
        of(Samples(samples), "text", num_workers=2)


def test_what_travels_and_what_stays():
    """Workers send sizes alone; one sample is kept at a time; generators stay as they are."""
    measured = SizeDataset(Samples([torch.zeros(10_000)] * 64), None)
    assert len(pickle.dumps(measured[range(64)])) < 1024
    alive = []

    class Counted(Samples):
        def __getitem__(self, index):
            assert sum(ref() is not None for ref in alive) <= 1
            value = torch.zeros(index)
            alive.append(weakref.ref(value))
            return value

    before = torch.get_rng_state()
    assert of(Counted(range(100))).tolist() == list(range(100))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("position", [1, 64, 70])
@pytest.mark.parametrize("other", [(1, 2, 3), 4, (1,)])
def test_every_sample_has_the_same_axes(position, other):
    """Another number of axes is named by index, within a worker's chunk and between chunks."""
    samples = [(1, 2)] * 100
    samples[position] = other
    with pytest.raises(SizesError, match=rf"same ragged axes, .*sample {position}\b"):
        of(Samples(samples), lambda sample: sample)


def test_subclasses_and_wrappers_are_read_as_they_say():
    """An overridden `__getitem__` is used; a dict and a frame of columns are refused."""

    class Doubled(list):
        def __getitem__(self, index):
            return super().__getitem__(index) * 2

    assert of(Doubled([[1], [2, 3]])).tolist() == [2, 4]
    datasets = pytest.importorskip("datasets", reason=WHY)
    assert of(Subset(rows_of(9), [8, 2]), "raw").tolist() == [8, 2]
    pandas = pytest.importorskip("pandas", reason=WHY)
    frame = pandas.DataFrame({"raw": ["abc", "é🙂"]})
    for columns in (datasets.DatasetDict(train=rows_of(2)), frame):
        with pytest.raises(SizesError, match=r"cannot be read: KeyError|same sample at index 0"):
            of(columns, "raw")
    assert of(frame["raw"].tolist()).tolist() == [3, 2]


counts = st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1))
any_sizes = st.one_of(
    counts,
    counts.map(np.int64),
    counts.map(torch.tensor),
    st.integers(-2, 2),
    st.integers(2**63, 2**65),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.booleans().map(torch.tensor),
    st.floats(0, 9),
    st.tuples(counts, counts | st.booleans()),
    st.none(),
)


def given_size(sample: Any) -> Any:
    return sample


@given(st.one_of(st.lists(any_sizes, min_size=1, max_size=6), st.lists(counts, min_size=1)))
@example([3, True])
@example([torch.tensor(True), 7])
@example([2.0, 3])
@example([(2, 3), (2, True)])
def test_sizes_of_many_samples_are_those_of_each(samples: list[Any]) -> None:
    """A sample has the same size alone and among others; or it is an error."""
    try:
        each = np.array([size_of(one, given_size, 0) for one in samples], np.int64)
    except (SizesError, ValueError):  # of other axes than those before it
        with pytest.raises(SizesError):
            sizes_of_all(samples, given_size, 0)
    else:
        found = sizes_of_all(samples, given_size, 0)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, each)
