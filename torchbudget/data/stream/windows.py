"""The samples that a stream keeps in memory at a time: a window, or as much as the bytes allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.data.stream.pipeline import Failed, Item, Pipeline
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.source import Reader, WorkerSlot
from torchbudget.errors import SampleError, SizesError, StateMismatchError

_log: Final = logging.getLogger("torchbudget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where samples begin that are put into micro-batches together.

    Attributes:
        number: of the pass over the source, within the epoch.
        window: number of the window, over all passes.
        position: of the first item in the pass.
        left: items from there to the end of the window.
        source: a state of the source itself, at or before that position.
    """

    number: int = 0
    window: int = 0
    position: int = 0
    left: int
    source: dict[str, Any] | None = None


@dataclass(slots=True)
class BufferedSamples:
    """Samples that are in memory together.

    Attributes:
        start: where they begin.
        samples: in the order in which they were read.
        last: nothing follows in the pass.
        sizes: of the samples, once they were measured.
    """

    start: Start
    samples: list[Any]
    last: bool = False
    sizes: npt.NDArray[Any] | None = None


class Windows:
    """The windows of one process, one after the other.

    Args:
        settings: of the stream.
        slot: of this process.
        look_ahead: bytes of the samples that wait for their micro-batch; `None`: no limit.
        count_skipped: called with the kind and the number of samples that were skipped.
        endless: start over where the source ends.

    Attributes:
        next: where the samples after the last ones begin.
        num_batches: micro-batches so far, counted by the `EpochReader`.
        largest_buffered_bytes: the most bytes that samples in memory had.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        *,
        look_ahead: int | None,
        count_skipped: Callable[[str, int], None],
        endless: bool,
    ) -> None:
        self._settings = settings
        self._slot = slot
        self._look_ahead = look_ahead
        self._count_skipped = count_skipped
        self._endless = endless
        self._pipeline = Pipeline(settings.transforms, settings.threads, settings.source.describe)
        self._warned = False
        self.next = Start(left=settings.window)
        self.num_batches = 0
        self.largest_buffered_bytes = 0

    def close(self) -> None:
        """End the threads."""
        self._pipeline.close()

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """This process among those that share each window, and their number."""
        if self._settings.source.split == "ranks":
            return 0, 1
        return self._slot.rank, self._slot.ranks

    def read(self, epoch: int, start: Start) -> Iterator[BufferedSamples]:
        """Yield the samples that are in memory together: a window, or as many as the bytes allow.

        Raises:
            SampleError: an item cannot be read, or an endless source has none.
            StateMismatchError: the source ends before `start`.
        """
        settings, slot = self._settings, self._slot
        empty_passes = 0
        while not start.number or self._endless:
            reader = self._open(epoch, start)
            number, batches_before = start.number, self.num_batches
            while not reader.ended:
                if self._owner(start.window) == slot.worker:
                    yield from self._window(reader, epoch, start)
                    start = self.next
                else:
                    reader.skip(start.left)
                    reader.skip(self._tail(reader))
                    start = self._after(reader, start)
            if start.number == number:
                start = Start(number=number + 1, window=start.window, left=settings.window)
            empty_passes = empty_passes + 1 if self.num_batches == batches_before else 0
            if self._endless and (not reader.position or empty_passes > slot.workers + 1):
                raise SampleError(
                    f"the source has no samples for worker {slot.worker} of {slot.workers}, but "
                    "batches_per_epoch asks for some; use fewer workers"
                )

    def _open(self, epoch: int, start: Start) -> Reader:
        reader = self._settings.source.open(self._slot, epoch=epoch, number=start.number)
        if start.source is not None:
            reader.load(start.source)
        reader.skip(start.position - reader.position)
        if reader.position < start.position:
            raise StateMismatchError(
                f"the state is that after {start.position} items of the source, which has "
                f"{reader.position}: it is another source"
            )
        return reader

    def _measure(self, buffered: BufferedSamples) -> None:
        """Take the sizes, and skip samples that have none or are too large."""
        settings, first = self._settings, buffered.start.position
        if not settings.sized or not buffered.samples:
            return
        try:
            buffered.sizes = sizes_of_all(buffered.samples, settings.size, first)
        except SizesError as error:
            if not settings.skip_failed:
                raise
            failed = [i for i, one in enumerate(buffered.samples) if not self._has_size(one)]
            if not failed:
                raise  # each has one, but of other axes
            self._skip_failed(len(failed), error)
            _remove(buffered, failed)
            self._measure(buffered)
            return
        over = settings.grouping.oversized(buffered.sizes, first)
        if over.size:
            self._count_skipped("oversize", over.size)
            buffered.sizes = np.delete(buffered.sizes, over, axis=0)
            _remove(buffered, over.tolist())

    def _has_size(self, sample: Any) -> bool:
        try:
            size_of(sample, self._settings.size, 0)
        except SizesError:
            return False
        return True

    def _skip_failed(self, number: int, error: Exception) -> None:
        if not self._warned:
            _log.warning("%s; it is skipped, and others like it", error)
            self._warned = True
        self._count_skipped("failed", number)

    def _owner(self, window: int) -> int:
        if self._settings.source.split == "none":
            return window % self._slot.workers
        return self._slot.worker

    def _after(self, reader: Reader, start: Start) -> Start:
        """Where the window after that of `start` begins."""
        window, left = start.window + 1, self._settings.window
        if reader.ended:
            return Start(number=start.number + 1, window=window, left=left)
        source = reader.state()
        return replace(start, window=window, position=reader.position, left=left, source=source)

    def _tail(self, reader: Reader) -> int:
        """How many items follow a window, if they are too few to be dealt and so belong to it."""
        ranks = self.rank_and_ranks[1]
        if ranks == 1 and not self._settings.drop_last:
            return 0
        follow = reader.peek(ranks)
        return follow if follow < ranks else 0

    def _window(self, reader: Reader, epoch: int, start: Start) -> Iterator[BufferedSamples]:
        """The samples of one window, all at once or as many as the bytes allow."""
        settings, look_ahead = self._settings, self._look_ahead
        left = start.left - (reader.position - start.position)
        buffered = BufferedSamples(start, [])
        if not settings.transforms and look_ahead is None:
            buffered.samples = reader.take(left)
            buffered.samples += reader.take(self._tail(reader))
            yield from self._last_of_window(reader, buffered)
            return
        buffered_bytes = 0
        items = self._items(reader, left)
        for position, samples in self._pipeline(items, settings.seed, epoch, start.number):
            if isinstance(samples, Failed):
                if not settings.skip_failed:
                    raise samples.error
                self._skip_failed(1, samples.error)
                continue
            needed = 0 if look_ahead is None else sum(map(held_bytes, samples))
            full = look_ahead is not None and buffered_bytes + needed > look_ahead
            if full and buffered.samples:
                left = start.left - (position - start.position)  # below 0 in a window's tail
                self.next = replace(start, position=position, left=max(left, 0))
                self._measure(buffered)
                if buffered.samples:
                    yield buffered
                buffered = BufferedSamples(self.next, [])
                buffered_bytes = 0
            buffered.samples += samples
            buffered_bytes += needed
            self.largest_buffered_bytes = max(self.largest_buffered_bytes, buffered_bytes)
        yield from self._last_of_window(reader, buffered)

    def _last_of_window(
        self, reader: Reader, buffered: BufferedSamples
    ) -> Iterator[BufferedSamples]:
        buffered.last = reader.ended
        self._measure(buffered)
        self.next = self._after(reader, buffered.start)
        if buffered.samples:
            yield buffered

    def _items(self, reader: Reader, left: int) -> Iterator[Item]:
        for _ in range(left):
            yield from self._item(reader)
        for _ in range(self._tail(reader)):
            yield from self._item(reader)

    @staticmethod
    def _item(reader: Reader) -> Iterator[Item]:
        position = reader.position
        for value in reader.take(1):
            yield Item(position, reader.place(position), value)


def _remove(buffered: BufferedSamples, places: Iterable[int]) -> None:
    removed = set(places)
    buffered.samples = [one for i, one in enumerate(buffered.samples) if i not in removed]
