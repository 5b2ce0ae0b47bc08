"""What a stream reads, opened for each pass of each process: one class for each kind of data."""

from __future__ import annotations

import copy
import weakref
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.data.stream.generators import Place
from torchbudget.data.stream.reader import Reader, Shuffled
from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.transforms import Transform
from torchbudget.plan.permutation import Stream, shuffled_keys


class Source:
    """Where the items of a stream come from: an iterable. Other kinds derive from it.

    Args:
        data: as the user passed it.
        split: which processes get the same items: all of them (`"none"`), the same worker of each
            rank (`"workers"`), or none (`"ranks"`); `None`: as `default_split` says.
        shuffle: read shards in another order in each pass.
        seed: of that order.

    Attributes:
        default_split: the processes by which it splits itself, or has to be split.
        first_transforms: what makes samples of its items.
    """

    default_split: Split = "none"
    first_transforms: tuple[Transform, ...] = ()
    _first_states: ClassVar[dict[int, Any]] = {}  # of data that streams may share

    def __init__(self, data: Any, split: Split | None, *, shuffle: bool, seed: int) -> None:
        self.data, self.shuffle, self.seed = data, shuffle, seed
        self.split = split or self.default_split

    def open(self, slot: WorkerSlot, cursor: StreamCursor) -> Reader:
        """Start the pass of a cursor over what this process reads."""
        key = cursor.first_epoch, cursor.number
        generators = Place.of_source(self.seed, *key, slot.part(self.split)[0])
        return self.reader(slot, generators, *key)

    def reader(self, slot: WorkerSlot, generators: Place, *key: int) -> Reader:
        """What reads a pass; `key` is its epoch and its number."""
        return Reader(
            [(slot.part(self.split)[0], self.samples(slot, sum(key)))],
            generators,
            worker=None if self.split == "none" else slot.worker,
            source=self.data if self.has_states else None,
            moved=self.stages if self.has_states else (),
        )

    @property
    def has_states(self) -> bool:
        """Whether a position is found without reading what comes before it: by exact states."""
        return hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")

    @property
    def stages(self) -> list[Any]:
        """What has its state: itself, or the parts that it may share with other data."""
        return [self.data]

    def beginning(self) -> Any:
        """A state that makes it start over."""
        return self.data.state_dict()

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """What a pass iterates over, from the beginning, whatever was loaded before."""
        if self.has_states:
            # Another stream may have moved it since the first one opened it.
            states, number = self._first_states, id(self.data)
            if number not in states:
                states[number] = copy.deepcopy(self.beginning()), self.data
                with suppress(TypeError):  # what no weak reference can be made to stays
                    weakref.finalize(self.data, states.pop, number)
                    states[number] = states[number][0], None
            self.data.load_state_dict(copy.deepcopy(states[number][0]))
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        return self.data

    def describe(self, name: tuple[int, int], item: Any) -> str:
        """Name an item in an error message.

        Args:
            name: its shard, and its place there.
            item: the item itself.
        """
        shard, place = name
        several = isinstance(self.data, (list, tuple)) or self.split != "none"
        return f"item {place} of shard {shard}" if several else f"item {place}"


class ShardFunction(Source):
    """A function `(shard, num_shards)` that returns an iterator."""

    default_split: Split = "ranks"

    def reader(self, slot: WorkerSlot, generators: Place, *_: int) -> Reader:
        """See `Source.reader`."""
        part, parts = slot.part(self.split)
        return Reader([(part, partial(self.data, part, parts))], generators)


class ShardList(Source):
    """Shards, each an iterable or a function without arguments that returns one."""

    default_split: Split = "workers"

    def reader(self, slot: WorkerSlot, generators: Place, *key: int) -> Reader:
        """See `Source.reader`."""
        part, parts = slot.part(self.split)
        order = np.arange(len(self.data))
        if self.shuffle:
            keys = shuffled_keys(self.seed, *key, Stream.SHARDS, numbers=order)
            order = order[np.argsort(keys)]
        return Reader([(n, self.data[n]) for n in order[part::parts].tolist()], generators)


class Indexed(Source):
    """A map-style data set. Its items are indices, in an order that is shuffled as a whole.

    A sample that is skipped is not read.
    """

    def reader(self, slot: WorkerSlot, generators: Place, *key: int) -> Reader:
        """See `Source.reader`."""
        length = len(self.data)
        indices = Shuffled(length, self.seed, *key) if self.shuffle else range(length)
        return Reader([(0, indices)], generators)

    @property
    def has_states(self) -> bool:
        """It needs none."""
        return True

    @property
    def first_transforms(self) -> tuple[Transform, ...]:  # type: ignore[override]  # of its data
        """What reads the sample of an index, in threads too."""
        return (self.data.__getitem__,)

    def describe(self, name: tuple[int, int], item: Any) -> str:
        """See `Source.describe`."""
        return f"sample {item}"
