"""The samples that a process keeps in memory together: a window, or as much as the bytes allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.data.sizes.sizes_of import check_first_axis_of
from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.data.stream.generators import numbers_put_aside, sample_seed
from torchbudget.data.stream.pipeline import Item, transformed
from torchbudget.data.stream.progress import Progress
from torchbudget.data.stream.reader import Reader
from torchbudget.data.stream.sample_bytes import without_rest
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import SampleError, SizesError

_log: Final = logging.getLogger("torchbudget")
_FEWEST: Final = 8  # samples of one size: fewer may be alike by chance
# Items are read several at once, since a source's random generators take 0.1 ms to exchange: until
# they have this part of the look-ahead.
_PART_AT_ONCE: Final = 32
# Items that each thread is given at once with a look-ahead, which does not count them, and without.
_FOR_A_THREAD: Final = (2, 64)


@dataclass(frozen=True, slots=True, eq=False)
class BufferedSamples:
    """Samples that are in memory together.

    Attributes:
        cursor: where they begin.
        samples: in the order in which they were read.
        following: where the samples after them begin; a pass, if they are the last of one.
        sizes: theirs, where sizes are taken; `None`: they were not, yet.
    """

    cursor: StreamCursor
    samples: list[Any]
    following: StreamCursor
    sizes: npt.NDArray[Any] | None = None


class Windows:
    """The windows of one process, one after the other.

    A window is a fixed run of `window` items of the reading order. If fewer items than ranks follow
    it, they belong to it. It is cut in parts where the bytes of the look-ahead are spent.

    Args:
        settings: of the stream.
        slot: of this process.
        progress: where skipped samples are counted.

    Attributes:
        empty_passes: passes that were read since a micro-batch came, which the reader notes.
        largest_buffered_bytes: the most bytes that samples in memory had.
    """

    def __init__(self, settings: Settings, slot: WorkerSlot, progress: Progress) -> None:
        self._settings, self._slot, self._progress = settings, slot, progress
        self._endless = settings.batches_per_epoch is not None
        self._look_ahead = settings.look_ahead_of(slot)
        # Items that a window needs; 1 finds out where a pass ends, of which the last batch drops.
        self._fewest = settings.ranks if settings.ranks > 1 or settings.drop_last else 0
        self._reader: Reader | None = None
        self._warned = False
        self._has_checked_axes = False  # that sizes are of the ragged one
        self.empty_passes = 0
        self.largest_buffered_bytes = 0

    def read(self, cursor: StreamCursor) -> Iterator[BufferedSamples]:
        """Yield the samples that are in memory together: a window, or as many as the bytes allow.

        Raises:
            SampleError: an item cannot be read, or the source has none.
            StateMismatchError: the source ends before `cursor`.
        """
        parts = None
        while True:
            with numbers_put_aside:
                if parts is None or (self._reader is not None and self._reader.was_moved):
                    parts = self._parts(cursor)
                buffered = next(parts, None)
            if buffered is None:
                return
            cursor = buffered.following
            yield buffered

    def _parts(self, cursor: StreamCursor) -> Iterator[BufferedSamples]:
        """Those of the passes from a cursor on."""
        settings, slot, length = self._settings, self._slot, self._settings.window
        split = settings.source.split
        at_once = settings.threads * _FOR_A_THREAD[self._look_ahead is None]
        with ThreadPoolExecutor(settings.threads or 1, "torchbudget") as threads:
            pipeline = partial(transformed, settings=settings, threads=threads, at_once=at_once)
            while self._endless or not cursor.number:
                following, mine, left = cursor.next_pass(), 0, int(cursor.start > 0)
                reader, before = settings.source.open(slot, cursor), self._reader
                self._reader = reader
                reader.go_to(cursor, before)
                while not reader.ended:
                    stop, window = cursor.start // length * length + length, cursor.window(length)
                    if split == "none" and window % slot.workers != slot.worker:
                        reader.skip_to(stop)
                        reader.tail(self._fewest)
                        cursor = self._after(reader, cursor)
                        continue
                    for buffered in self._window(reader, cursor, stop, pipeline):
                        cursor, mine = buffered.following, mine + 1
                        if buffered.samples:
                            left += 1
                            yield buffered
                self._check_pass(reader.position, none_left=mine > 0 and not left)
                cursor = following

    def _check_pass(self, items: int, *, none_left: bool) -> None:
        """A pass over so many items has ended.

        Raises:
            SampleError: there were none, or none of them became a sample, and nobody else reads.
        """
        slot = self._slot
        parts = slot.part(self._settings.source.split)[1]
        self.empty_passes += 1
        # The same number of micro-batches in each pass can be dealt to so many ranks after as many
        # passes. Until a batch comes, that may be needed three times: a state has done the first
        # ones already, and the last round of the next ones waits for those after them.
        most_empty = 3 * slot.workers * (self._settings.ranks + 1) + 1
        missing = self._endless and self.empty_passes > most_empty
        if missing or (not items and (self._endless or parts == 1)):
            raise SampleError(
                f"the source has no samples for worker {slot.worker} of {slot.workers}: use fewer "
                "workers where batches_per_epoch asks each for some. Or are its files missing, or "
                "is an iterator inside it used up after one epoch? Open it in __iter__, or in the "
                "function"
            )
        if none_left and not self._endless:
            text = (
                "none of the items that were read became a sample: transforms dropped them, or "
                "they were skipped; see skipped_samples, oversize= and on_error="
            )
            if parts == slot.workers == 1:
                raise SampleError(text)
            _log.warning("worker %d of %d, rank %d: %s", slot.worker, slot.workers, slot.rank, text)

    def _after(self, reader: Reader, cursor: StreamCursor) -> StreamCursor:
        """Where the window after that of `cursor` begins."""
        if reader.ended:
            return cursor.next_pass()
        return cursor._replace(start=reader.position, rounds=0, source=reader.state)

    def _window(
        self, reader: Reader, cursor: StreamCursor, stop: int, pipeline: Callable[..., Any]
    ) -> Iterator[BufferedSamples]:
        """The samples of one window from `cursor` on, all at once or as many as the bytes allow."""
        begun, waiting, buffered_bytes, look_ahead = cursor, list[Any](), 0, self._look_ahead
        if not self._settings.transforms and look_ahead is None:
            waiting = reader.take(stop - cursor.start)
            waiting += reader.tail(self._fewest)
        else:
            run_bytes = None if look_ahead is None else look_ahead // _PART_AT_ONCE
            runs = iter(lambda: reader.run(stop - reader.position, run_bytes), [])
            tail = map(reader.tail, [self._fewest])  # not before the whole window is made
            made = chain.from_iterable(
                pipeline(self._items(reader, cursor, some)) for some in (runs, tail)
            )
            position = cursor.start - 1
            for samples in made:  # not enumerated, which would keep what copies were made of
                position += 1
                if isinstance(samples, SampleError):
                    self._skip_failed(1, samples)
                    continue
                needed = 0
                if look_ahead is not None:
                    kept = [without_rest(sample) for sample in samples]
                    samples, needed = [one for one, _ in kept], sum(size for _, size in kept)
                    full = buffered_bytes + needed > look_ahead
                    if full and waiting and position < stop:
                        following = cursor._replace(start=position, rounds=0)
                        yield self._measured(BufferedSamples(begun, waiting, following))
                        begun, waiting, buffered_bytes = following, [], 0
                waiting += samples
                buffered_bytes += needed
                self.largest_buffered_bytes = max(self.largest_buffered_bytes, buffered_bytes)
        following = self._after(reader, cursor)
        yield self._measured(BufferedSamples(begun, waiting, following))

    def _items(
        self, reader: Reader, cursor: StreamCursor, runs: Iterable[list[Any]]
    ) -> Iterator[Item]:
        key = self._settings.source.seed, cursor.first_epoch, cursor.number
        for values in runs:
            values.reverse()
            while values:  # an item that was made into samples is not kept here
                name = reader.place(reader.position - len(values))
                yield name, sample_seed(*name, *key), values.pop()

    def _measured(self, buffered: BufferedSamples) -> BufferedSamples:
        """With sizes, and without the samples that have none or are too large."""
        settings, samples, first = self._settings, buffered.samples, buffered.cursor.start
        if not (samples and settings.sized):
            return buffered
        try:
            sizes = sizes_of_all(samples, settings.size, first)
        except SizesError as error:
            sized = []
            for sample in samples:
                with suppress(SizesError):
                    size_of(sample, settings.size, 0)
                    sized.append(sample)
            if len(sized) == len(samples):
                raise  # each has one, but of other axes
            self._skip_failed(len(samples) - len(sized), error)
            return self._measured(replace(buffered, samples=sized))
        settings.grouping.check(sizes)
        if not self._has_checked_axes and len(sizes) >= _FEWEST:
            check_first_axis_of(samples, settings.size, sizes, "size")
            self._has_checked_axes = True
        over = settings.grouping.oversized(sizes, first)
        if over.size:
            self._progress.count_skipped(self._slot.worker, oversize=over.size)
            stays = np.delete(np.arange(len(sizes)), over)
            samples, sizes = [samples[place] for place in stays.tolist()], sizes[stays]
        return replace(buffered, samples=samples, sizes=sizes)

    def _skip_failed(self, number: int, error: Exception) -> None:
        """Count samples that failed, or raise where none may be skipped."""
        if not self._settings.skip_failed:
            raise error
        if not self._warned:
            _log.warning("%s; it is skipped, and others like it", error)
            self._warned = True
        self._progress.count_skipped(self._slot.worker, failed=number)
