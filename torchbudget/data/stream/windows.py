"""The samples that a process keeps in memory together: a window, or as much as the bytes allow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.first_axis import check_first_axis_of
from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.data.stream.generators import ReadingGenerators, sample_seed
from torchbudget.data.stream.pipeline import Item, Pipeline
from torchbudget.data.stream.progress import Progress
from torchbudget.data.stream.reader import Reader
from torchbudget.data.stream.sample_bytes import held_bytes, without_rest
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import SampleError, SizesError, StateMismatchError

_log: Final = logging.getLogger("torchbudget")
_FEWEST: Final = 8  # samples of one size: fewer may be alike by chance
# Items are read several at once, since a source's random generators take 0.1 ms to exchange: up to
# so many, and to this part of the look-ahead.
_MOST_AT_ONCE: Final = 1024
_PART_AT_ONCE: Final = 32


@dataclass(slots=True, eq=False)
class BufferedSamples:
    """Samples that are in memory together.

    Attributes:
        cursor: where they begin.
        samples: in the order in which they were read.
        following: where the samples after them begin.
        sizes: theirs, where sizes are taken; `None`: they were not, yet.
        last: nothing follows in the pass.
    """

    cursor: StreamCursor
    samples: list[Any]
    following: StreamCursor
    sizes: npt.NDArray[Any] | None = None
    last: bool = False


class Windows:
    """The windows of one process, one after the other.

    A window is a fixed run of `window` items of the reading order. If fewer items than ranks follow
    it, they belong to it. It is cut in parts where the bytes of the look-ahead are spent.

    Args:
        settings: of the stream.
        slot: of this process.
        progress: where skipped samples are counted.
        endless: start over where the source ends.

    Attributes:
        empty_passes: passes that were read since a micro-batch came, which the reader notes.
        largest_buffered_bytes: the most bytes that samples in memory had.
    """

    def __init__(
        self, settings: Settings, slot: WorkerSlot, progress: Progress, *, endless: bool
    ) -> None:
        self._settings = settings
        self._slot = slot
        self._look_ahead = settings.look_ahead_of(slot)
        self._progress = progress
        self._endless = endless
        self._pipeline = Pipeline(
            settings.transforms,
            settings.threads,
            settings.source.describe,
            at_once=None if self._look_ahead is None else 2 * settings.threads,
        )
        self._generators = ReadingGenerators()
        self._warned = False
        self._has_checked_axes = False  # that sizes are of the ragged one
        self._any_left = False  # of the items since the stream's beginning
        self._item_bytes = 0  # of the largest one so far, or of what became of it
        self._run = 1  # items that were read at once
        self.empty_passes = 0
        self.largest_buffered_bytes = 0

    def close(self) -> None:
        """End the threads."""
        self._pipeline.close()

    def read(self, cursor: StreamCursor) -> Iterator[BufferedSamples]:
        """Yield the samples that are in memory together: a window, or as many as the bytes allow.

        Raises:
            SampleError: an item cannot be read, or the source has none.
            StateMismatchError: the source ends before `cursor`.
        """
        parts, buffered = self._parts(cursor), None
        while True:
            with self._generators:
                if buffered is not None and self._reader.was_moved:
                    drawn = self._reader.drawn if buffered.following.start else None
                    parts = self._parts(buffered.following, drawn)
                buffered = next(parts, None)
            if buffered is None:
                return
            yield buffered

    def _parts(self, cursor: StreamCursor, drawn: Any = None) -> Iterator[BufferedSamples]:
        """Those of the passes from a cursor on; see `_open`."""
        while self._endless or not cursor.number:
            following = cursor.next_pass()
            reader = self._open(cursor, drawn)
            none_left, drawn = False, None
            while not reader.ended:
                left = self._settings.window - cursor.start % self._settings.window
                if self._is_mine(cursor):
                    yield from self._window(reader, cursor, left)
                    none_left = not self._any_left
                else:
                    reader.skip(left)
                    reader.skip(self._tail(reader))
                cursor = self._after(reader, cursor)
            self._check_pass(reader.position, none_left=none_left)
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
        missing = self._endless and (not items or self.empty_passes > most_empty)
        if missing or (parts == 1 and not items):
            raise SampleError(
                f"the source has no samples for worker {slot.worker} of {slot.workers}: are its "
                "files missing, or is an iterator inside it used up after one epoch? Open it in "
                "__iter__, or in the function. With batches_per_epoch each worker needs some"
            )
        if none_left and not self._endless:
            text = (
                "none of the items that were read became a sample: transforms dropped them, or "
                "they were skipped; see skipped_samples, oversize= and on_error="
            )
            if parts == slot.workers == 1:
                raise SampleError(text)
            _log.warning("worker %d of %d, rank %d: %s", slot.worker, slot.workers, slot.rank, text)

    def _open(self, cursor: StreamCursor, drawn: Any) -> Reader:
        """Start a pass at a cursor.

        Args:
            cursor: in the pass.
            drawn: where the source's generators stood at the cursor's state; `None`: not known.
        """
        self._any_left |= cursor.start > 0
        source, epoch, number = self._settings.source, cursor.first_epoch, cursor.number
        reader = source.open(self._slot, self._generators, epoch=epoch, number=number)
        reader.load(cursor.source)
        if drawn is not None:
            self._generators.of_source_now = drawn
        reader.skip(cursor.start - reader.position)
        if reader.position < cursor.start:
            raise StateMismatchError(
                f"the state is that after {cursor.start} items of the source, which has "
                f"{reader.position}: it is another source"
            )
        self._reader = reader
        return reader

    def _is_mine(self, cursor: StreamCursor) -> bool:
        if self._settings.source.split != "none":
            return True
        window = cursor.window(self._settings.window)
        return window % self._slot.workers == self._slot.worker

    def _after(self, reader: Reader, cursor: StreamCursor) -> StreamCursor:
        """Where the window after that of `cursor` begins."""
        if reader.ended:
            return cursor.next_pass()
        return cursor._replace(start=reader.position, rounds=0, source=reader.state())

    def _tail(self, reader: Reader) -> int:
        """How many items follow a window, if they are too few to be dealt and so belong to it."""
        ranks = self._settings.ranks
        if ranks == 1 and not self._settings.drop_last:
            return 0
        follow = reader.peek(ranks)
        return follow if follow < ranks else 0

    def _window(self, reader: Reader, cursor: StreamCursor, left: int) -> Iterator[BufferedSamples]:
        """The samples of one window from `cursor` on, all at once or as many as the bytes allow."""
        settings, look_ahead = self._settings, self._look_ahead
        waiting: list[Any] = []
        begun = cursor
        if not settings.transforms and look_ahead is None:
            waiting = reader.take(left)
            waiting += reader.take(self._tail(reader))
        else:
            stop, buffered_bytes = cursor.start + left, 0
            items = self._items(reader, cursor, left)
            for position, samples in enumerate(self._pipeline(items), cursor.start):
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
                        yield from self._measured(BufferedSamples(begun, waiting, following))
                        begun, waiting, buffered_bytes = following, [], 0
                waiting += samples
                buffered_bytes += needed
                self._item_bytes = max(self._item_bytes, needed)
                self.largest_buffered_bytes = max(self.largest_buffered_bytes, buffered_bytes)
        following = self._after(reader, cursor)
        yield from self._measured(BufferedSamples(begun, waiting, following, last=reader.ended))

    def _items(self, reader: Reader, cursor: StreamCursor, left: int) -> Iterator[Item]:
        """The items of a window and of its tail."""
        key = self._settings.source.seed, cursor.first_epoch, cursor.number
        counted = self._look_ahead is not None and self._settings.transforms
        stop = cursor.start + left
        while values := reader.take(
            min(self._next_run(left), max(stop - reader.position, 0)) or self._tail(reader)
        ):
            if counted:
                self._item_bytes = max(self._item_bytes, *map(held_bytes, values))
            for position, value in enumerate(values, reader.position - len(values)):
                name = reader.place(position)
                yield Item(name, sample_seed(*name, *key), value)

    def _next_run(self, left: int) -> int:
        """How many items are read at once, of those that are left."""
        if self._look_ahead is None:
            return left
        fit = self._look_ahead // (_PART_AT_ONCE * self._item_bytes) if self._item_bytes else 1
        # The larger ones may still come.
        self._run = min(max(fit, 1), 2 * self._run, _MOST_AT_ONCE)
        return self._run

    def _measured(self, buffered: BufferedSamples) -> Iterator[BufferedSamples]:
        """The samples with their sizes, without those that have none or are too large."""
        if buffered.samples and self._settings.sized:
            self._measure(buffered)
        if buffered.samples:
            self._any_left = True
            yield buffered

    def _measure(self, buffered: BufferedSamples) -> None:
        settings, samples, first = self._settings, buffered.samples, buffered.cursor.start
        try:
            sizes = sizes_of_all(samples, settings.size, first)
        except SizesError as error:
            sized = [one for one in samples if self._has_size(one)]
            failed = len(samples) - len(sized)
            if not failed:
                raise  # each has one, but of other axes
            self._skip_failed(failed, error)
            buffered.samples = sized
            if sized:
                self._measure(buffered)
            return
        settings.grouping.check(sizes)
        if not self._has_checked_axes and len(sizes) >= _FEWEST:
            check_first_axis_of(samples, settings.size, sizes, "size")
            self._has_checked_axes = True
        over = settings.grouping.oversized(sizes, first)
        if over.size:
            self._progress.count_skipped(self._slot.worker, oversize=over.size)
            stays = np.ones(len(sizes), np.bool_)
            stays[over] = False
            sizes = sizes[stays]
            buffered.samples = list(compress(samples, stays.tolist()))
        buffered.sizes = sizes

    def _has_size(self, sample: Any) -> bool:
        try:
            size_of(sample, self._settings.size, 0)
        except SizesError:
            return False
        return True

    def _skip_failed(self, number: int, error: Exception) -> None:
        """Count samples that failed, or raise where none may be skipped."""
        if not self._settings.skip_failed:
            raise error
        if not self._warned:
            _log.warning("%s; it is skipped, and others like it", error)
            self._warned = True
        self._progress.count_skipped(self._slot.worker, failed=number)
