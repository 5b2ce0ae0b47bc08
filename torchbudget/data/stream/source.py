"""What a stream reads from, and how workers and ranks share it."""

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

from torchbudget.data.stream.libraries import (
    RayRows,
    beginning,
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
        worker: number of the `DataLoader`'s worker, on its rank.
        workers: of each rank, at least 1.
        rank: of the process.
        ranks: how many.
    """

    worker: int
    workers: int
    rank: int
    ranks: int

    def share(self, batches: int) -> int:
        """This worker's part of its rank's batches, which a loader takes from all in turn."""
        each, more = divmod(batches, self.workers)
        return each + (self.worker < more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the items of a stream come from.

    Items of a map-style data set are indices, in an order that is shuffled as a whole: who skips
    a sample does not read it.

    Attributes:
        given: by the user.
        split: which processes get the same items: all of them (`"none"`), the same worker of each
            rank (`"workers"`), or none (`"ranks"`).
        shuffle: shards in another order for each pass.
        seed: of that order.
        first_state: that of a source that has states, before it was read; empty until it is.
    """

    given: Any
    split: Split
    shuffle: bool
    seed: int
    first_state: list[Any] = field(default_factory=list, repr=False, compare=False)

    def called(self, name: tuple[int, int], item: Any) -> str:
        """An item in an error's text.

        Args:
            name: its shard, and its place there.
            item: itself.
        """
        if is_indexed(self.given):
            return f"sample {item}"
        shard, place = name
        several = isinstance(self.given, (list, tuple)) or self.split != "none"
        return f"item {place} of shard {shard}" if several else f"item {place}"

    @classmethod
    def of(cls, given: Any, split: Split | None, *, shuffle: bool, seed: int) -> Source:
        """Find out what it is.

        Raises:
            OptionError: nothing that can be iterated more than once.
        """
        if isinstance(given, (list, tuple)):
            for number, shard in enumerate(given):
                if isinstance(shard, (str, bytes, dict, torch.Tensor, np.ndarray)) or not (
                    callable(shard) or isinstance(shard, Iterable)
                ):
                    raise OptionError(
                        f"a list is taken for shards, each an iterable of samples or a function "
                        f"that gives one; shard {number} is a {type(shard).__name__}. Samples in a "
                        "list have an index: use MemoryBudgetBatchSampler"
                    )
            if not given:
                raise OptionError("the list of shards is empty")
        elif not (callable(given) or is_iterable(given) or is_indexed(given)):
            raise OptionError(
                "expected an iterable, a map-style or an iterable data set, a function "
                "(shard, num_shards) that gives an iterator, or a list of shards, got "
                f"{type(given).__name__}"
            )
        elif isinstance(given, Iterator):
            raise OptionError(
                "an iterator is used up after one epoch, and cannot be shared by workers: pass "
                "what it is made of, or a function (shard, num_shards) that makes one"
            )
        if split not in (None, "none", "workers", "ranks"):
            raise OptionError(f"split must be 'none', 'workers' or 'ranks', got {split!r}")
        return cls(given=given, split=split or _split_of(given), shuffle=shuffle, seed=seed)

    def open(self, slot: WorkerSlot, *, epoch: int, number: int) -> Reader:
        """Begin a pass over what this process reads."""
        given = self.given
        part, parts = {
            "none": (0, 1),
            "workers": (slot.worker, slot.workers),
            "ranks": (slot.rank * slot.workers + slot.worker, slot.ranks * slot.workers),
        }[self.split]
        if is_indexed(given):
            return IndexReader(len(given), (self.seed, epoch, number) if self.shuffle else None)
        if isinstance(given, (list, tuple)):
            order = np.arange(len(given))
            if self.shuffle:
                order = order[
                    np.argsort(
                        shuffled_keys(self.seed, epoch, number, Stream.SHARDS, numbers=order)
                    )
                ]
            order = order[part::parts]
            return Reader([given[i] for i in order], order.tolist())
        if callable(given) and not is_iterable(given):
            return Reader([_Called(given, part, parts)], [part])
        if seeks(given):
            if not self.first_state:
                self.first_state.append(copy.deepcopy(beginning(given)))
            given.load_state_dict(copy.deepcopy(self.first_state[0]))
        if hasattr(given, "set_epoch"):
            given.set_epoch(epoch + number)  # it has no passes within an epoch
        if library(given) == "ray":
            info = get_worker_info()
            given = RayRows(given, slot.ranks, 0 if info is None else info.num_workers)
        return Reader([given], [part], worker=None if self.split == "none" else slot.worker)


def _split_of(given: Any) -> Split:
    """How a source is split already, or asks to be."""
    if isinstance(given, (list, tuple)):
        return "workers"
    if is_indexed(given):
        return "none"
    if callable(given) and not is_iterable(given):
        return "ranks"
    return split_by(given) or "none"


def is_indexed(given: Any) -> bool:
    """Whether it is a map-style data set."""
    indexed = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    return indexed and not isinstance(given, (list, tuple, str, bytes, Mapping, IterableDataset))


@dataclass(frozen=True, slots=True)
class _Called:
    function: Callable[[int, int], Iterable[Any]]
    shard: int
    shards: int

    def __call__(self) -> Iterable[Any]:
        return self.function(self.shard, self.shards)


class Reader:
    """One pass over shards, one after the other.

    Args:
        shards: iterables, or functions that give one.
        names: numbers of them, or of the part of a source that splits itself.
        worker: which one's part a source is to give that splits itself by worker. `None`: all of
            it; it does not see that it is in a worker.

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
        self._begins = [(0, 0)]  # where each shard begins that was reached, and its number
        self._read = 0  # items, and those of shards that were passed over
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._mark: dict[str, Any] | None = None  # before those
        self._over = not shards
        self.position = 0

    @property
    def ended(self) -> bool:
        """Whether the last item was read."""
        return self._over and not self._ahead

    def take(self, n: int) -> list[Any]:
        """The next n items, or those that are left.

        Raises:
            SampleError: the source raised, or a shard held fewer items than its `len`.
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
            self._mark = self.state()
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
        """Where the source itself says that it stands, if it can."""
        if self._ahead:
            mark = self._mark
            return mark if mark is not None and mark["position"] == self.position else None
        if len(self._shards) != 1 or self._over or self._items is None:
            return None
        [shard] = self._shards
        if not seeks(shard):
            return None
        return {"position": self.position, "source": shard.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go to where `state` stood, before anything is read."""
        [shard] = self._shards
        shard.load_state_dict(state["source"])
        self.position = self._read = state["position"]

    def place(self, position: int) -> tuple[int, int]:
        """Where an item stands that was read: the shard's name, and the number within the shard."""
        begin, number = next(mark for mark in reversed(self._begins) if mark[0] <= position)
        return self._names[number], position - begin

    def _some(self, n: int) -> list[Any]:
        """The next items of this shard; where there are none, the next one begins."""
        try:
            with _as_worker(self._worker):
                if self._items is None:
                    shard = self._shards[self._number]
                    made = shard() if callable(shard) and not isinstance(shard, Iterable) else shard
                    self._items = iter(made)
                items = list(islice(self._items, n))
        except Exception as error:
            raise SampleError(
                f"{self._place()} cannot be read: {type(error).__name__}: {error}"
            ) from error
        self._read += len(items)
        if len(items) < n:
            shard = self._shards[self._number]
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(f"{self._place()} ended, {len(shard)} items were expected")
            self._next_shard()
        return items

    def _place(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self._items = None
        self._number += 1
        self._begins.append((self._read, self._number))
        self._over = self._number == len(self._shards)


class IndexReader(Reader):
    """The indices of a map-style data set; skipping costs nothing.

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
        """Whether the last index was given."""
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

    def state(self) -> dict[str, Any]:
        """The position says everything."""
        return {"position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        """Go to where `state` stood."""
        self.position = state["position"]


@contextmanager
def _as_worker(worker: int | None) -> Iterator[None]:
    """`torch.utils.data.get_worker_info()` is that worker's inside, or `None`."""
    before = torch_worker._worker_info
    if before is not None:
        torch_worker._worker_info = None if worker is None else _numbered(before, worker)
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _numbered(info: Any, worker: int) -> Any:
    if worker == info.id:
        return info
    other = copy.copy(info)
    object.__setattr__(other, "id", worker)  # torch's own refuses
    return other
