"""What a stream reads: checked, and opened for each pass of each process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from torchbudget.data.map_style import MapStyle
from torchbudget.data.stream.adapters import adapter_of
from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.generators import ReadingGenerators
from torchbudget.data.stream.reader import Indices, Reader
from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Stream, shuffled_keys

# What they iterate over are characters, bytes and keys: hardly the samples that are meant.
_NO_SOURCES: Final = (str, bytes, bytearray, Mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the items of a stream come from.

    Items of a map-style data set are indices, in an order that is shuffled as a whole: a sample
    that is skipped is not read.

    Attributes:
        data: as the user passed it.
        adapter: of `data` as one iterable.
        split: which processes get the same items: all of them (`"none"`), the same worker of each
            rank (`"workers"`), or none (`"ranks"`).
        shuffle: read shards in another order in each pass.
        seed: of that order.
    """

    data: Any
    adapter: PlainSource
    split: Split
    shuffle: bool
    seed: int

    @classmethod
    def of(cls, data: Any, split: Split | None, *, shuffle: bool, seed: int) -> Source:
        """Check the data, and how it is split.

        Raises:
            OptionError: it cannot be iterated more than once, or not sample by sample.
        """
        adapter = adapter_of(data)
        if isinstance(data, (list, tuple)):
            _check_shards(data)
        elif not (callable(data) or adapter.is_iterable or is_indexed(data)):
            raise OptionError(
                "expected an iterable, a map-style or an iterable data set, a function "
                "(shard, num_shards) that returns an iterator, or a list of shards, got "
                f"{type(data).__name__}"
            )
        elif isinstance(data, Iterator):
            raise OptionError(
                "an iterator is used up after one epoch, and cannot be shared by workers: pass "
                "what it iterates over, or a function (shard, num_shards) that returns an iterator"
            )
        elif _is_no_source(data):
            raise OptionError(
                f"a {type(data).__name__} iterates over its characters, keys or columns, not over "
                "samples: pass what reads a file, one value of a mapping, such as one split of a "
                "data set, or the rows of a table, such as to_dict('records') of pandas"
            )
        if split not in (None, "none", "workers", "ranks"):
            raise OptionError(f"split must be 'none', 'workers' or 'ranks', got {split!r}")
        if split is None:
            if isinstance(data, (list, tuple)):
                split = "workers"
            elif callable(data) and not adapter.is_iterable and not is_indexed(data):
                split = "ranks"
            else:
                split = adapter.split or "none"
        return cls(data=data, adapter=adapter, split=split, shuffle=shuffle, seed=seed)

    def open(
        self, slot: WorkerSlot, generators: ReadingGenerators, *, epoch: int, number: int
    ) -> Reader:
        """Start a pass over what this process reads."""
        data, (part, parts) = self.data, slot.part(self.split)
        generators.open_source(self.seed, epoch, number, part)
        if is_indexed(data):
            indices = Indices(len(data), (self.seed, epoch, number) if self.shuffle else None)
            return Reader([indices], [0], generators)
        if isinstance(data, (list, tuple)):
            order = np.arange(len(data))
            if self.shuffle:
                keys = shuffled_keys(self.seed, epoch, number, Stream.SHARDS, numbers=order)
                order = order[np.argsort(keys)]
            order = order[part::parts]
            return Reader([data[i] for i in order], order.tolist(), generators)
        if callable(data) and not self.adapter.is_iterable:
            return Reader([partial(data, part, parts)], [part], generators)
        if self.split == "ranks":
            self.adapter.check_ranks(slot)
        iterable = self.adapter.open(slot, epoch=epoch + number)
        worker = None if self.split == "none" else slot.worker
        source = data if self.adapter.seeks else None
        return Reader([iterable], [part], generators, worker=worker, source=source)

    @property
    def has_states(self) -> bool:
        """Whether a position is found without reading what comes before it."""
        several = isinstance(self.data, (list, tuple))
        return is_indexed(self.data) or (not several and self.adapter.seeks)

    def describe(self, name: tuple[int, int], item: Any) -> str:
        """Name an item in an error message.

        Args:
            name: its shard, and its place there.
            item: the item itself.
        """
        if is_indexed(self.data):
            return f"sample {item}"
        shard, place = name
        several = isinstance(self.data, (list, tuple)) or self.split != "none"
        return f"item {place} of shard {shard}" if several else f"item {place}"


def is_indexed(data: Any) -> bool:
    """Whether it is a map-style data set."""
    others = (list, tuple, IterableDataset, *_NO_SOURCES)
    return isinstance(data, MapStyle) and not isinstance(data, others)


def _is_no_source(data: Any) -> bool:
    """Whether it iterates over other things than samples, as tables of any library do."""
    is_table = hasattr(data, "columns") and hasattr(data, "shape")
    return isinstance(data, _NO_SOURCES) or (is_table and not isinstance(data, Dataset))


def _check_shards(shards: list[Any] | tuple[Any, ...]) -> None:
    if not shards:
        raise OptionError("the list of shards is empty")
    for number, shard in enumerate(shards):
        if isinstance(shard, Iterator):
            raise OptionError(
                f"shard {number} is an iterator, which is used up after one epoch: pass what it "
                "iterates over, or a function without arguments that returns one"
            )
        is_sample = _is_no_source(shard) or isinstance(shard, (torch.Tensor, np.ndarray))
        if is_sample or not (callable(shard) or isinstance(shard, Iterable)):
            raise OptionError(
                f"a list is read as shards, each an iterable of samples or a function that "
                f"returns one; shard {number} is a {type(shard).__name__}. Samples in a "
                "list have an index: use MemoryBudgetBatchSampler"
            )
