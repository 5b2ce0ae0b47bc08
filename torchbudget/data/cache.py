"""Samples that are expensive to read: kept once they were read, or several of them per read.

`SampleCache` keeps samples, as bytes, in memory that all workers share. A `ReaderDataset` reads
samples by identity, several per read.
"""

from __future__ import annotations

import copy
import fcntl
import io
import mmap
import os
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from torchbudget.checks import at_least_one
from torchbudget.errors import BudgetError, OptionError, SampleError
from torchbudget.machine.process_tree import touched_bytes
from torchbudget.protocols import MapStyle
from torchbudget.units import format_bytes, parse_bytes

_NO_ROOM: Final = -1
# The table of contents begins with the bytes in use after the table, and the hits and misses of all
# processes. Then come the positions of the samples.
_HEAD: Final = np.dtype([("used", "q"), ("hits", "q"), ("misses", "q")])


Read = Callable[[Any], Any]


class SharedFile:
    """Bytes that forked and spawned processes share.

    It is a mapped file without a name, in memory if the system has `memfd_create`. So /dev/shm
    does not limit it, it is freed with the last process, and pages take memory when they are first
    written.

    A copy by plain `pickle` is an empty file of its own.

    Args:
        nbytes: the file's size.
    """

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("torchbudget")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, nbytes)
        self._open(descriptor, nbytes)
        self._maker = os.getpid()
        _MADE.add(self)

    def _open(self, descriptor: int, nbytes: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        self.nbytes = nbytes
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, nbytes)
        self._own: dict[int, threading.Lock] = {}  # one per process: a fork may copy a locked one

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other processes and threads; a killed process releases the lock."""
        # `lockf` locks out other processes, this one the threads of the same process.
        with self._own.setdefault(os.getpid(), threading.Lock()):
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def untouched_bytes(self, pids: Iterable[int]) -> int:
        """Its bytes that are not among the pages of these processes."""
        return max(0, self.nbytes - touched_bytes(os.fstat(self._descriptor), pids))

    def __getstate__(self) -> dict[str, Any]:
        shared = get_spawning_popen() is not None
        return {"nbytes": self.nbytes, "file": DupFd(self._descriptor) if shared else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["file"] is None:
            SharedFile.__init__(self, state["nbytes"])
        else:
            self._open(state["file"].detach(), state["nbytes"])


_MADE: Final[weakref.WeakSet[SharedFile]] = weakref.WeakSet()


def bytes_to_come(pids: Iterable[int]) -> int:
    """Bytes that files of this process will take beyond the pages of these processes.

    Each file counts as if it is full in the end. A file belongs to the process that made it.
    """
    pids, here = list(pids), os.getpid()  # a fork copies the set
    return sum(file.untouched_bytes(pids) for file in list(_MADE) if file._maker == here)


class SampleCache(Dataset[Any]):
    """A dataset that keeps its samples in memory, up to a budget, for all workers and epochs.

    Once a worker has read a sample, all workers of this and later epochs get it from memory that
    processes share, with any start method. They get a copy, which they may change. When the budget
    is full, the cache keeps its samples: an epoch reads each sample once, so replacing samples
    would not give more hits. If a tensor is a part of another one, only the part is kept.

    A killed worker loses only the sample that it was reading.

    Args:
        dataset: N samples that can be pickled. A sample must depend on its index alone: apply
            random transforms after the cache.
        budget: total bytes of the cache: the kept samples, 8 bytes for each sample of the dataset,
            and 24 bytes. They are a part of the host's budget: `loader_options` and `host_bytes`
            count all of them, in the process that made the cache.

    Raises:
        OptionError: the dataset is not map-style.
        BudgetError: the budget has no room for samples beside the table of contents, or this system
            does not give as much.
        SampleError: a sample cannot be pickled; raised when it is read.

    >>> cache = SampleCache([[1, 2], [3]], "1MiB")
    >>> cache[0], cache[0], cache.hits, cache.misses
    ([1, 2], [1, 2], 1, 1)
    """

    def __init__(self, dataset: MapStyle, budget: int | str) -> None:
        if not isinstance(dataset, MapStyle):
            raise OptionError(f"a cache needs a map-style dataset, got {type(dataset).__name__}")
        self.dataset = dataset
        self.budget = parse_bytes(budget)
        self._samples = len(dataset)
        self._table = _HEAD.itemsize + 8 * self._samples
        if self.budget <= self._table:
            raise BudgetError(
                f"a cache of {format_bytes(self.budget)} must exceed the table of its "
                f"{self._samples:,} samples, {format_bytes(self._table)}; give it a larger budget"
            )
        try:
            self._file = SharedFile(self.budget)  # all zeros: an empty cache
        except (OSError, OverflowError, ValueError) as error:
            raise BudgetError(
                f"this machine cannot allocate {format_bytes(self.budget)} for a cache: {error}; "
                "give it a smaller budget"
            ) from error

    # ------------------------------------------------------------------ the table of contents

    @property
    def _head(self) -> Any:
        """The record `_HEAD` in the shared memory."""
        return np.frombuffer(self._file.memory, _HEAD, 1)[0]

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """The position of each sample, `(N,)`: 0 if it is not kept, −1 if it had no room."""
        return np.frombuffer(self._file.memory, np.int64, self._samples, _HEAD.itemsize)

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """N."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """The sample; O(its bytes) if it is kept."""
        number = int(index) + (self._samples if index < 0 else 0)
        if not 0 <= number < self._samples:
            raise IndexError(f"index {index} is out of range for {self._samples} samples")
        place = self._places.item(number)
        if place > 0:
            self._count("hits")
            kept = memoryview(self._file.memory)[place:]
            return pickle.loads(kept)  # noqa: S301  (what `_keep` has written)
        sample = self.dataset[number]
        self._count("misses")
        self._keep(number, sample)
        return sample

    def _keep(self, number: int, sample: Any) -> None:
        # The room only shrinks: a sample that found none is not tried again.
        if self._places[number]:
            return
        pickled = io.BytesIO()
        try:
            _Pickler(pickled, self.budget - self.nbytes).dump(sample)
            size = pickled.tell()
        except _NoRoomError:
            size = self.budget
        except Exception as error:
            raise SampleError(
                f"sample {number}, of type {type(sample).__name__}, must be picklable for a cache: "
                f"{type(error).__name__}: {error}; convert it in the data set, or apply the "
                "transform that makes it after the cache"
            ) from error
        with self._file.locked():
            start = self._table + int(self._head["used"])
            if self._places[number]:
                return
            if start + size > self.budget:
                self._places[number] = _NO_ROOM
                return
            self._file.memory[start : start + size] = pickled.getbuffer()
            # The place is written last, as one word: killed before that, the sample is not kept.
            self._head["used"] = start + size - self._table
            self._places[number] = start

    def _count(self, kind: str) -> None:
        with self._file.locked():
            self._head[kind] += 1

    # ------------------------------------------------------------------ figures

    @property
    def hits(self) -> int:
        """Number of times that a kept sample was returned, in all processes."""
        return int(self._head["hits"])

    @property
    def misses(self) -> int:
        """Number of times that a sample was read from the dataset, in all processes."""
        return int(self._head["misses"])

    @property
    def kept(self) -> int:
        """The number of samples that are kept."""
        return int(np.count_nonzero(self._places > 0))

    @property
    def nbytes(self) -> int:
        """Bytes in use, the table of contents included; never above `budget`."""
        return min(self._table + int(self._head["used"]), self.budget)

    def __repr__(self) -> str:
        return (
            f"SampleCache({self.kept:,} of {self._samples:,} samples in "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.budget)}, {self.hits:,} hits, "
            f"{self.misses:,} misses)"
        )


# ------------------------------------------------------------------------------ samples as bytes


class _NoRoomError(Exception):
    """An array has more bytes than there is room for."""


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as arrays, without the storage around them.

    Raises:
        _NoRoomError: an array has more bytes than `room`.
    """

    def __init__(self, file: io.BytesIO, room: int) -> None:
        super().__init__(file, protocol=5)
        self._room = room

    def reducer_override(self, value: Any) -> Any:
        is_plain = (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and not (value.is_nested or value.is_quantized or value.requires_grad)
            and not value.__dict__
        )
        # Before it is copied: one that was expanded may have any number of bytes.
        if (is_plain or isinstance(value, np.ndarray)) and value.nbytes > self._room:
            raise _NoRoomError
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # a copy that may be changed
        if not is_plain:
            return NotImplemented
        elements = value.resolve_conj().resolve_neg().contiguous()
        words = elements.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (words, value.dtype, tuple(value.shape))


def _tensor(words: npt.NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(words).view(dtype).reshape(shape)


# ------------------------------------------------------------------------------ samples by identity


class ReaderDataset(Dataset[Any]):
    """A data set of samples that are read by identity: a file's name, a patient's number, a key.

    A read may return several variants (crops, slices, channels), each of which is a sample. With
    `read_target`, each sample is a pair of input and target.

    Sample i is variant `i % variants_per_read` of identity `i // variants_per_read`. In order,
    each identity is read once. For a shuffled order leave `variants_per_read` at 1, so that a
    sample is all that a read returns, and expand it in a stream: by `transforms.expand(list)`, or
    with `read_target` by `transforms.expand(transforms.unpack_args(zip))`.

    Args:
        identities: the identities to read.
        read: returns the input of an identity; if `variants_per_read` is above 1, a sequence of
            that many inputs.
        read_target: returns the target, or the targets, of an identity in the same way.
        variants_per_read: number of samples for each identity.

    Raises:
        OptionError: there are no identities, a function is not callable, or `variants_per_read`
            is not an int of at least 1.
        SampleError: a read returned another number of variants; raised when a sample is read.

    >>> reader = ReaderDataset(["ab", "cd"], list, variants_per_read=2)
    >>> len(reader), reader[3]
    (4, 'd')
    """

    def __init__(
        self,
        identities: Sequence[Any],
        read: Read,
        *,
        read_target: Read | None = None,
        variants_per_read: int = 1,
    ) -> None:
        if not len(identities):
            raise OptionError("a reader needs at least one identity, got none")
        for name, function in (("read", read), ("read_target", read_target)):
            if function is not None and not callable(function):
                raise OptionError(f"{name} must be a function of an identity, got {function!r}")
        self.identities = identities
        self.variants_per_read = at_least_one("variants_per_read", variants_per_read)
        self._read = read
        self._read_target = read_target
        self._last: tuple[int, list[Any]] = -1, []  # place and samples of the last read

    def __len__(self) -> int:
        """The number of samples: identities times variants."""
        return len(self.identities) * self.variants_per_read

    def __getitem__(self, index: int) -> Any:
        """Sample `index`."""
        number = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        place, variant = divmod(number, self.variants_per_read)
        if self.variants_per_read == 1:
            return self._samples(place)[0]
        last = self._last  # read once: another thread may read another place
        if last[0] != place:
            last = self._last = place, self._samples(place)
        # Variants may share memory, such as crops that overlap, or a target of all of them.
        return tree_map(_own, last[1][variant])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": (-1, [])}

    def _samples(self, place: int) -> list[Any]:
        identity = self.identities[place]
        inputs = self._variants(self._read, identity)
        if self._read_target is None:
            return inputs
        return list(zip(inputs, self._variants(self._read_target, identity), strict=True))

    def _variants(self, read: Read, identity: Any) -> list[Any]:
        found = read(identity)
        if self.variants_per_read == 1:
            return [found]
        if len(found) != self.variants_per_read:
            raise SampleError(
                f"expected {self.variants_per_read} variants of {identity!r}, "
                f"its read returned {len(found)}"
            )
        return list(found)


def _own(value: Any) -> Any:
    """A copy of a leaf of a sample; of a part of a tensor, that part alone."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)
