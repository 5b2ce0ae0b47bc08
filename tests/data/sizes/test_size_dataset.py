from __future__ import annotations

import pickle
import weakref

import pytest
import torch
from torch.utils.data import Subset

from tests.support.map_datasets import WHY, Samples, example, of
from torchbudget.data.sizes.key import SizeDataset
from torchbudget.data.sizes.sizes_of import sizes_of
from torchbudget.errors import SizesError


@pytest.mark.parametrize("position", [1, 64, 70])
@pytest.mark.parametrize("other", [(1, 2, 3), 4, (1,)])
def test_every_sample_has_the_same_axes(position, other):
    """Another number of axes is named by index, within a worker's chunk and between chunks."""
    samples = [(1, 2)] * 100
    samples[position] = other
    with pytest.raises(SizesError, match=rf"same ragged axes: .*sample {position}\b"):
        sizes_of(Samples(samples), lambda sample: sample, progress=False)


def test_what_travels_is_sizes():
    """A worker's answer is smaller than a kilobyte, however large its samples are."""
    measured = SizeDataset(Samples([torch.zeros(10_000)] * 64), None)
    assert len(pickle.dumps(measured[range(64)])) < 1024


def test_only_one_sample_is_kept_at_a_time():
    """A dataset without `__getitems__` is read sample by sample."""
    alive = []

    class Counted(Samples):
        def __getitem__(self, index):
            kept = sum(ref() is not None for ref in alive)
            assert kept <= 1
            value = torch.zeros(index)
            alive.append(weakref.ref(value))
            return value

    assert sizes_of(Counted(range(100)), progress=False).tolist() == list(range(100))


@pytest.mark.parametrize("other", [lambda some: some[1:], lambda some: some * 2])
def test_other_numbers_of_samples_than_asked_for_are_named(other):
    """A loader would take them as they come; which size is whose is unknown."""

    class Many(Samples):
        def __getitems__(self, indices):
            return other([self[index] for index in indices])

    with pytest.raises(SizesError, match=r"__getitems__ of Many returned \d+ samples for the 3 in"):
        sizes_of(Many([[1], [2], [3]]), progress=False)


def test_a_subclass_of_a_list_is_read_as_it_says():
    """An overridden `__getitem__` is used."""

    class Doubled(list):
        def __getitem__(self, index):
            return super().__getitem__(index) * 2

    assert sizes_of(Doubled([[1], [2, 3]]), progress=False).tolist() == [2, 4]


def test_a_subclass_of_a_frame_is_read_by_position_as_it_says():
    pandas = pytest.importorskip("pandas", reason=WHY)

    class Frame(pandas.DataFrame):
        pass

    frame = Frame({"text": ["abc", "é🙂"]}, index=[7, 3])
    assert of(frame, "text").tolist() == [3, 2]


def test_a_subset_and_a_dict_of_datasets():
    """A `Subset` is measured through its samples; a dict of splits says what is wrong."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    assert of(Subset(example(9), [8, 2]), "raw").tolist() == [8, 2]
    with pytest.raises(SizesError, match="sample 0 cannot be read: KeyError"):
        of(datasets.DatasetDict(train=example(2)), "raw")
