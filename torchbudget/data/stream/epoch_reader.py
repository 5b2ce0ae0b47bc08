"""One process reads a stream: its micro-batches, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torchbudget.data.stream.cursor import Standing, StreamCursor, WorkerSlot
from torchbudget.data.stream.windows import Found, Windows
from torchbudget.errors import OptionError, OtherNumbersWarning, SampleError
from torchbudget.plan.plan import ALL_DROPPED
from torchbudget.warn import warn

if TYPE_CHECKING:
    from torchbudget.data.stream.dataset import BudgetedIterableDataset


class EpochReader(Iterator[Any]):
    """The micro-batches of one process, from a cursor to the end of its epoch.

    Args:
        stream: stream that is read.
        slot: slot of this process.
        cursor: cursor at which it begins.
        turn: see `Standing`.

    Attributes:
        standing: its present position.
        windows: the windows that it reads.
        counts: number of runs when it began, if its end is noted for all processes.
        present: a list whose first element is the standing that was moved last.
        notes_end: the stream notes the epoch's end.
        planned: the padded size of the last batch, and its number of samples.
    """

    def __init__(
        self, stream: BudgetedIterableDataset, slot: WorkerSlot, cursor: StreamCursor, turn: int
    ) -> None:
        self._stream = stream
        self.windows = Windows(stream, slot)
        self._batches: Iterator[Found] = self.windows.micro_batches(cursor)
        self.planned: tuple[list[int] | None, int] = None, 0
        self.go_on(slot, cursor, turn)

    def go_on(self, slot: WorkerSlot, cursor: StreamCursor, turn: int) -> None:
        """Begin the next epoch where this one ended, with the samples that are in memory."""
        at, dealing = cursor, self._stream._dealing(slot)
        self.standing = Standing(slot, dealing, at.epoch, at, at.rounds, at.to_come, turn)
        self.counts: int | None = None
        self.present: list[Standing | None] = [None]
        self.notes_end = False

    def __next__(self) -> Any:
        at = self.present[0] = self.standing
        try:
            left = iter(()) if at.to_come == 0 else self._batches
            begun, rounds, (batch, padded_size, _) = next(left)
            collate_fn, self.planned = self._stream._collate_fn, (padded_size, len(batch))
            if collate_fn is not list:  # otherwise the batch is the list of samples itself
                batch = collated(collate_fn, batch)
        except StopIteration:
            self._check_dropped()
            at.ended = True
            self.end()
            raise
        except BaseException:
            self.close()  # the next call must not return the next batch
            raise
        at.begun, at.rounds = begun, rounds
        if at.to_come is not None:
            at.to_come -= 1
            if not at.to_come:
                self.end()
        return batch

    def _check_dropped(self) -> None:
        """Warn if `drop_last` has dropped each sample of the epoch in this process.

        Raises:
            OptionError: no other process has samples.
        """
        slot, begun, stream = self.standing.slot, self.standing.cursor, self._stream
        has_given = begun.start or begun.rounds or begun.number
        if has_given or not self.windows.samples or not stream._drop_last:
            return
        if slot.workers == slot.part(stream._source.split)[1] == 1:
            raise OptionError(ALL_DROPPED.format("samples of the epoch"))
        of = f"samples of worker {slot.worker} of {slot.workers} on rank {slot.rank}"
        warn(ALL_DROPPED.format(of), OtherNumbersWarning)

    def find_end(self) -> bool:
        """End the epoch if nothing is left of it, before the next batch; return whether it did.

        `StatefulDataLoader` saves a finished epoch as it stood after its last batch. It then has
        workers that load that state begin the next loop at once, or starts new ones.
        """
        at = self.standing
        first = None if at.to_come == 0 else next(self._batches, None)
        if first is None:
            at.to_come = 0
        else:
            self._batches = chain([first], self._batches)
        return first is None

    def end(self) -> None:
        """Note that the epoch has no more batches."""
        self.standing.to_come = 0
        if self.notes_end:
            self._stream._ended(self)

    def close(self) -> None:
        """End the threads, close the source and drop the samples in memory."""
        batches = self._batches
        self._batches = self.windows.micro_batches(self.standing.cursor)
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
            f"collate_fn={collate_fn!r} raised StopIteration, which would end the epoch without an "
            "error: in it, call next(iterator, None)"
        ) from error


def raising(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at its first batch."""
    yield from ()
    raise error
