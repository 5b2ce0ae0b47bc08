"""One pass over what a process reads of a source, item by item."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import torch.utils.data._utils.worker as torch_worker

from torchbudget.data.stream.generators import ReadingGenerators
from torchbudget.errors import SampleError
from torchbudget.plan.permutation import Permutation, Stream

_CHUNK: Final = 4096


class Indices:
    """The indices of a map-style data set, from any of them on.

    Args:
        length: of the data set.
        key: of the order; `None`: ascending.
    """

    def __init__(self, length: int, key: tuple[int, ...] | None) -> None:
        self._length = length
        self._order = None if key is None else Permutation(length, *key, Stream.INDEX)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return self.after(0)

    def after(self, start: int) -> Iterator[int]:
        """Those from a place on, in O(1)."""
        if self._order is None:
            yield from range(start, self._length)
            return
        for begin in range(start, self._length, _CHUNK):
            yield from self._order.stretch(begin, min(begin + _CHUNK, self._length)).tolist()


class Reader:
    """The items of shards, one after the other.

    The state of a source is that of all that read it in a process: a loop within another one moves
    it.

    Args:
        shards: iterables, or functions that return one.
        names: their numbers, or that of the part of a source that splits itself.
        generators: that the source may draw from.
        worker: a source that splits itself by worker yields the part of this worker. `None`: all
            parts, since it does not see that it is in a worker.
        source: that has a state of its own, the only shard.

    Attributes:
        drawn: where the generators of the source stood when its state was asked for.
    """

    _last: ClassVar[WeakValueDictionary[int, Reader]] = WeakValueDictionary()  # of each source

    def __init__(
        self,
        shards: Sequence[Any],
        names: Sequence[int],
        generators: ReadingGenerators,
        *,
        worker: int | None = None,
        source: Any = None,
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
        self.drawn = generators.of_source_now
        if source is not None:
            self._last[id(source)] = self

    @property
    def was_moved(self) -> bool:
        """Whether another one has opened the source since."""
        return self._source is not None and self._last.get(id(self._source)) is not self

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
        """Go past n items: at once in indices, and over shards that know their lengths."""
        stop = self.position + n
        self.take(min(n, len(self._ahead)))
        while self._read < stop and not self._over:
            shard, begun = self._shards[len(self._starts) - 1], self._starts[-1]
            if isinstance(shard, (Sequence, Indices)) and begun + len(shard) <= stop:
                self._read = begun + len(shard)
                self._next_shard()
            elif isinstance(shard, Indices):
                self._read, self._items = stop, shard.after(stop)
            else:
                self._some(min(stop - self._read, 1024))

    def state(self) -> dict[str, Any] | None:
        """The position, and the source's own state there, if it has one.

        Not between a `peek` and the `take` of all that it found.
        """
        if self._ahead:
            return self._state_before_ahead
        if self._source is None or self._over or self._items is None:
            return None
        self.drawn = self._generators.of_source_now
        return {"position": self._read, "source": copy.deepcopy(self._source.state_dict())}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go to the position of a state, if there is one, before anything is read."""
        if self._source is not None and state is not None:
            self._source.load_state_dict(copy.deepcopy(state["source"]))
            self._read = state["position"]

    def place(self, position: int) -> tuple[int, int]:
        """The shard of an item that was read, by name, and its place within the shard."""
        number = bisect_right(self._starts, position) - 1
        return self._names[number], position - self._starts[number]

    def _some(self, n: int) -> list[Any]:
        """Up to n next items of this shard; if there are fewer, go to the next shard."""
        shard = self._shards[len(self._starts) - 1]
        with self._reading():
            if self._items is None:
                opens = callable(shard) and not hasattr(shard, "__iter__")
                self._items = iter(shard() if opens else shard)
            items = list(islice(self._items, n))
        self._read += len(items)
        if len(items) < n:
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(f"{self._next} ended, {len(shard)} items were expected")
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
            text = f"{self._next} cannot be read: {type(error).__name__}: {error}"
            raise SampleError(text) from error
        finally:
            torch_worker._worker_info = before

    @property
    def _next(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self._items = None
        self._starts.append(self._read)
