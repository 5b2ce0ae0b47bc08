"""One pass over what a process reads of a source, item by item."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import torch.utils.data._utils.worker as torch_worker

from torchbudget.data.stream.generators import ReadingGenerators
from torchbudget.data.stream.seeking import SourcePlace
from torchbudget.errors import SampleError
from torchbudget.plan.permutation import Permutation, Stream


class IndexReader:
    """The indices of a map-style data set; skipping is O(1), so it needs no state.

    Args:
        length: of the data set.
        key: of the order; `None`: ascending.

    Attributes:
        position: of the next item.
    """

    position = 0

    def __init__(self, length: int, key: tuple[int, ...] | None) -> None:
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
        start, self.position = self.position, min(self.position + n, self._length)
        if self._order is None:
            return list(range(start, self.position))
        indices: list[Any] = self._order.stretch(start, self.position).tolist()
        return indices

    def peek(self, n: int) -> int:
        """How many indices follow, up to n."""
        return min(self._length - self.position, n)

    def state(self) -> None:
        """It needs none."""

    def skip(self, n: int) -> None:
        """Go past n indices."""
        self.position = min(self.position + n, self._length)


class ShardReader:
    """The items of shards, one after the other.

    Args:
        shards: iterables, or functions that return one.
        names: their numbers, or that of the part of a source that splits itself.
        generators: that the source may draw from.
        worker: a source that splits itself by worker yields the part of this worker. `None`: all
            parts, since it does not see that it is in a worker.
        source: where this reader stands in a source that has a state of its own.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        names: Sequence[int],
        generators: ReadingGenerators,
        *,
        worker: int | None = None,
        source: SourcePlace | None = None,
    ) -> None:
        self._shards = shards
        self._names = names
        self._generators = generators
        self._worker = worker
        self._source = source
        self._starts = [0]  # positions at which shards begin, up to the one that is read next
        self._read = 0  # items that were read or skipped
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # read by `peek`
        self._state_before_ahead: dict[str, Any] | None = None

    @property
    def position(self) -> int:
        """Of the next item."""
        return self._read - len(self._ahead)

    @property
    def _over(self) -> bool:
        return len(self._starts) > len(self._shards)

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
            more = self._some(n - len(items))
            items = items + more if items else more  # most often all at once, and not copied
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
        stop = self.position + n
        while self.position < stop and not self.ended:
            begins = self._items is None and not self._ahead
            shard = self._shards[len(self._starts) - 1] if begins else None
            if isinstance(shard, Sequence) and self._read + len(shard) <= stop:
                self._read += len(shard)
                self._next_shard()
            else:
                self.take(min(stop - self.position, 1024))

    def state(self) -> dict[str, Any] | None:
        """The position, and the source's own state there, if it has one.

        Not between a `peek` and the `take` of all that it found.
        """
        if self._ahead:
            return self._state_before_ahead
        if self._source is None or self._over or self._items is None:
            return None
        self._find_place()
        return self._source.state(self.position)

    def load(self, state: dict[str, Any]) -> None:
        """Go to the position of a state, before anything is read."""
        assert self._source is not None  # noqa: S101  (else there is no state)
        self._read = self._source.load(state)

    def place(self, position: int) -> tuple[int, int]:
        """The shard of an item that was read, by name, and its place within the shard."""
        number = bisect_right(self._starts, position) - 1
        return self._names[number], position - self._starts[number]

    def _some(self, n: int) -> list[Any]:
        """Up to n next items of this shard; if there are fewer, go to the next shard."""
        shard = self._shards[len(self._starts) - 1]
        self._find_place()
        with self._reading():
            if self._items is None:
                opens = callable(shard) and not hasattr(shard, "__iter__")
                self._items = iter(shard() if opens else shard)
            items = list(islice(self._items, n))
        self._read += len(items)
        if len(items) < n:
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(
                    f"{self._describe_next()} ended, {len(shard)} items were expected"
                )
            self._next_shard()
        return items

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Inside, the source is read.

        Raises:
            SampleError: it raised.
        """
        info = before = torch_worker._worker_info
        if before is not None and before.id != self._worker:
            info = None if self._worker is None else copy.copy(before)
            if info is not None:
                object.__setattr__(info, "id", self._worker)  # torch's own `__setattr__` raises
        torch_worker._worker_info = info  # what `torch.utils.data.get_worker_info()` returns
        try:
            with self._generators.of_source():
                yield
        except Exception as error:
            raise SampleError(
                f"{self._describe_next()} cannot be read: {type(error).__name__}: {error}"
            ) from error
        finally:
            torch_worker._worker_info = before

    def _find_place(self) -> None:
        """Go back to where this reader stood, if another one has moved the source meanwhile."""
        if self._source is None or not self._source.was_moved:
            return
        self._items = None  # an iterator may change its source where it ends
        self._source.take_over()
        with self._reading():
            iterable, position = self._source.go_back()
            self._items = iter(iterable)
            deque(islice(self._items, self._read - position), maxlen=0)

    def _describe_next(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self._items = None
        self._starts.append(self._read)


Reader: TypeAlias = IndexReader | ShardReader
