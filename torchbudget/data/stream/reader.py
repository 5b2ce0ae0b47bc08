"""One pass over what a process reads of a source, item by item."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import torch.utils.data._utils.worker as torch_worker

from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.data.stream.generators import Place
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.errors import SampleError, StateMismatchError
from torchbudget.plan.permutation import Permutation, Stream

_CHUNK: Final = 4096


class Shuffled:
    """The indices of a map-style data set in a random order, from any of them on.

    Args:
        length: of the data set.
        key: of the order.
    """

    def __init__(self, length: int, *key: int) -> None:
        self._length, self._order = length, Permutation(length, *key, Stream.INDEX)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Iterator[int]:
        for begin in range(part.start, self._length, _CHUNK):
            yield from self._order.stretch(begin, min(begin + _CHUNK, self._length)).tolist()

    def __iter__(self) -> Iterator[int]:
        return self[0:]


class Reader:
    """The items of shards, one after the other.

    The state of a source is that of all that read it in a process: a loop within another one moves
    it.

    Args:
        shards: by number: iterables, or functions that return one; or the part of a source that
            splits itself.
        generators: where those of the source stand.
        worker: a source that splits itself by worker yields the part of this worker. `None`: all
            parts, since it does not see that it is in a worker.
        source: that has a state of its own, the only shard.
        moved: what moves with it: itself, or the parts that it shares with others.

    Attributes:
        state: of the source, and its position there, where the present window begins; `None`: it
            has none.
    """

    _last: ClassVar[WeakValueDictionary[int, Reader]] = WeakValueDictionary()  # of each source

    def __init__(
        self,
        shards: Sequence[tuple[int, Any]],
        generators: Place,
        *,
        worker: int | None = None,
        source: Any = None,
        moved: Sequence[Any] = (),
    ) -> None:
        self._shards = shards
        self._generators = self._generators_at_state = generators
        self._source = source
        # What `torch.utils.data.get_worker_info()` returns to the source.
        self._worker_info = None if worker is None else copy.copy(torch_worker._worker_info)
        if self._worker_info is not None:  # its own `__setattr__` raises
            object.__setattr__(self._worker_info, "id", worker)
        self._starts = [0]  # positions at which shards begin, up to the one that is read next
        self._read = 0  # items that were read or skipped
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # of the next window
        self.state: dict[str, Any] | None = None
        self._moved = moved
        self._last.update((id(part), self) for part in moved)

    @property
    def was_moved(self) -> bool:
        """Whether another one has opened the source since."""
        return any(self._last.get(id(part)) is not self for part in self._moved)

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

    def run(self, n: int, most_bytes: int | None) -> list[Any]:
        """Up to n next items, until they have so many bytes; none: the last one was read."""
        items = self.take(n if most_bytes is None else min(n, len(self._ahead)))
        while n > 0 and not items and not self._over:
            items = self._some(n, most_bytes)
        return items

    def tail(self, fewest: int) -> list[Any]:
        """The items after a window, if they are fewer than that: they belong to it."""
        self.state, self._generators_at_state = None, self._generators
        if self._source is not None and not self._over:
            source = copy.deepcopy(self._source.state_dict())
            self.state = {"position": self._read, "source": source}
        items = self.take(fewest)
        if len(items) < fewest:
            return items
        self._ahead = items
        return []

    def skip_to(self, stop: int) -> None:
        """Go to a position: at once in indices, and over shards that know their lengths."""
        self.take(min(stop - self.position, len(self._ahead)))
        while self._read < stop and not self._over:
            _, shard = self._shards[len(self._starts) - 1]
            begun = self._starts[-1]
            if isinstance(shard, (Sequence, Shuffled)) and begun + len(shard) <= stop:
                self._read = begun + len(shard)
                self._next_shard()
            elif isinstance(shard, (range, Shuffled)):
                self._read, self._items = stop, iter(shard[stop - begun :])
            else:
                self._some(stop - self._read, keep=False)

    def go_to(self, cursor: StreamCursor, before: Reader | None) -> None:
        """Go to where a cursor stands, before anything is read.

        Args:
            cursor: in this pass.
            before: what has read it until now; it knows what the source drew, which no state has.

        Raises:
            StateMismatchError: there are fewer items.
        """
        if before is not None and cursor.source is not None and before.state is cursor.source:
            self._generators = self._generators_at_state = before._generators_at_state
        self.state = cursor.source
        if self._source is not None and cursor.source is not None:
            self._source.load_state_dict(copy.deepcopy(cursor.source["source"]))
            self._read = cursor.source["position"]
        self.skip_to(cursor.start)
        if self._read < cursor.start:
            raise StateMismatchError(
                f"the state is that after {cursor.start} items of the source, which has "
                f"{self._read}: it is another source"
            )

    def place(self, position: int) -> tuple[int, int]:
        """The shard of an item that was read, by name, and its place within the shard."""
        number = bisect_right(self._starts, position) - 1
        return self._shards[number][0], position - self._starts[number]

    def _some(self, n: int, most_bytes: int | None = None, *, keep: bool = True) -> list[Any]:
        """Up to n next items of this shard; if there are fewer, go to the next shard.

        Args:
            n: at least 1.
            most_bytes: as soon as the items have them, others are left; `None`: none is.
            keep: `False`: the items are skipped.
        """
        _, shard = self._shards[len(self._starts) - 1]
        before, torch_worker._worker_info = torch_worker._worker_info, self._worker_info
        self._generators.restore()
        items: list[Any] = []
        held, counted = 0, count()
        try:
            if self._items is None:
                opens = callable(shard) and not hasattr(shard, "__iter__")
                self._items = iter(shard() if opens else shard)
            some = islice(self._items, n)
            if not keep:
                deque(zip(some, counted), maxlen=0)  # noqa: B905  (there are more numbers)
            elif most_bytes is None:
                items = list(some)
            else:
                for item in some:
                    items.append(item)
                    held += held_bytes(item)
                    if held >= most_bytes:
                        break
        except Exception as error:
            text = f"{self._next} cannot be read: {type(error).__name__}: {error}"
            raise SampleError(text) from error
        finally:
            self._generators = Place.put_aside()
            torch_worker._worker_info = before
        number = len(items) if keep else next(counted)
        self._read += number
        if number < n and (most_bytes is None or held < most_bytes):
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(f"{self._next} ended, {len(shard)} items were expected")
            self._next_shard()
        return items

    @property
    def _next(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self._items = None
        self._starts.append(self._read)
