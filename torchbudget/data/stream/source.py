"""What a stream reads, and how workers and ranks share it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from torchbudget.data.map_style import MapStyle
from torchbudget.data.stream.libraries import (
    RayRows,
    initial_state,
    is_iterable,
    library,
    seeks,
    split_by,
)
from torchbudget.errors import OptionError, SampleError
from torchbudget.plan.permutation import Permutation, Stream, shuffled_keys

Split: TypeAlias = Literal["none", "workers", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """One of the processes that share a source.

    Attributes:
        worker: number of the `DataLoader` worker on its rank.
        workers: on each rank, at least 1.
        rank: of the process.
        ranks: number of them.
    """

    worker: int
    workers: int
    rank: int
    ranks: int

    def share(self, batches: int) -> int:
        """This worker's number of `batches`: a loader takes one from each worker in turn."""
        each, more = divmod(batches, self.workers)
        return each + (self.worker < more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the items of a stream come from.

    Items of a map-style data set are indices, in an order that is shuffled as a whole: a sample
    that is skipped is not read.

    Attributes:
        data: as the user passed it.
        split: which processes get the same items: all of them (`"none"`), the same worker of each
            rank (`"workers"`), or none (`"ranks"`).
        shuffle: read shards in another order in each pass.
        seed: of that order.
        first_state: the state of the source before it was first read, if it has states; empty
            until then.
    """

    data: Any
    split: Split
    shuffle: bool
    seed: int
    first_state: list[Any] = field(default_factory=list, repr=False, compare=False)

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

    @classmethod
    def of(cls, data: Any, split: Split | None, *, shuffle: bool, seed: int) -> Source:
        """Check the data, and how it is split.

        Raises:
            OptionError: it cannot be iterated more than once.
        """
        if isinstance(data, (list, tuple)):
            for number, shard in enumerate(data):
                if isinstance(shard, (str, bytes, dict, torch.Tensor, np.ndarray)) or not (
                    callable(shard) or isinstance(shard, Iterable)
                ):
                    raise OptionError(
                        f"a list is read as shards, each an iterable of samples or a function that "
                        f"returns one; shard {number} is a {type(shard).__name__}. Samples in a "
                        "list have an index: use MemoryBudgetBatchSampler"
                    )
            if not data:
                raise OptionError("the list of shards is empty")
        elif not (callable(data) or is_iterable(data) or is_indexed(data)):
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
        if split not in (None, "none", "workers", "ranks"):
            raise OptionError(f"split must be 'none', 'workers' or 'ranks', got {split!r}")
        return cls(data=data, split=split or _split_of(data), shuffle=shuffle, seed=seed)

    def open(self, slot: WorkerSlot, *, epoch: int, number: int) -> Reader:
        """Start a pass over what this process reads."""
        data = self.data
        part, parts = {
            "none": (0, 1),
            "workers": (slot.worker, slot.workers),
            "ranks": (slot.rank * slot.workers + slot.worker, slot.ranks * slot.workers),
        }[self.split]
        if is_indexed(data):
            return IndexReader(len(data), (self.seed, epoch, number) if self.shuffle else None)
        if isinstance(data, (list, tuple)):
            order = np.arange(len(data))
            if self.shuffle:
                order = order[
                    np.argsort(
                        shuffled_keys(self.seed, epoch, number, Stream.SHARDS, numbers=order)
                    )
                ]
            order = order[part::parts]
            return Reader([data[i] for i in order], order.tolist())
        if callable(data) and not is_iterable(data):
            return Reader([_Shard(data, part, parts)], [part])
        if seeks(data):
            if not self.first_state:
                self.first_state.append(copy.deepcopy(initial_state(data)))
            data.load_state_dict(copy.deepcopy(self.first_state[0]))
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch + number)  # it has no passes within an epoch
        if library(data) == "ray":
            info = get_worker_info()
            data = RayRows(data, slot.ranks, 0 if info is None else info.num_workers)
        return Reader([data], [part], worker=None if self.split == "none" else slot.worker)


def _split_of(data: Any) -> Split:
    """How a source is split already, or asks to be."""
    if isinstance(data, (list, tuple)):
        return "workers"
    if is_indexed(data):
        return "none"
    if callable(data) and not is_iterable(data):
        return "ranks"
    return split_by(data) or "none"


def is_indexed(data: Any) -> bool:
    """Whether it is a map-style data set."""
    others = (list, tuple, str, bytes, Mapping, IterableDataset)
    return isinstance(data, MapStyle) and not isinstance(data, others)


@dataclass(frozen=True, slots=True)
class _Shard:
    function: Callable[[int, int], Iterable[Any]]
    shard: int
    shards: int

    def __call__(self) -> Iterable[Any]:
        return self.function(self.shard, self.shards)


class Reader:
    """One pass over shards, one after the other.

    Args:
        shards: iterables, or functions that return one.
        names: their numbers, or that of the part of a source that splits itself.
        worker: a source that splits itself by worker yields the part of this worker. `None`: all
            parts, since it does not see that it is in a worker.

    Attributes:
        position: of the next item.
    """

    def __init__(
        self, shards: Sequence[Any], names: Sequence[int], *, worker: int | None = None
    ) -> None:
        self._shards = shards
        self._names = names
        self._worker = worker
        self._number = 0
        self._shard_starts = [(0, 0)]  # positions at which shards begin, and their numbers
        self._read = 0  # items that were read or skipped
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # read by `peek`
        self._state_before_ahead: dict[str, Any] | None = None
        self._over = not shards
        self.position = 0

    @property
    def ended(self) -> bool:
        """Whether the last item was read."""
        return self._over and not self._ahead

    def take(self, n: int) -> list[Any]:
        """The next n items, or those that are left.

        Raises:
            SampleError: the source raised, or a shard had fewer items than its `len`.
        """
        items = self._ahead[:n]
        del self._ahead[:n]
        while len(items) < n and not self._over:
            items += self._some(n - len(items))
        self.position += len(items)
        return items

    def peek(self, n: int) -> int:
        """How many items follow, up to n."""
        if not self._ahead:
            self._state_before_ahead = self.state()
        while len(self._ahead) < n and not self._over:
            self._ahead += self._some(n - len(self._ahead))
        return min(len(self._ahead), n)

    def skip(self, n: int) -> None:
        """Go past n items, whole shards at once where they know their lengths."""
        while n > 0 and not self.ended:
            shard = self._shards[self._number] if not self._over else None
            if not self._ahead and self._items is None and isinstance(shard, Sequence):
                length = len(shard)
                if length <= n:
                    n -= length
                    self.position += length
                    self._read += length
                    self._next_shard()
                    continue
            n -= len(self.take(min(n, 1024)))

    def state(self) -> dict[str, Any] | None:
        """The position, and the source's own state there, if it has one.

        Not between a `peek` and the `take` of all that it found.
        """
        if self._ahead:
            return self._state_before_ahead
        if len(self._shards) != 1 or self._over or self._items is None:
            return None
        [shard] = self._shards
        if not seeks(shard):
            return None
        return {"position": self.position, "source": shard.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go to the position of a state, before anything is read."""
        [shard] = self._shards
        shard.load_state_dict(state["source"])
        self.position = self._read = state["position"]

    def place(self, position: int) -> tuple[int, int]:
        """The shard of an item that was read, by name, and its place within the shard."""
        start, number = next(one for one in reversed(self._shard_starts) if one[0] <= position)
        return self._names[number], position - start

    def _some(self, n: int) -> list[Any]:
        """Up to n next items of this shard; if there are fewer, go to the next shard."""
        try:
            with _as_worker(self._worker):
                if self._items is None:
                    shard = self._shards[self._number]
                    opens = callable(shard) and not isinstance(shard, Iterable)
                    self._items = iter(shard() if opens else shard)
                items = list(islice(self._items, n))
        except Exception as error:
            raise SampleError(
                f"{self._describe_next()} cannot be read: {type(error).__name__}: {error}"
            ) from error
        self._read += len(items)
        if len(items) < n:
            shard = self._shards[self._number]
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(
                    f"{self._describe_next()} ended, {len(shard)} items were expected"
                )
            self._next_shard()
        return items

    def _describe_next(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self._items = None
        self._number += 1
        self._shard_starts.append((self._read, self._number))
        self._over = self._number == len(self._shards)


class IndexReader(Reader):
    """The indices of a map-style data set; skipping is O(1), so it needs no state.

    Args:
        length: of the data set.
        key: of the order; `None`: ascending.
    """

    def __init__(self, length: int, key: tuple[int, ...] | None) -> None:
        super().__init__((), ())
        self._length = length
        self._order = None if key is None else Permutation(length, *key, Stream.INDEX)

    def place(self, position: int) -> tuple[int, int]:
        """There are no shards."""
        return 0, position

    @property
    def ended(self) -> bool:
        """Whether the last index was taken."""
        return self.position == self._length

    def take(self, n: int) -> list[Any]:
        """The next n indices, or those that are left."""
        stop = min(self.position + n, self._length)
        if self._order is None:
            indices = list(range(self.position, stop))
        else:
            indices = self._order.stretch(self.position, stop).tolist()
        self.position = stop
        return indices

    def peek(self, n: int) -> int:
        """How many indices follow, up to n."""
        return min(self._length - self.position, n)

    def skip(self, n: int) -> None:
        """Go past n indices."""
        self.position = min(self.position + n, self._length)


@contextmanager
def _as_worker(worker: int | None) -> Iterator[None]:
    """Inside, `torch.utils.data.get_worker_info()` returns the info of that worker, or `None`."""
    before = torch_worker._worker_info
    if before is not None:
        torch_worker._worker_info = None if worker is None else _with_id(before, worker)
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _with_id(info: Any, worker: int) -> Any:
    if worker == info.id:
        return info
    other = copy.copy(info)
    object.__setattr__(other, "id", worker)  # torch's own `__setattr__` raises
    return other
