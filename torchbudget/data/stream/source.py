"""The sources of a stream, a class for each kind of data, and the random generators that they use.

Ranks and workers that plan from one source must see the same samples. So a source that shuffles
itself with a global generator, and transforms that draw from one, draw numbers that are a function
of the seed, the epoch and the place alone; and the process that reads keeps its own numbers.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from torchbudget.checks import check_call
from torchbudget.data.indexed import why_not_indexed
from torchbudget.data.stream.cursor import Split, StreamCursor, WorkerSlot
from torchbudget.data.stream.reader import Reader, Shuffled
from torchbudget.data.stream.transforms import Transform
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Purpose, shuffled_keys
from torchbudget.random_state import RandomState

_CHUNK: Final = 1024


class Source:
    """An iterable as the source of a stream's items. Other kinds derive from it.

    Args:
        data: the source as the user passed it.
        split: which processes get the same items: all of them (`"none"`), the same worker of each
            rank (`"workers"`), or none (`"ranks"`); `None`: as `default_split` says.
        shuffle: read shards in another order in each pass.
        seed: seed of that order.

    Attributes:
        default_split: the processes by which it splits itself, or has to be split.
        splits_itself: by the worker and the rank that it sees, if `split` says so.
        first_transforms: make samples of its items.
        seeks: its own state is used, if it has one: until it was seen not to be right.
    """

    default_split: Split = "none"
    splits_itself: ClassVar = True
    first_transforms: tuple[Transform, ...] = ()
    _first_states: ClassVar[dict[int, Any]] = {}  # of data that streams may share

    def __init__(self, data: Any, split: Split | None, *, shuffle: bool, seed: int) -> None:
        self.data, self.shuffle, self.seed = data, shuffle, seed
        self.split = split or self.default_split
        self.seeks = True

    def open(self, slot: WorkerSlot, cursor: StreamCursor) -> Reader:
        """Start the pass of a cursor over the part that this process reads."""
        key, part = (cursor.first_epoch, cursor.number), slot.part(self.split)[0]
        sees_worker = self.splits_itself and self.split != "none"
        return Reader(
            self.shards(slot, *key),
            source_state(self.seed, *key, part),
            worker=slot.worker if sees_worker else None,
            source=self.data if self.has_states else None,
            seeks=self.seeks,
        )

    def shards(self, slot: WorkerSlot, *key: int) -> list[tuple[int, Any]]:
        """Return the shards that a process reads; `key` is the epoch and the number of a pass."""
        return [(slot.part(self.split)[0], self.samples(slot, sum(key)))]

    @property
    def may_seek(self) -> bool:
        """True if a position is found without reading the items before it."""
        return self.seeks and self.has_states

    def stop_seeking(self) -> bool:
        """Stop using the source's own state, which was wrong; return whether it was used."""
        used, self.seeks = self.seeks and self.has_states, False
        return used

    @property
    def has_states(self) -> bool:
        """True if it has states of its position."""
        return hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")

    def beginning(self) -> Any:
        """Return a state that makes it start over."""
        return self.data.state_dict()

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """Return the iterable of a pass, at its beginning, whatever was loaded before."""
        if self.has_states:
            # Another stream may have moved it after the first stream opened it.
            states, number = self._first_states, id(self.data)
            if number not in states:
                states[number] = copy.deepcopy(self.beginning()), self.data
                with suppress(TypeError):  # an object without weak references stays
                    weakref.finalize(self.data, states.pop, number)
                    states[number] = states[number][0], None
            self.data.load_state_dict(copy.deepcopy(states[number][0]))
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        return self.data

    def describe(self, name: tuple[int, int], item: Any) -> str:
        """Name an item in an error message.

        Args:
            name: the item's shard, and its place there.
            item: the item itself.
        """
        return f"item {name[1]} of shard {name[0]}"


class ShardFunction(Source):
    """A function `(shard, num_shards)` that returns an iterator."""

    default_split: Split = "ranks"
    splits_itself = False

    def shards(self, slot: WorkerSlot, *_: int) -> list[tuple[int, Any]]:
        """See `Source.shards`."""
        part, parts = slot.part(self.split)
        return [(part, partial(self.data, part, parts))]


class ShardList(Source):
    """Shards, each an iterable or a function without arguments that returns one."""

    default_split: Split = "workers"
    splits_itself = False

    def shards(self, slot: WorkerSlot, *key: int) -> list[tuple[int, Any]]:
        """See `Source.shards`."""
        part, parts = slot.part(self.split)
        order = np.arange(len(self.data))
        if self.shuffle:
            keys = shuffled_keys(self.seed, *key, Purpose.SHARDS, numbers=order)
            order = order[np.argsort(keys)]
        return [(n, self.data[n]) for n in order[part::parts].tolist()]


class Indexed(Source):
    """A map-style data set. Its items are indices, in an order that is shuffled as a whole.

    A sample that is skipped is not read. It needs no states.
    """

    splits_itself = has_states = False
    may_seek = True

    def shards(self, slot: WorkerSlot, *key: int) -> list[tuple[int, Any]]:
        """See `Source.shards`."""
        length = len(self.data)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(sum(key))
        return [(0, Shuffled(length, self.seed, *key) if self.shuffle else range(length))]

    @property
    def first_transforms(self) -> tuple[Transform, ...]:  # type: ignore[override]  # of its data
        """The function that reads the sample of an index, in threads too."""
        return (self.data.__getitem__,)

    def describe(self, name: tuple[int, int], item: Any) -> str:
        """See `Source.describe`."""
        return f"sample {item}"


# ---------------------------------------------------------------------- other libraries


class DatasetsSource(Source):
    """A `datasets.IterableDataset`: it splits itself by worker, and by node if it was told to."""

    @property
    def default_split(self) -> Split:  # type: ignore[override]  # of its data
        """By rank after `split_dataset_by_node`."""
        return "workers" if getattr(self.data, "_distributed", None) is None else "ranks"

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """Return the iterable of a pass.

        Its `set_epoch` adds the difference to a number that all workers share. Of two that do so at
        once each may add it, and they would split another order of the shards than each other: in
        a worker the number is its own.
        """
        shared = getattr(self.data, "_epoch", None)
        if get_worker_info() is not None and isinstance(shared, Tensor):
            self.data._epoch = shared.clone()
        return super().samples(slot, epoch)

    def beginning(self) -> Any:
        """Its `state_dict` is up to date only after it is read; epoch -1 makes it start over."""
        return {**super().beginning(), "epoch": -1}


class WebdatasetSource(Source):
    """A webdataset pipeline, which splits itself by rank and worker."""

    default_split: Split = "ranks"

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """Return the iterable of a pass.

        Stages that draw other numbers in each epoch, as `detshuffle` does, count their own passes:
        from 0 in each new process, so that a pass that is gone on with would have another order.

        Raises:
            OptionError: it splits itself by other ranks than the stream's.
        """
        from webdataset.shardlists import single_node_only, split_by_node
        from webdataset.utils import pytorch_worker_info

        stages = getattr(self.data, "pipeline", ())
        rank, ranks, *_ = pytorch_worker_info()  # reads the environment, then torch
        asks = self.split == "ranks" and any(s in (single_node_only, split_by_node) for s in stages)
        if asks and (rank, ranks) != (slot.rank, slot.ranks):
            raise OptionError(
                f"this process is rank {rank} of {ranks} to webdataset, but rank {slot.rank} of "
                f"{slot.ranks} to the stream, so samples would be lost or repeated: set RANK and "
                "WORLD_SIZE in the environment, which spawned workers need, or pass a "
                "nodesplitter= of your own to webdataset"
            )
        for stage in stages:
            if isinstance(getattr(stage, "epoch", None), int):
                stage.epoch = epoch - 1  # it adds 1 where its pass begins
        return super().samples(slot, epoch)


_MODULES: Final = {
    "datasets.iterable_dataset.": DatasetsSource,
    "webdataset.": WebdatasetSource,
}


def source_of(data: Any, split: Split | None, *, shuffle: bool, seed: int) -> Source:
    """Return the source of a stream, checked.

    Raises:
        OptionError: it cannot be iterated more than once, or not sample by sample.
    """
    if split not in (None, *get_args(Split)):
        raise OptionError(f"split must be 'none', 'workers' or 'ranks', got {split!r}")
    kind = _kind_of("the source", data)
    if kind is ShardList:
        if not data:
            raise OptionError("the list of shards must not be empty")
        for number, shard in enumerate(data):
            _kind_of(f"shard {number}", shard, is_shard=True)
    if kind is Indexed and split not in (None, "none"):
        raise OptionError(
            f"split={split!r} is for sources that give each process a part, but a map-style data "
            "set is the same in all: leave it out, and each sample is read once"
        )
    return kind(data, split, shuffle=shuffle, seed=seed)


def _kind_of(name: str, data: Any, *, is_shard: bool = False) -> type[Source]:
    """Return the class that reads data.

    Raises:
        OptionError: it cannot be, or yields other things than samples.
    """
    if isinstance(data, Iterator):
        raise OptionError(
            f"{name} is an iterator, which is used up after one epoch, and cannot be shared by "
            "workers: pass the object that it iterates over, or a function (shard, num_shards) "
            "that returns an iterator over that part"
        )
    can_open = isinstance(data, Iterable) or callable(data)
    is_sample = is_shard and (isinstance(data, (torch.Tensor, np.ndarray)) or not can_open)
    is_table = hasattr(data, "columns") and hasattr(data, "shape") and not isinstance(data, Dataset)
    if isinstance(data, (list, tuple)):
        return ShardList
    if not (is_sample or is_table or isinstance(data, (str, bytes, bytearray, Mapping))):
        if not (is_shard or isinstance(data, type) or why_not_indexed(data)):
            return Indexed
        for base in type(data).__mro__:
            for module, kind in _MODULES.items():
                if f"{base.__module__}.".startswith(module):
                    return kind
        if can_open and not isinstance(data, Iterable):
            if not is_shard:
                check_call(data, "a function (shard, num_shards) that returns an iterator", 0, 1)
            return ShardFunction
        if can_open:
            return Source
    raise OptionError(
        f"{name} is a {type(data).__name__}: expected an iterable of samples, a map-style data "
        "set, a function (shard, num_shards) that returns an iterator, or a list of shards, each "
        "an iterable or a function without arguments. Not its characters, keys or columns: pass "
        "one split of a data set, or the rows of a table. Samples in a list have an index: use "
        "MemoryBudgetBatchSampler"
    )


# ---------------------------------------------------------------------- global generators


def source_state(*key: int) -> RandomState:
    """Return the place at which a source begins to draw: a function of `key`."""
    [word] = shuffled_keys(*key, Purpose.SHARDS, numbers=np.array([0])).tolist()
    return RandomState.seeded(word)


def seed_generators(word: int) -> None:
    """Seed Python's, NumPy's and torch's global generators with a number below 2⁶⁴.

    Each in its own way: 10 µs. `torch.manual_seed`, which seeds all devices, takes 100.
    """
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)


def sample_seed(shard: int, place: int, *key: int) -> int:
    """Return a random word for an item: a function of its place, the seed, the epoch and the pass.

    Args:
        shard: number of the item's shard.
        place: there.
        key: the seed, the epoch and the pass.
    """
    chunk, number = divmod(place, _CHUNK)
    return _words(chunk, *key, shard)[number]


@lru_cache(maxsize=8)
def _words(chunk: int, *key: int) -> list[int]:
    numbers = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    words: list[int] = shuffled_keys(*key, Purpose.SAMPLES, numbers=numbers).tolist()
    return words
