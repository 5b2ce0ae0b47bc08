"""A trial: one real worker reads a few batches, and its memory is read between them."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from torchbudget.data.loading.batch_bytes import BatchBytes, batch_bytes
from torchbudget.data.loading.in_flight import TriedBatch
from torchbudget.data.loading.loader_parts import LoaderParts
from torchbudget.errors import OptionError
from torchbudget.machine.limits import allow_more_descriptors
from torchbudget.machine.process_pages import (
    ProcessPages,
    mapped_data_bytes,
    process_pages,
    restart_peak,
)
from torchbudget.machine.process_tree import process_memory
from torchbudget.units import MiB

_SMALL: Final = 2  # batches that are tried whatever they need
_ALWAYS: Final = 8  # that are tried however long it takes
# While a worker still copies its parent's memory, what it will copy is guessed from few batches.
_COPYING_BYTES: Final = MiB(1)  # in as many batches as these
_COPYING: Final = 4
_SETTLED: Final = 64
_SETTLING_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """What a trial found; of a stream, `batches`, `private`, `sent` and `mapped` alone.

    Attributes:
        batches: that were made, in their order, without the first.
        numbers: which of the given batches they are.
        private: the most that the worker had between batches and no other process did: its heap,
            what it imported, what it has copied of its parent's.
        originals: what this process has written to since it forked, as it was before: all workers
            together keep that once.
        kept: how much of that came with reading: what the data set keeps of what it has read.
        reads: samples that it had read, at each reading of its memory.
        copied: how much of its parent's memory it had copied by then: a reference that is counted
            is written to.
        common: what it still had in common with its parent in the end, and may copy yet.
        starting: what it took while it started, beside `private`.
        sent: bytes in which the data set is sent to a worker that does not fork.
        mapped: of data files that it maps, which the kernel can take back.
    """

    batches: list[TriedBatch]
    numbers: list[int] = field(default_factory=list)
    private: int
    originals: int = 0
    kept: int = 0
    reads: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    common: int = 0
    starting: int = 0
    sent: int
    mapped: int

    def copied_after(self, samples: int) -> int:
        """What a worker will have copied of its parent's memory, beside `private`.

        Pages that were touched are not copied again, so that what comes with every sample falls:
        T·(1 − exp(−samples / τ)) through the middle and the end of the trial. No more than with the
        trial's mean, and than what is left to copy.
        """
        if not self.reads or not self.reads[-1] or samples <= self.reads[-1]:
            return 0
        read, copied = self.reads[-1], self.copied[-1]
        later = copied / read * (samples - read)
        middle = bisect_left(self.reads, read / 2)
        half, before = self.reads[middle], self.copied[middle]
        if 0 < before < copied and half < read:
            # In equal steps the remaining pages fall by the same factor.
            falls = ((copied - before) / (read - half)) / (before / half)
            if falls < 1:
                steps = (samples - read) / (read - half)
                sums = falls * (1 - falls**steps) / (1 - falls)
                later = min(later, (copied - before) * sums)
        return min(math.ceil(later), self.common)


class _StartsTrial:
    """Starts a worker as the user's function does, after a full garbage collection.

    One comes in every worker sooner or later, and copies what it writes to of the parent's objects.
    How many files it needs is not known yet: one that runs out of them while it sends a batch
    raises in a thread of its own, and the loop waits forever.
    """

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self.start = start

    def __call__(self, worker: int) -> None:
        allow_more_descriptors()
        gc.collect()
        if self.start is not None:
            self.start(worker)


class _Counter:
    """A file that only counts what is written."""

    bytes = 0

    def write(self, data: Any) -> int:
        """Count it."""
        size = memoryview(data).nbytes
        self.bytes += size
        return size


class _Watched:
    """The lists of indices of a trial, and the worker's memory before each and after the last.

    A loader of one worker that prefetches one batch asks for the next list when the worker has
    handed over its batch and is idle.

    Args:
        batches: lists of indices, small ones first.
        seconds: after which no further batch is begun, once a few were.
        fits: whether a batch may be tried, by its number; asked from the third one on.
    """

    def __init__(
        self, batches: Sequence[list[int]], seconds: float, fits: Callable[[int], bool]
    ) -> None:
        self.batches = batches
        self.fits = fits
        self.numbers: list[int] = []  # of the batches that were tried
        self.readings: list[ProcessPages] = []
        self.begun: list[float] = []  # when
        self.ends = time.monotonic() + seconds
        self.before = _children()
        self.pid = 0
        self.mapped = 0
        self.sibling = 0  # the process of one
        self.originals = 0

    def __iter__(self) -> Iterator[list[int]]:
        [self.pid] = _children() - self.before
        for number, batch in enumerate(self.batches):
            tried = len(self.numbers)
            in_time = tried < _ALWAYS or time.monotonic() < self.ends or self._copies_yet(tried)
            if tried < _SMALL or (in_time and self.fits(number)):
                self._read()
                self.numbers.append(number)
                self.begun.append(time.monotonic())
                yield batch
        self._read()
        self.mapped = mapped_data_bytes(self.pid)
        if self.sibling:
            self.originals = self._originals()

    def _copies_yet(self, tried: int) -> bool:
        """Whether the worker goes on copying this process's memory, and may be waited for."""
        copied = self.readings[-_COPYING - 1].common - self.readings[-1].common
        in_time = tried < _SETTLED and time.monotonic() < self.ends + _SETTLING_S
        return in_time and copied > _COPYING_BYTES

    def _originals(self) -> int:
        """What the worker and its sibling have, and neither is their own nor this process's."""
        processes = (os.getpid(), self.pid, self.sibling)
        distinct = sum(process_memory(pid).unreclaimable_bytes for pid in processes)
        here, worker, sibling = map(process_pages, processes)
        mapped = max(one.shared_memory for one in (here, worker))
        return max(0, distinct - here.anonymous - worker.private - sibling.private - mapped)

    def _read(self) -> None:
        """Read the worker's memory, and begin a new high-water mark."""
        self.readings.append(process_pages(self.pid))
        restart_peak(self.pid)


def try_batches(
    parts: LoaderParts,
    batches: Sequence[list[int]],
    *,
    seconds: float,
    fits: Callable[[int, Sequence[tuple[int, BatchBytes]]], bool],
) -> Trial:
    """Let one worker make batches one after the other, while its memory is read from here.

    The data set is read in the worker only, and the global generators are not drawn from.

    Args:
        parts: of the loader, of a map-style data set.
        batches: lists of indices, at least two, the first two of them small.
        seconds: after which no further batch is begun.
        fits: whether a batch may be tried, by its number, and by the numbers of those before it and
            what they weighed.

    Raises:
        MachineError: the worker's memory cannot be read.
    """
    weights: list[BatchBytes] = []

    def may_try(number: int) -> bool:
        return fits(number, [*zip(watched.numbers, weights, strict=False)])

    with _sibling(parts) as sibling:
        watched = _Watched(batches, seconds, may_try)
        watched.sibling = sibling
        times = _take(parts, watched, weights)
    return _trial_of(parts, watched, weights, times)


@contextmanager
def _sibling(parts: LoaderParts) -> Iterator[int]:
    """A process that is forked as the worker is, and waits: its number; 0 where none forks.

    What this process writes to meanwhile would else seem to be the worker's own.
    """
    if not parts.starts_by_fork:
        yield 0
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    sibling = context.Process(target=receiver.recv, daemon=True)
    sibling.start()
    try:
        yield sibling.pid or 0
    finally:
        sender.send(None)
        sibling.join()


def _take(parts: LoaderParts, watched: _Watched, weights: list[BatchBytes]) -> list[float]:
    """Take all batches of a trial, weigh them, and return how long each took."""
    loader = parts.loader(
        watched,
        num_workers=1,
        prefetch_factor=1,
        worker_init_fn=_StartsTrial(parts.worker_init_fn),
    )
    times: list[float] = []
    for batch in loader:
        times.append(time.monotonic() - watched.begun[len(times)])
        weights.append(batch_bytes(batch))
        del batch
    return times


def _trial_of(
    parts: LoaderParts,
    watched: _Watched,
    weights: Sequence[BatchBytes],
    times: Sequence[float],
) -> Trial:
    readings = watched.readings
    samples = [len(watched.batches[number]) for number in watched.numbers]
    # What building leaves in the heap is in `private` already, and is used again.
    highest = max(one.anonymous for one in readings[1:])
    tried = [
        TriedBatch(weight, _taken(before, after, weight, highest), elapsed, count)
        for before, after, weight, elapsed, count in zip(
            readings, readings[1:], weights, times, samples, strict=False
        )
    ]
    # Before its first batch a worker that does not fork was importing: that one tells nothing.
    settled, last = readings[1], readings[-1]
    # Pages of mapped data may be dirty still, and are then no private pages of files.
    private = max(one.private + max(0, one.private_file - watched.mapped) for one in readings[1:])
    return Trial(
        batches=tried[1:],
        numbers=watched.numbers[1 : len(tried)],
        private=private,
        originals=watched.originals,
        kept=highest - settled.anonymous,
        reads=tuple(accumulate(samples[1:], initial=0)),
        copied=tuple(max(0, settled.common - one.common) for one in readings[1:]),
        common=last.common,
        starting=max(0, settled.peak_resident - settled.resident),
        sent=0 if parts.starts_by_fork else _sent_bytes(parts.dataset),
        mapped=watched.mapped,
    )


def _taken(before: ProcessPages, after: ProcessPages, weight: BatchBytes, highest: int) -> int:
    """What a worker took beside its batch and beyond its highest anonymous memory between batches.

    Pages of files are not counted, which stay.
    """
    files = max(0, after.file - before.file)
    kept = max(0, highest - before.anonymous)
    return max(0, after.peak_resident - before.resident - files - sum(weight.storages) - kept)


def _children() -> set[int]:
    return {one.pid for one in multiprocessing.active_children() if one.pid}


def _sent_bytes(dataset: Any) -> int:
    """Bytes of a data set as it is sent to a worker that does not fork."""
    counter = _Counter()
    ForkingPickler(counter).dump(dataset)
    return counter.bytes


def try_stream(parts: LoaderParts, *, seconds: float, most: int) -> Trial:
    """Let one worker read batches of a data set that yields them, while its memory is read.

    The worker reads ahead, so that its highest use is known, but not what it is made of.

    Args:
        parts: of the loader, of an iterable data set of batches, which is a copy.
        seconds: from the first batch on, after which no further one is taken, once a few were.
        most: batches that are taken.

    Raises:
        MachineError: the worker's memory cannot be read.
        OptionError: the data set yields nothing.
    """
    before, ends = _children(), math.inf
    start = _StartsTrial(parts.worker_init_fn)
    batches = iter(parts.loader((), num_workers=1, prefetch_factor=1, worker_init_fn=start))
    [pid] = _children() - before
    tried: list[TriedBatch] = []
    readings: list[ProcessPages] = []
    begun = time.monotonic()
    for batch in batches:
        readings.append(process_pages(pid))
        elapsed, begun = time.monotonic() - begun, time.monotonic()
        tried.append(TriedBatch(batch_bytes(batch), 0, elapsed, 0))
        ends = min(ends, begun + seconds)  # the worker has started
        if len(tried) == most or (len(tried) >= _ALWAYS and begun > ends):
            break
    if not tried:
        raise OptionError("the data set yields no batch, so that nothing is known of its bytes")
    used = max(one.private + max(0, one.peak_resident - one.resident) for one in readings)
    return Trial(
        batches=tried,
        private=used,
        sent=0 if parts.starts_by_fork else _sent_bytes(parts.dataset),
        mapped=mapped_data_bytes(pid),
    )
