"""One process reads a stream: its micro-batches, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from torchbudget.data.sizes.key import sizes_of_all
from torchbudget.data.stream.cursor import StreamCursor, WorkerSlot
from torchbudget.data.stream.progress import Progress
from torchbudget.data.stream.sample_bytes import KeptBytes
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.windows import BufferedSamples, Windows
from torchbudget.errors import SampleError, StateMismatchError, UnevenRanksError
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.solver import WindowKey
from torchbudget.units import format_bytes

# Samples of one batch, and the padded size that was planned; `None` where none was.
_MicroBatch: TypeAlias = tuple[list[Any], list[int] | None]
# With the place after it: samples cut together, and the number of their rounds that are done.
_Found: TypeAlias = tuple[StreamCursor, int, _MicroBatch]


@dataclass(slots=True)
class Standing:
    """The place of a process. Not frozen, since each batch moves it.

    Attributes:
        slot: of the process.
        began: the cursor at which the epoch began.
        samples: the cursor of the samples that are cut together.
        rounds: number of their micro-batches that are done.
        to_come: see `StreamCursor`.
        finished: see `StreamCursor`.
        ended: a batch was asked for after the last one.
    """

    slot: WorkerSlot
    began: StreamCursor
    samples: StreamCursor
    rounds: int
    to_come: int | None
    finished: bool
    ended: bool = False

    @classmethod
    def at(cls, slot: WorkerSlot, cursor: StreamCursor) -> Standing:
        """Return the place of a process that begins an epoch at a cursor."""
        return cls(slot, cursor, cursor, cursor.rounds, cursor.to_come, cursor.finished)

    @property
    def cursor(self) -> StreamCursor:
        """The cursor after the last micro-batch."""
        _, start, _, first_epoch, number, _, _, source, checked, checksum = self.samples
        epoch, to_come, finished = self.began.epoch, self.to_come, self.finished
        place = epoch, start, self.rounds, first_epoch, number, to_come, finished
        return StreamCursor(*place, source, checked, checksum)


class EpochReader(Iterator[Any]):
    """The micro-batches of one process, from a cursor to the end of its epoch.

    Args:
        settings: of the stream.
        slot: of this process.
        cursor: where it begins.
        progress: of all processes.
        compare: with other ranks: the worker's number and a digest of the sizes in its first
            window.

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
        self._windows = Windows(settings, slot, progress)
        self._rounds = _Rounds(settings, slot, self._windows, compare)
        self._batches: Iterator[_Found] = self._rounds.read(cursor)
        self._slot = slot
        self.planned: tuple[list[int] | None, int] = None, 0
        self.go_on(cursor)

    def go_on(self, cursor: StreamCursor) -> None:
        """Begin the next epoch where this one ended, with the samples that are in memory."""
        self.standing = Standing.at(self._slot, cursor)
        self.counts = False
        self.present: list[Standing | None] = [None]
        self.on_end: Callable[[], Callable[[EpochReader], object] | None] = _nobody
        self._runs = self._progress.runs

    @property
    def first_sizes(self) -> int | None:
        """A digest of the sizes in the first window, where ranks share it."""
        return self._rounds.first_sizes

    def __next__(self) -> Any:
        at = self.present[0] = self.standing
        try:
            left = iter(()) if at.finished else self._batches
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
        at.samples, at.rounds, self._windows.empty_passes = samples, rounds, 0
        if at.to_come is not None:
            at.to_come -= 1
            if not at.to_come:
                self.end()
        return batch

    def find_end(self) -> bool:
        """End the epoch if nothing is left of it, before a batch is asked for; whether it did.

        `StatefulDataLoader` saves a finished epoch as it stood after its last batch. It then has
        workers that load that state begin the next loop at once, or starts new ones.
        """
        first = None if self.standing.finished else next(self._batches, None)
        if first is None:
            self.standing.finished = True
        else:
            self._batches = chain([first], self._batches)
        return first is None

    def end(self) -> None:
        """Note that the epoch has no more batches."""
        at = self.standing
        at.finished = True
        if self.counts:
            self._progress.end(at.began.epoch, at.slot.worker, at.slot.workers, self._runs)
        on_end = self.on_end()
        if on_end is not None:
            on_end(self)

    def close(self) -> None:
        """End the threads, close the source and drop the samples in memory."""
        batches, self._batches = self._batches, self._rounds.read(self.standing.cursor)
        if isinstance(batches, Generator):
            batches.close()


class _Rounds:
    """Cuts the samples of a process and deals them to the ranks.

    It does not refer to what it yields from: an iteration that is dropped closes its source.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        windows: Windows,
        compare: Callable[[int, int], object],
    ) -> None:
        self._settings, self._slot, self._windows = settings, slot, windows
        self._compare = compare
        self.first_sizes: int | None = None

    def read(self, start: StreamCursor) -> Generator[_Found]:
        """Yield this rank's micro-batches, each with the place after it.

        A place is the beginning of the samples that are cut together, and the number of their
        rounds that are done. With several ranks the last round waits for the next samples: at the
        end of the stream it is cut anew, with samples that cannot be dealt evenly alone.

        Raises:
            StateMismatchError: samples whose first rounds are done are cut in other places.
        """
        try:
            yield from self._read(start)
        except _OtherCutsError:
            if not self._settings.source.may_seek:
                raise
        else:
            return
        self._settings.source.seeks = False  # it is skipped through from now on
        yield from self._read(start)

    def _read(self, start: StreamCursor) -> Generator[_Found]:
        ranks, look_ahead = self._settings.ranks, self._settings.look_ahead_of(self._slot)
        rank = self._slot.rank % ranks  # among those that share each window
        uneven: BufferedSamples | None = None  # cannot be dealt evenly alone
        last: list[_MicroBatch] = []  # the round that waits, and where it stands before it
        expected = start.checksum if start.rounds else None
        begun, before = start, 0
        for buffered in self._windows.read(start):
            if uneven is not None:
                kept = KeptBytes()
                samples = uneven.samples + buffered.samples
                if look_ahead is not None and sum(map(kept.add, samples)) > look_ahead:
                    raise UnevenRanksError(
                        f"{len(uneven.samples)} samples fill the look-ahead of "
                        f"{format_bytes(look_ahead)}, and cannot be dealt evenly to {ranks} ranks: "
                        "allow more bytes, or use fewer ranks"
                    )
                buffered = BufferedSamples(
                    uneven.cursor, samples, buffered.following, uneven.source, uneven.checksum
                )
            try:
                cuts, rounds = self._cut(buffered)
            except UnevenRanksError:
                uneven = buffered
                continue
            uneven = None
            at = buffered.cursor
            checksum = crc32(cuts, buffered.checksum)
            if expected not in (None, checksum):
                raise _OtherCutsError(
                    f"the window at item {at.start} has other sizes, or is cut in other places, "
                    "than when the state was saved: the source, its transforms, size= or the "
                    "predicate changed, or the source gives other items each time; go on with "
                    "what it was, or start over"
                )
            expected = None
            # Nothing of these may be in memory while the next samples are read.
            buffered.samples.clear()
            if not rounds:
                continue
            if last:
                yield at, 0, last[rank]
            before, last = len(rounds) // ranks - 1, rounds[-ranks:]
            begun = at._replace(source=buffered.source, checked=at.start, checksum=checksum)
            yield from _rest(begun, 0, rounds[rank:-ranks:ranks])
            if ranks == 1:
                yield buffered.following, 0, last.pop()
            rounds.clear()
        if uneven is not None and not self._settings.drop_last:
            if not last:
                begun = uneven.cursor
            samples = [sample for batch, _ in last for sample in batch] + uneven.samples
            _, rounds = self._cut(BufferedSamples(begun, samples, start))
            yield from _rest(begun, before, rounds[rank::ranks])
        elif last:
            yield start.next_pass(), 0, last[rank]

    def _cut(self, buffered: BufferedSamples) -> tuple[bytes, list[_MicroBatch]]:
        """Return the cuts, and the micro-batches of one round after the other.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        settings, samples, cursor = self._settings, buffered.samples, buffered.cursor
        sizes = buffered.sizes
        if settings.sized and sizes is None:
            sizes = sizes_of_all(samples, settings.size, cursor.start)
        if settings.ranks > 1 and self.first_sizes is None:
            self.first_sizes = len(samples) if sizes is None else crc32(sizes.tobytes())
            self._compare(self._slot.worker, self.first_sizes)
        key = WindowKey(
            seed=settings.source.seed,
            path=(cursor.first_epoch, cursor.number),
            places=np.array([cursor.start]),
            numbers=np.array([cursor.first_epoch + cursor.window(settings.window)]),
            shuffle=settings.source.shuffle,
        )
        rounds = settings.grouping.rounds(
            samples,
            sizes,
            Ranks(number=settings.ranks),
            key=key,
            drop_last=settings.drop_last and not buffered.following.start,
        )
        # An array of objects picks several times as fast as a list.
        arranged = np.fromiter(samples, dtype=object, count=len(samples))[rounds.places]
        padded: Iterable[list[int] | None] = rounds.padded_sizes or repeat(None)
        cuts = map(slice, rounds.starts, rounds.stops)
        batches = map(np.ndarray.tolist, map(arranged.__getitem__, cuts))
        return np.array(rounds.stops).tobytes(), list(zip(batches, padded, strict=False))


class _OtherCutsError(StateMismatchError):
    """The samples that a state has begun are other ones: see `StateMismatchError`."""


def _rest(begun: StreamCursor, before: int, batches: list[_MicroBatch]) -> Iterator[_Found]:
    """One rank's micro-batches of samples that begin at a cursor, of which some rounds are done.

    Args:
        begun: the cursor.
        before: rounds of the samples before these.
        batches: of the rounds after them.
    """
    done = max(begun.rounds, before)
    return zip(repeat(begun), count(done + 1), batches[done - before :])


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


def _nobody() -> None:
    """Stand for a dead weak reference."""


def raising(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at its first batch."""
    yield from ()
    raise error
