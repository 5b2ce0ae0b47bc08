"""Map-style data sets as sources of a stream, and iterables that have an index, too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PaddedCost,
    sizes_of,
)
from torchbudget.errors import OptionError, SampleError, SizesError

TOKENS = PaddedCost(unit_bytes=1)
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Broken:
    """A map-style data set with one index that cannot be read."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise OSError("unreadable")
        return torch.full((1 + index % 5,), index)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_map_style_data_set_is_a_source(workers: int) -> None:
    """Shuffled as a whole; one that cannot be read is skipped and counted, or named."""
    stream = BudgetedIterableDataset(Broken(), TOKENS, 20, window=8, on_error="skip")
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    order = [one for batch in loader for one in batch.data[:, 0].tolist()]
    assert sorted(order) == [n for n in range(50) if n != 13]
    assert stream.skipped_samples.failed == 1
    first = order[:8]
    assert max(first) - min(first) > 8  # not the first window of the data set's own order
    with pytest.raises(SampleError, match="OSError: unreadable"):
        list(BudgetedIterableDataset(Broken(), TOKENS, 20, window=8))


def test_a_map_style_data_set_seeks() -> None:
    stream = BudgetedIterableDataset(Broken(), TOKENS, 20, window=8, on_error="skip")
    next(iter(stream))
    assert stream.state_dict()["goes_on_by"] == "seeking"


class Manifest:
    """An iterable whose index reads from the start, as lazy manifests have."""

    is_lazy = True

    def __init__(self) -> None:
        self.reads, self.random = 0, random.Random(0)

    def order(self) -> list[int]:
        return list(range(240))

    def __len__(self) -> int:
        return 240

    def __iter__(self) -> Iterator[Any]:
        for number in self.order():
            self.reads += 1
            yield torch.full((number % 7 + 1,), number)

    def __getitem__(self, index: int) -> Any:
        return next(one for place, one in enumerate(self) if place == index)


class Anew(Manifest):
    """Its index shuffles anew."""

    is_lazy = False

    def order(self) -> list[int]:
        return self.random.sample(range(240), 240)


class OpenFile:
    """A sample that cannot be pickled, so that two are not seen to be equal."""

    def __init__(self, content: Any) -> None:
        self.content, self.read = content, lambda: content

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, index: int) -> Any:
        return self.content[index]


class OfFiles(Anew):
    def __iter__(self) -> Iterator[Any]:
        return map(OpenFile, super().__iter__())


class Unsized(Manifest):
    is_lazy = False

    def __len__(self) -> int:
        raise TypeError("unknown")


class Keyed(Manifest):
    """Its index is a name."""

    is_lazy = False

    def __getitem__(self, index: Any) -> Any:
        return {"first": 0}[index]


class Reversed(Manifest):
    """Its index does not say where its iteration begins."""

    is_lazy = False

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), 239 - index)


class Eager(Manifest):
    """Its index and its iteration agree, in samples that are made anew."""

    is_lazy = False

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {"x": torch.full((index % 7 + 1,), index, dtype=torch.bfloat16), "name": str(index)}

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(240))


class UsedUp(Eager):
    """Its one iterator is used up once."""

    def __init__(self) -> None:
        super().__init__()
        self.left = iter([self[number] for number in range(240)])

    def __iter__(self) -> Iterator[Any]:
        return self.left


class Augmented(Dataset[Any]):
    """Torch's map-style data set with random crops, and an iteration for convenience."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        return torch.full((random.randint(1, 7),), index)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(240))


ITERATED, INDEXED = [Manifest, Anew, OfFiles, Unsized, Keyed, Reversed], [Eager, UsedUp, Augmented]


def length(sample: Any) -> int:
    return len(sample["x"] if isinstance(sample, dict) else sample)


def number(sample: Any) -> int:
    return int(sample["name"]) if isinstance(sample, dict) else int(sample[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [*ITERATED, *INDEXED])
def test_an_iterable_that_has_an_index_gives_each_sample_once(kind: Any, workers: int) -> None:
    """It is read by the index that agrees with itself and the iteration, else it is iterated."""
    if kind is OfFiles and workers:
        pytest.skip("such samples cannot come from workers")
    source, state = kind(), random.getstate()
    options: Any = {"size": length, "window": 32, "collate_fn": list}
    stream = BudgetedIterableDataset(source, TOKENS, 40, **options)
    assert random.getstate() == state
    before = 0 if workers else getattr(source, "reads", 0)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    order = [number(sample) for batch in loader for sample in batch]
    assert Counter(order) == dict.fromkeys(range(240), 1)
    if isinstance(source, Manifest) and not workers:
        assert source.reads - before == 240
    if kind in INDEXED:  # shuffled as a whole
        assert max(order[:32]) > 100


@pytest.mark.parametrize("kind", ITERATED)
def test_without_a_trusted_index_it_is_no_map_style_data_set(kind: Any) -> None:
    """`sizes_of` and the sampler refuse it with the same words, before a batch."""
    sampler = MemoryBudgetBatchSampler([7] * 240, TOKENS, 40)
    with pytest.raises(SizesError, match="may lose or repeat samples") as one:
        sizes_of(kind(), length)
    for loop in (iter, sampler.tracked):
        with pytest.raises(OptionError) as other:
            loop(DataLoader(kind(), batch_sampler=sampler))
        assert str(other.value) == str(one.value)


@pytest.mark.parametrize("kind", INDEXED)
def test_with_one_it_is(kind: Any) -> None:
    sampler = MemoryBudgetBatchSampler(sizes_of(kind(), length), TOKENS, 40)
    loader = DataLoader(kind(), batch_sampler=sampler, collate_fn=list)
    order = [number(sample) for batch in loader for sample in batch]
    assert Counter(order) == dict.fromkeys(range(240), 1)


class Rolling:
    """A map-style data set whose samples depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), 100 * self.epoch + index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_data_set_is_told_the_epoch_where_it_is_read(workers: int) -> None:
    """In workers that persist, too, and in a chosen epoch."""
    stream = BudgetedIterableDataset(Rolling(), TOKENS, 20, window=8)
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(stream, batch_size=None, **options)
    for epoch in (0, 1, 5):
        stream.set_epoch(epoch)
        found = [one for batch in loader for one in batch.data[:, 0].tolist()]
        assert sorted(found) == [100 * epoch + index for index in range(30)]
