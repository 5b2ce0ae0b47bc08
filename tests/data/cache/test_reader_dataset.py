"""Samples read by identity."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
    SampleCache,
    sizes_of,
    transforms,
)
from torchbudget.errors import OptionError, SampleError
from torchbudget.readers import ReaderDataset

TOKENS = PaddedCost(unit_bytes=1)


class Files:
    """Arrays in files of their own, of which each read gives two variants; reads are counted."""

    def __init__(self, folder: Path, n: int) -> None:
        self.folder = folder
        self.reads = torch.zeros(n, dtype=torch.int64).share_memory_()
        for number in range(n):
            np.full(3 + number % 17, number, np.float32).tofile(folder / f"{number}.bin")

    def read(self, number: int) -> list[Any]:
        self.reads[number] += 1
        # Python 3.11's parser, which np.load calls, fails now and then in threads.
        wave = np.fromfile(self.folder / f"{number}.bin", np.float32)
        return [torch.from_numpy(wave), torch.from_numpy(-wave)]

    def target(self, number: int) -> list[int]:
        return [number, -number]


def reader_of(files: Files) -> ReaderDataset:
    return ReaderDataset(
        range(len(files.reads)), files.read, read_target=files.target, variants_per_read=2
    )


def pairs(batches: Any) -> Counter[int]:
    found: Counter[int] = Counter()
    for inputs, targets in batches:
        for row, target in zip(inputs, targets.tolist(), strict=True):
            assert row[0] == target
            found[target] += 1
    return found


def expected(n: int) -> Counter[int]:
    return Counter([one for number in range(n) for one in (number, -number)])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_over_identities(workers: int, tmp_path: Path) -> None:
    """Both variants of each, with their targets, in batches that fit; reads in threads."""
    files = Files(tmp_path, 40)
    reads = ReaderDataset(range(40), files.read, read_target=files.target)
    expanded: Any = {"transforms": [transforms.expand(transforms.unpack_args(zip))], "threads": 2}
    stream = BudgetedIterableDataset(reads, TOKENS, 100, size=0, window=10, **expanded)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    batches = list(loader)
    assert pairs(batches) == expected(40)
    assert files.reads.tolist() == [1] * 40  # with any number of workers
    assert max(inputs.numel() for inputs, _ in batches) <= 100


def test_samples_by_number(tmp_path: Path) -> None:
    """Map-style: neighbours share a read; sizes, sampler, cache and pickling work on it."""
    files = Files(tmp_path, 12)
    reader = reader_of(files)
    assert len(reader) == 24
    assert [reader[i][1] for i in range(24)] == [one for n in range(12) for one in (n, -n)]
    assert files.reads.tolist() == [1] * 12
    assert reader[-1][1] == -11
    with pytest.raises(IndexError, match="24"):
        reader[24]
    sizes = sizes_of(reader, 0)
    cache = SampleCache(pickle.loads(pickle.dumps(reader)), "1MiB")  # noqa: S301  (our own)
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 60)
    loader = DataLoader(cache, batch_sampler=sampler, collate_fn=PadCollate())
    assert pairs(loader) == pairs(loader) == expected(12)
    assert cache.hits == cache.misses == 24


@pytest.mark.parametrize("variants", [1, 2])
def test_each_read_is_its_own(variants: int) -> None:
    """What is done to a sample in place is done to no other, and to no later read of it.

    Not even where variants share memory: crops that overlap, and one target of all of them.
    """
    scans = np.arange(8.0).reshape(2, 4)

    def read(number: int) -> Any:
        scan = torch.from_numpy(scans[number].copy())
        crops = [{"scan": scan[i : i + 3], "more": [scan[i : i + 3].numpy()]} for i in range(2)]
        return crops if variants == 2 else crops[0]

    targets: Any = (lambda n: [[n]] * 2) if variants == 2 else (lambda n: [n])
    reader = ReaderDataset(range(2), read, read_target=targets, variants_per_read=variants)
    for _ in range(2):
        for number in range(len(reader)):
            sample, label = reader[number]
            place, first = divmod(number, variants)
            own = scans[place, first : first + 3].tolist()
            assert (sample["scan"].tolist(), sample["more"][0].tolist()) == (own, own)
            assert label == [place]
            assert sample["scan"].untyped_storage().nbytes() <= 4 * 8
            sample["scan"] += 1
            sample["more"][0] += 1
            label.append(2)


def two(identity: Any) -> Any:
    return [identity, identity]


def test_what_cannot_be() -> None:
    with pytest.raises(OptionError, match="got none"):
        ReaderDataset([], two)
    with pytest.raises(OptionError, match="read_target"):
        ReaderDataset([1], two, read_target=3)  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="expected 3 variants of 1, its read returned 2"):
        ReaderDataset([1], two, variants_per_read=3)[0]
