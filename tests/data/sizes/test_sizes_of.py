from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.support.map_datasets import Samples
from torchbudget.data.sizes.key import SizeDataset
from torchbudget.data.sizes.sizes_of import sizes_of
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
    sizes = sizes_of(Samples(values), int, progress=False)
    assert sizes.dtype == (np.int32 if largest < 2**31 else np.int64)
    assert sizes.tolist() == values


@pytest.mark.parametrize("samples", [[], Samples([])])
def test_an_empty_dataset_has_empty_sizes(samples):
    assert sizes_of(samples).shape == (0,)
    assert sizes_of(samples, ("a", "b")).shape == (0, 2)
    assert sizes_of(samples, len).dtype == np.int32


def test_the_quick_way_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(SizeDataset, "__getitem__", None)  # reading a sample would raise
    assert sizes_of([[1], "ab"]).tolist() == [1, 2]
    with pytest.raises(TypeError):
        sizes_of(Samples([[1], "ab"]), progress=False)


@pytest.mark.parametrize("dataset", [Streams(), iter([]), 5, None])
def test_what_is_no_map_style_dataset_is_refused(dataset):
    with pytest.raises(SizesError, match="map-style"):
        sizes_of(dataset)


@pytest.mark.parametrize("context", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_find_what_one_process_finds(context):
    """In order, with a picklable key, over several chunks."""
    samples = [{"text": "x" * (i % 50)} for i in range(1000)]
    sizes = sizes_of(
        Samples(samples),
        length_of_text,
        num_workers=2,
        progress=False,
        multiprocessing_context=context,
    )
    assert sizes.tolist() == [i % 50 for i in range(1000)]


def test_a_bad_sample_in_a_worker_is_named():
    samples = [[1]] * 200
    samples[150] = RuntimeError("torn file")
    with pytest.raises(SizesError, match=r"sample 150 cannot be read: RuntimeError: torn file"):
        sizes_of(
            Samples(samples), num_workers=1, progress=False, multiprocessing_context="forkserver"
        )


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sizes_of(Samples([[1]] * 10), progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_tqdm_there_is_no_bar(monkeypatch):
    """The bar is optional; sizes come without it."""
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert sizes_of(Samples([[1], []]), progress=True).tolist() == [1, 0]


def test_the_bar_counts_samples(monkeypatch):
    tqdm_auto = pytest.importorskip("tqdm.auto", reason="the progress extra")
    seen = []

    class Bar(tqdm_auto.tqdm):
        def update(self, n=1):
            seen.append((n, self.total))

    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    sizes_of(Samples([[1]] * 100))
    assert seen == [(64, 100), (36, 100)]
    sizes_of(Samples([[1]] * 100), progress=False)
    assert len(seen) == 2
