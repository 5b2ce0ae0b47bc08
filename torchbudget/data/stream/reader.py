"""One pass over a process's part of a source, item by item, and the bytes that items keep."""

from __future__ import annotations

import copy
import gc
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from mmap import mmap
from types import FunctionType, MethodType, ModuleType, TracebackType, WrapperDescriptorType
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils._pytree import tree_map

from torchbudget.data.indexed import checksum_of
from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.errors import SampleError, StateMismatchError
from torchbudget.plan.permutation import Permutation, Purpose
from torchbudget.random_state import RandomState

_CHUNK: Final = 4096
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES: Final = 28
_OBJECT_BYTES: Final = 100
_MUCH_LARGER: Final = 2
_SHARED_BYTES: Final = 256  # an entry in a set takes a quarter of that at the most
# Objects of these types refer to parts of the program, not of the sample.
_OF_PROGRAM: Final = (type, ModuleType, FunctionType, MethodType, TracebackType, partial)


class Shuffled:
    """The indices of a map-style data set in a random order, from any of them on.

    Args:
        length: number of samples of the data set.
        key: key of the order.
    """

    def __init__(self, length: int, *key: int) -> None:
        self._length, self._order = length, Permutation(length, *key, Purpose.INDEX)

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
        generators: states of the source's random generators.
        worker: a source that splits itself by worker yields the part of this worker. `None`: all
            parts, since it does not see that it is in a worker.
        source: a source that has a state of its own, the only shard.
        seeks: the state is used.

    Attributes:
        state: of the source where the present window begins, its position there, and a fingerprint
            of the item after it; `None`: it has none.
        read_bytes: bytes of the items that were counted.
    """

    _last: ClassVar[WeakValueDictionary[int, Reader]] = WeakValueDictionary()  # of each source's id

    def __init__(
        self,
        shards: Sequence[tuple[int, Any]],
        generators: RandomState,
        *,
        worker: int | None = None,
        source: Any = None,
        seeks: bool = True,
    ) -> None:
        self._shards, self._generators, self._source = shards, generators, source if seeks else None
        # The result of `torch.utils.data.get_worker_info()` in the source.
        self._worker_info = None if worker is None else copy.copy(torch_worker._worker_info)
        if self._worker_info is not None:  # its own `__setattr__` raises
            object.__setattr__(self._worker_info, "id", worker)
        self._starts = [0]  # positions at which shards begin, up to the one that is read next
        self._read = 0  # items that were read or skipped
        self._opened: Iterator[Any] | None = None  # of the shard that is read
        self._ahead: list[Any] = []  # of the next window
        self.state: dict[str, Any] | None = None
        self.read_bytes = 0
        self._moved = None if source is None else id(source)
        if self._moved is not None:
            self._last[self._moved] = self

    def was_moved(self) -> bool:
        """True if another reader has opened the source since."""
        return self._moved is not None and self._last.get(self._moved) is not self

    @property
    def position(self) -> int:
        """Position of the next item."""
        return self._read - len(self._ahead)

    @property
    def _over(self) -> bool:
        return len(self._starts) > len(self._shards)

    @property
    def ended(self) -> bool:
        """True if the last item was read."""
        return self._over and not self._ahead

    def close(self) -> None:
        """Let the source go: its generator ends, with the files that it has open."""
        opened, self._opened = self._opened, None
        with suppress(AttributeError):
            opened.close()  # type: ignore[union-attr]  # a generator's

    def take(self, n: int) -> list[Any]:
        """Return the next n items, or those that are left.

        Raises:
            SampleError: the source raised, or a shard had fewer items than its `len`.
        """
        items = self._ahead[:n]
        del self._ahead[:n]
        while len(items) < n and not self._over:
            more = self._some(n - len(items))
            items = items + more if items else more  # usually all items at once, without a copy
        return items

    def run(self, n: int, most_bytes: int | None) -> list[Any]:
        """Return the next items, at most n, until they have that many bytes; none at the end."""
        items = self.take(n if most_bytes is None else min(n, len(self._ahead)))
        while n > 0 and not items and not self._over:
            items = self._some(n, most_bytes)
        return items

    def tail(self, fewest: int) -> list[Any]:
        """Return the items after a window, if they are fewer than that: they belong to it."""
        self.note_state()
        items = self.take(fewest)
        if len(items) < fewest:
            return items
        self._ahead = items
        return []

    def note_state(self) -> None:
        """Note the state of the source, which is at the beginning of a window."""
        self.state = None
        if self._source is not None and not self._over and not self._ahead:
            source = copy.deepcopy(self._source.state_dict())
            self.state = {"position": self._read, "source": source}

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
                self._read, self._opened = stop, iter(shard[stop - begun :])
            else:
                self._some(stop - self._read, keep=False)

    def go_to(self, cursor: StreamCursor) -> None:
        """Go to the first sample of a cursor's checksum, before anything is read.

        Raises:
            StateMismatchError: there are fewer items; or the item after the source's state is
                another one than it was.
        """
        saved = cursor.source
        if self._source is not None and saved is not None:
            self._read, self.state = saved["position"], saved
            with suppress(Exception):  # an error of the source means a wrong state, too
                self._source.load_state_dict(copy.deepcopy(saved["source"]))
                self._ahead = self._some(1)
            if [*map(checksum_of, self._ahead)] != ([saved["item"]] if "item" in saved else []):
                raise StateMismatchError("the source's load_state_dict restores another item")
        self.skip_to(cursor.checked)
        if self._read < cursor.checked:
            raise StateMismatchError(
                f"the state was saved after {cursor.start} items of the source, which has only "
                f"{self._read}: pass the source of the state"
            )

    def place(self, position: int) -> tuple[int, int]:
        """Return the shard of an item that was read, by name, and its place within the shard."""
        number = bisect_right(self._starts, position) - 1
        return self._shards[number][0], position - self._starts[number]

    def _some(self, n: int, most_bytes: int | None = None, *, keep: bool = True) -> list[Any]:
        """Read the next items of this shard, at most n; if there are fewer, go to the next shard.

        Args:
            n: at least 1.
            most_bytes: reading stops as soon as the items have them; `None`: no limit.
            keep: `False`: the items are skipped.
        """
        _, shard = self._shards[len(self._starts) - 1]
        before, torch_worker._worker_info = torch_worker._worker_info, self._worker_info
        self._generators.restore()
        items: list[Any] = []
        number, held, kept = 0, 0, KeptBytes()
        try:
            if self._opened is None:
                opens = callable(shard) and not hasattr(shard, "__iter__")
                self._opened = iter(shard() if opens else shard)
            # `islice` calls its `__iter__`, which may start an object of a user's class over.
            method = getattr(type(self._opened), "__iter__", None)
            is_own = isinstance(method, WrapperDescriptorType)
            some = islice(self._opened, n) if is_own else map(next, repeat(self._opened, n))
            if not keep:
                number = sum(1 for _ in some)
            elif most_bytes is None:
                items = list(some)
            else:
                for item in some:
                    items.append(item)
                    held += kept.add(item)
                    if held >= most_bytes:
                        break
        except Exception as error:
            text = f"{self._next} cannot be read: {type(error).__name__}: {error}"
            raise SampleError(text) from error
        finally:
            self._generators = RandomState.take(devices=False)
            torch_worker._worker_info = before
        if items and self.state is not None and self.state["position"] == self._read:
            self.state.setdefault("item", checksum_of(items[0]))
        number += len(items)
        self._read += number
        self.read_bytes += held
        if number < n and (most_bytes is None or held < most_bytes):
            if isinstance(shard, Sequence) and len(shard) != self.place(self._read)[1]:
                raise SampleError(f"{self._next} is missing: expected {len(shard)} items")
            self._next_shard()
        return items

    @property
    def _next(self) -> str:
        shard, offset = self.place(self._read)
        return f"item {offset} or one soon after it, of shard {shard},"

    def _next_shard(self) -> None:
        self.close()
        self._starts.append(self._read)


# ---------------------------------------------------------------------- bytes of samples


class KeptBytes:
    """Counts bytes of everything that samples keep alive: tensors, arrays, text, nested in any way.

    A tensor or an array counts the whole storage that it is a part of. An object of 256 bytes or
    more, or a storage, that several samples share counts once. O(objects in a sample).

    >>> kept, noise = KeptBytes(), np.zeros(1000)
    >>> kept.add([noise]) >= 8000 > kept.add([noise])
    True
    """

    def __init__(self) -> None:
        self._counted: set[int] = set()  # of objects and storages that these samples keep alive

    def add(self, sample: Any) -> int:
        """Return the bytes that a sample adds to those before it."""
        held, _, shared = self._count(sample)
        self._counted |= shared
        return held

    def without_rest(self, sample: Any) -> tuple[Any, int]:
        """Return a sample without what it keeps alive but does not use, and the bytes it adds.

        Tensors and arrays that are a part of something twice as large are copied, such as a crop.

        >>> crop = torch.zeros(1_000_000)[:10]
        >>> KeptBytes().add(crop) > 4_000_000 > 1000 > KeptBytes().without_rest(crop)[1]
        True
        """
        held, parts, shared = self._count(sample)
        if parts:
            sample = tree_map(lambda value: _copied(value) if id(value) in parts else value, sample)
            return sample, self.add(sample)
        self._counted |= shared
        return sample, held

    def _count(self, sample: Any) -> tuple[int, set[int], set[int]]:
        """Bytes that a sample adds; identities of parts of something larger, of what may recur."""
        total, parts, shared = 0, set[int](), set[int]()
        # The objects are kept, since another object may get the identity of a deleted one.
        seen: dict[int, Any] = {}
        waiting = [sample]
        while waiting:
            value = waiting.pop()
            number = id(value)
            if number in seen or number in self._counted or isinstance(value, _OF_PROGRAM):
                continue
            seen[number] = value
            referents: Any = ()
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                referents = [value.__reduce_ex__(2)]  # of a sparse or nested one, its parts
            elif isinstance(value, (torch.Tensor, np.ndarray)):
                storage, kept_bytes = _whole(value)
                if kept_bytes >= _MUCH_LARGER * value.nbytes + _OBJECT_BYTES:
                    parts.add(number)
                if storage not in shared and storage not in self._counted:
                    shared.add(storage)
                    total += kept_bytes
                total += _OBJECT_BYTES
                if value.dtype == object:
                    referents = value.ravel().tolist()
            else:
                own = sys.getsizeof(value, _OBJECT_BYTES)
                if isinstance(value, dict):
                    waiting += value  # its keys: those that are text are no referents
                elif hasattr(type(value), "getbands"):  # Pillow's pixels are no Python objects
                    own += 4 * value.width * value.height
                total += own
                if own >= _SHARED_BYTES:
                    shared.add(number)
                if not hasattr(type(value), "__next__"):  # iterators read objects of others
                    referents = gc.get_referents(value)
            if _NUMBERS.issuperset(map(type, referents)):  # a text's tokens: not one by one
                total += _NUMBER_BYTES * len(referents)
            else:
                waiting += referents
        return total, parts, shared


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value.clone()


def _whole(value: Any) -> tuple[int, int]:
    """Identity and bytes of the storage that a strided tensor or an array is a part of."""
    whole: Any = value
    while isinstance(getattr(whole, "base", None), (np.ndarray, torch.Tensor)):
        whole = whole.base
    if isinstance(whole, torch.Tensor):
        storage = whole.untyped_storage()
        return -storage._cdata, storage.nbytes()  # no other object has an identity below 0
    if isinstance(whole.base, mmap):  # a file's pages can be given back
        return id(value), value.nbytes
    if whole.base is not None:
        with suppress(TypeError):  # it may have no buffer
            return id(whole.base), max(memoryview(whole.base).nbytes, whole.nbytes)
    return id(whole), whole.nbytes
