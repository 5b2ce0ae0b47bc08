"""The trial: one real worker makes a few batches, and its memory is read between them."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchbudget.errors import OptionError
from torchbudget.machine.high_water import restart_peak
from torchbudget.machine.host import allow_more_descriptors, shared_memory
from torchbudget.machine.process_tree import ProcessPages, mapped_data_bytes, process_pages

# A data set that is slow to read gets at least 8 batches, a fast one as many as 2 seconds allow.
_ALWAYS: Final = 8
_TRIAL_S: Final = 2.0
# A batch is tried where /dev/shm has room for three (the one in use, the next and one being made),
# half as large again as the batches before foretell.
_ROOM: Final = 3 * 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """The result of a trial, in bytes.

    The first four have one item for each batch that was made; without the first batch, during which
    a worker imports.

    Attributes:
        numbers: places of the batches in the list that was given.
        storages: bytes of each tensor's storage, which a worker hands over in a file of `/dev/shm`
            of its own; a storage that several tensors share counts once.
        plain: bytes of everything else (text, NumPy arrays, objects), sent through a pipe.
        building: bytes that the worker took beside the batch while it read its samples and made it.
        private: the most memory that the worker had between batches and shared with no other
            process: its heap, its imports, its copies of this process's pages.
        copied_each: bytes of this process's memory that the worker copied per element in the second
            half of the trial: Python counts references in the objects, so that reading is writing.
        common: bytes of this process's memory that the worker had not copied in the end.
        starting: bytes that a worker takes while it starts, beside `private`.
    """

    numbers: Sequence[int]
    storages: Sequence[tuple[int, ...]]
    plain: Sequence[int]
    building: Sequence[int]
    private: int
    copied_each: float = 0.0
    common: int = 0
    starting: int = 0


def try_batches(
    loader: DataLoader[Any], batches: Sequence[list[int]], elements: Sequence[int]
) -> Trial:
    """Let one worker make batches one after the other, and read its memory between them.

    The data set is read in the worker only; of a stream, a copy.

    Args:
        loader: gives the data set, the collate and the way workers start.
        batches: lists of indices, at least two, the first two of them small; of a stream, numbers.
        elements: about the elements of each batch, at least 1, in any unit: batches that could
            overflow `/dev/shm`, by what those before took, are left out.

    Raises:
        MachineError: the worker's memory cannot be read.
    """
    numbers: list[int] = []
    readings: list[ProcessPages] = []
    found: list[tuple[tuple[int, ...], int]] = []  # of the batches that came
    children, pool, mapped = _children(), shared_memory(), 0  # bytes of mapped data files

    def watched() -> Iterator[list[int]]:
        # The loader asks for the next list when the worker has handed over a batch and is idle.
        nonlocal mapped
        [pid] = _children() - children
        ends = time.monotonic() + _TRIAL_S
        for number, batch in enumerate(batches):
            if len(numbers) >= _ALWAYS and time.monotonic() > ends:
                break
            each = [sum(one[0]) / elements[n] for n, one in zip(numbers, found, strict=False)]
            if pool is None or _ROOM * max(each, default=0) * elements[number] <= pool.free_bytes:
                readings.append(process_pages(pid))
                restart_peak(pid)
                numbers.append(number)
                yield batch
        readings.append(process_pages(pid))
        mapped = mapped_data_bytes(pid)

    for batch in _with_one_worker(loader, watched()):
        found.append(batch_bytes(batch))
        del batch
    storages, plain = zip(*found[1:], strict=True)
    amounts = [elements[number] for number in numbers]
    half = (len(amounts) + 1) // 2  # of what followed the first batch
    settled, middle, last = readings[1], readings[half], readings[-1]
    sent = 0 if forks(loader) else len(ForkingPickler.dumps(loader.dataset))
    # What building leaves in the heap is in `private`, and is used again.
    highest = max(one.anonymous for one in readings[1:])
    return Trial(
        numbers=numbers[1:],
        storages=storages,
        plain=plain,
        building=[
            _building(before, after, sum(one), highest)
            for (before, after), one in zip(pairwise(readings[1:]), storages, strict=True)
        ],
        # Pages of mapped data may be dirty still, and are then no private pages of files.
        private=max(one.private + max(0, one.private_file - mapped) for one in readings[1:]),
        copied_each=max(0, middle.common - last.common) / max(1, sum(amounts[half:])),
        common=last.common,
        starting=max(0, settled.peak_resident - settled.resident) + sent,
    )


class StreamBatches(Dataset[Any]):
    """The batches of a stream by number, as a worker reads them one after the other.

    A stream that ends starts over.

    Args:
        stream: that yields batches; a copy is read.
        convert: what a `DataLoader` does with each.
    """

    def __init__(self, stream: IterableDataset[Any], convert: Callable[[Any], Any]) -> None:
        self._stream, self._convert = copy.copy(stream), convert
        self._batches: Iterator[Any] = iter(())

    def __getitem__(self, number: int) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return self._convert(batch)
            self._batches = iter(self._stream)
        raise OptionError("the data set yields no batch, so the bytes of a batch are unknown")


def batch_bytes(batch: Any) -> tuple[tuple[int, ...], int]:
    """Bytes of each storage of a batch, and of everything else in it; whatever its structure.

    O(bytes that are not in tensors).

    >>> storages, plain = batch_bytes({"ids": torch.zeros(3, 5), "labels": torch.zeros(3)})
    >>> storages
    (60, 12)
    """
    file = io.BytesIO()
    weigher = _Weigher(file, protocol=pickle.HIGHEST_PROTOCOL)
    weigher.storages = {}
    weigher.dump(batch)
    # An empty storage has no file.
    return tuple(size for size in weigher.storages.values() if size), len(file.getbuffer())


class _Weigher(pickle.Pickler):
    """Pickle a batch without the contents of its tensors, whose storages are noted."""

    storages: dict[int, int]

    def persistent_id(self, obj: Any) -> int | None:
        # A sparse tensor is pickled as the dense ones that it consists of.
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return None
        storage = obj.untyped_storage()
        self.storages[storage._cdata] = storage.nbytes()
        return id(obj)


def _start(start: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker as the user's function does, after a full garbage collection.

    Every worker of a long run collects some time, and so copies the headers of this process's
    objects. A worker that runs out of open files while it sends a batch waits forever.
    """
    allow_more_descriptors()
    gc.collect()
    if start is not None:
        start(worker)


def forks(loader: DataLoader[Any]) -> bool:
    """Whether workers share this process's memory when they start."""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    return bool(context.get_start_method() == "fork")


def _with_one_worker(loader: DataLoader[Any], order: Iterator[list[int]]) -> DataLoader[Any]:
    """The same loader with one worker that makes one batch ahead.

    It draws nothing from the global generators.
    """
    dataset: Any = loader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    return DataLoader(
        StreamBatches(dataset, loader.collate_fn) if is_stream else dataset,
        batch_sampler=order,
        collate_fn=itemgetter(0) if is_stream else loader.collate_fn,
        num_workers=1,
        prefetch_factor=1,
        worker_init_fn=partial(_start, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )


def _building(before: ProcessPages, after: ProcessPages, batch_bytes: int, highest: int) -> int:
    """Bytes beside the batch and beyond the highest anonymous memory between batches.

    Pages of files are not counted, which stay.
    """
    stays = max(0, after.file - before.file) + max(0, highest - before.anonymous)
    return max(0, after.peak_resident - before.resident - batch_bytes - stays)


def _children() -> set[int]:
    return {one.pid for one in multiprocessing.active_children() if one.pid}
