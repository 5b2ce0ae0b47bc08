"""One process reads a stream: its micro-batches, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torchbudget.data.stream.cursor import Progress, StreamCursor, WorkerSlot
from torchbudget.data.stream.source import Settings
from torchbudget.data.stream.windows import Found, Windows
from torchbudget.errors import SampleError


@dataclass(slots=True)
class Standing:
    """The place of a process. Not frozen, since each batch moves it.

    Attributes:
        slot: of the process.
        cursor: after the last micro-batch.
        ended: a batch was asked for after the last one.
    """

    slot: WorkerSlot
    cursor: StreamCursor
    ended: bool = False


class EpochReader(Iterator[Any]):
    """The micro-batches of one process, from a cursor to the end of its epoch.

    Args:
        settings: of the stream.
        slot: of this process.
        cursor: where it begins.
        progress: of all processes.
        compare: see `Windows`.

    Attributes:
        standing: where it stands.
        counts: the epoch's end is noted for all processes.
        present: whose first element is the standing that was moved last.
        on_end: called with this reader at the epoch's end.
        planned: the padded size of the last batch, and its number of samples.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        cursor: StreamCursor,
        progress: Progress,
        compare: Callable[[int, int], object],
    ) -> None:
        self._settings, self._progress = settings, progress
        self._windows = Windows(settings, slot, progress, compare)
        self._batches: Iterator[Found] = self._windows.micro_batches(cursor)
        self.planned: tuple[list[int] | None, int] = None, 0
        self.go_on(slot, cursor)

    def go_on(self, slot: WorkerSlot, cursor: StreamCursor) -> None:
        """Begin the next epoch where this one ended, with the samples that are in memory."""
        self.standing = Standing(slot, cursor)
        self.counts = False
        self.present: list[Standing | None] = [None]
        self.on_end: Callable[[], Callable[[EpochReader], object] | None] | None = None
        self._runs = self._progress.runs

    @property
    def first_sizes(self) -> int | None:
        """A digest of the sizes in the first window, where ranks share it."""
        return self._windows.first_sizes

    def __next__(self) -> Any:
        at = self.present[0] = self.standing
        try:
            left = iter(()) if at.cursor.finished else self._batches
            samples, rounds, (batch, padded_size) = next(left)
            collate_fn, self.planned = self._settings.collate_fn, (padded_size, len(batch))
            if collate_fn is not list:  # else the batch is the samples themselves
                batch = collated(collate_fn, batch)
        except StopIteration:
            at.ended = True
            self.end()
            raise
        except BaseException:
            self.close()  # the next call meets the same error, and not the next batch
            raise
        epoch, to_come = at.cursor.epoch, at.cursor.to_come
        _, start, _, first_epoch, number, _, _, source, checked, checksum = samples
        if to_come is not None:
            to_come -= 1
        place = epoch, start, rounds, first_epoch, number, to_come, False
        at.cursor = StreamCursor(*place, source, checked, checksum)
        if to_come == 0:
            self.end()
        return batch

    def find_end(self) -> bool:
        """End the epoch if nothing is left of it, before a batch is asked for; whether it did.

        `StatefulDataLoader` saves a finished epoch as it stood after its last batch. It then has
        workers that load that state begin the next loop at once, or starts new ones.
        """
        at = self.standing
        first = None if at.cursor.finished else next(self._batches, None)
        if first is None:
            at.cursor = at.cursor._replace(finished=True)
        else:
            self._batches = chain([first], self._batches)
        return first is None

    def end(self) -> None:
        """Note that the epoch has no more batches."""
        at = self.standing
        at.cursor = at.cursor._replace(finished=True)
        if self.counts:
            self._progress.end(at.cursor.epoch, at.slot.worker, at.slot.workers, self._runs)
        on_end = self.on_end and self.on_end()
        if on_end is not None:
            on_end(self)

    def close(self) -> None:
        """End the threads, close the source and drop the samples in memory."""
        at = self.standing.cursor
        batches, self._batches = self._batches, self._windows.micro_batches(at)
        if isinstance(batches, Generator):
            batches.close()


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return the batch that a user's function makes.

    Raises:
        SampleError: it raised `StopIteration`, which would be taken for the epoch's end.
    """
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise SampleError(
            f"collate_fn={collate_fn!r} raised StopIteration, which would end the epoch in "
            "silence: it called next() on an iterator that has no more"
        ) from error


def raising(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at its first batch."""
    yield from ()
    raise error
