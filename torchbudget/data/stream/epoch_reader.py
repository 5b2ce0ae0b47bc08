"""One process reads a stream: its micro-batches, and where it stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, repeat
from types import NoneType
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from torch.utils.data import get_worker_info

from torchbudget.data.padded_sizes import PaddedSizes
from torchbudget.data.sizes.key import sizes_of_all
from torchbudget.data.stream.cursor import StreamCursor, StreamState
from torchbudget.data.stream.progress import Progress
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.data.stream.tracking import collated
from torchbudget.data.stream.windows import BufferedSamples, Windows
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.solver import WindowKey
from torchbudget.units import format_bytes

# Samples of one batch, and the padded size that was planned; `None` where none was.
_MicroBatch: TypeAlias = tuple[list[Any], list[int] | None]
# With where it stands after it: samples cut together, and how many of their rounds are done.
_Found: TypeAlias = tuple[StreamCursor, int, _MicroBatch]


@dataclass  # without slots, since readers refer to it weakly: they end where it is dropped
class Loops:
    """The loops of a process since an epoch was chosen; those before it do not count any more.

    Attributes:
        state: at which the epoch begins: it was loaded, or is the end of a tracked loop.
        changes: how often an epoch was chosen or a state loaded, in any process, until then.
        present: the reader of the one that was asked for a batch last; of a loop inside another
            one, until that one goes on.
        number: of the tracked one that began last.
        tracked: where it stands; `None`: not known yet.
        process: its number.
    """

    state: StreamState | None = None
    changes: int = 0
    present: EpochReader | None = None
    number: int | None = None
    tracked: StreamState | None = None
    process: int = field(default_factory=os.getpid)


class EpochReader(Iterator[Any]):
    """The micro-batches of one process, from a cursor to the end of its epoch.

    Args:
        settings: of the stream.
        slot: of this process.
        cursor: where it begins.
        progress: of all processes.

    Attributes:
        slot: of this process.
        began: the cursor at which the epoch's first micro-batch was read.
        finished: whether the epoch's last micro-batch was read.
        loops: a weak reference to those among which it is the present one when it is asked for a
            batch.
        windows: that it reads.
        first_sizes: a digest of the sizes in the first window, where ranks share it.
        compare: with other ranks, the worker's number and that digest.
    """

    def __init__(
        self, settings: Settings, slot: WorkerSlot, cursor: StreamCursor, progress: Progress
    ) -> None:
        self.slot = slot
        self.loops: Callable[[], Loops | None] = NoneType
        self._settings, self._progress = settings, progress
        self._padded_sizes = PaddedSizes(settings.size_multiple)
        self.first_sizes: int | None = None
        self.compare: Callable[[int, int], object] = _never
        self.windows = Windows(settings, slot, progress)
        self._batches: Iterator[_Found] = self._read(cursor)
        self.go_on(cursor)

    def go_on(self, cursor: StreamCursor) -> None:
        """Begin the next epoch where this one ended, with the samples that are in memory."""
        self.began = self._samples = cursor
        self._rounds = cursor.rounds
        self._to_come, self.finished = cursor.to_come, cursor.finished
        # A worker may come to the end when the loop that it reads for was broken off.
        self._opened = None if get_worker_info() is None else self._progress.opened

    @property
    def cursor(self) -> StreamCursor:
        """After the last micro-batch."""
        epoch, rounds = self.began.epoch, self._rounds
        return self._samples.within(epoch, rounds, self._to_come, finished=self.finished)

    def __next__(self) -> Any:
        loops = self.loops()
        if loops is not None:
            loops.present = self
        try:
            left = iter(()) if self.finished else self._batches
            samples, rounds, (batch, padded_size) = next(left)
            collate_fn = self._settings.collate_fn
            if collate_fn is not list:  # else the batch is the samples themselves
                number, batch = len(batch), collated(collate_fn, batch)
                if padded_size is not None:
                    self._padded_sizes.compare(batch, padded_size, number)
        except StopIteration:
            self._end_epoch()
            raise
        except BaseException:
            self.close()  # the next call meets the same error, and not the next batch
            raise
        self._samples, self._rounds, self.windows.empty_passes = samples, rounds, 0
        if self._to_come is not None:
            self._to_come -= 1
            if not self._to_come:
                self._end_epoch()
        return batch

    def find_end(self) -> None:
        """End the epoch if nothing is left of it, before a batch is asked for.

        `StatefulDataLoader` saves a finished epoch as it stood after its last batch. It then has
        workers that load that state begin the next loop at once, or starts new ones.
        """
        first = None if self.finished else next(self._batches, None)
        if first is None:
            self._end_epoch()
        else:
            self._batches = chain([first], self._batches)

    def _end_epoch(self) -> None:
        self.finished, slot = True, self.slot
        self._progress.end(self.began.epoch, slot.worker, slot.workers, opened=self._opened)

    def close(self) -> None:
        """End the threads, and drop the samples in memory."""
        self._batches = self._read(self.cursor)

    def _read(self, start: StreamCursor) -> Generator[_Found]:
        """Yield this rank's micro-batches, each with where it stands after it.

        That is where the samples begin that are cut together, and how many of their rounds are
        done. With several ranks the last round of the buffered samples waits for the next ones: at
        the end of the stream it is cut anew, with samples that cannot be dealt evenly alone.
        """
        ranks, look_ahead = self._settings.ranks, self._settings.look_ahead_of(self.slot)
        rank = self.slot.rank % ranks  # among those that share each window
        uneven: BufferedSamples | None = None  # cannot be dealt evenly alone
        last: list[_MicroBatch] = []  # the round that waits, and where it stands before it
        begun, before = start, 0
        for buffered in self.windows.read(start):
            if uneven is not None:
                samples = uneven.samples + buffered.samples
                if look_ahead is not None and sum(map(held_bytes, samples)) > look_ahead:
                    raise UnevenRanksError(
                        f"{len(uneven.samples)} samples fill the look-ahead of "
                        f"{format_bytes(look_ahead)}, and cannot be dealt evenly to {ranks} ranks: "
                        "allow more bytes, or use fewer ranks"
                    )
                buffered = BufferedSamples(uneven.cursor, samples, buffered.following)
            try:
                rounds = self._cut(buffered)
            except UnevenRanksError:
                uneven = buffered
                continue
            uneven = None
            # Nothing of these may be in memory while the next samples are read.
            buffered.samples.clear()
            if not rounds:
                continue
            if last:
                yield buffered.cursor, 0, last[rank]
            begun, before, last = buffered.cursor, len(rounds) // ranks - 1, rounds[-ranks:]
            yield from _rest(begun, 0, rounds[rank:-ranks:ranks])
            if ranks == 1:
                yield buffered.following, 0, last.pop()
            rounds.clear()
        if uneven is not None and not self._settings.drop_last:
            if not last:
                begun = uneven.cursor
            samples = [sample for batch, _ in last for sample in batch] + uneven.samples
            rounds = self._cut(BufferedSamples(begun, samples, start))
            yield from _rest(begun, before, rounds[rank::ranks])
        elif last:
            yield start.next_pass(), 0, last[rank]

    def _cut(self, buffered: BufferedSamples) -> list[_MicroBatch]:
        """The micro-batches: those of a round's ranks, then those of the next round.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        settings, samples, cursor = self._settings, buffered.samples, buffered.cursor
        sizes = buffered.sizes
        if settings.sized and sizes is None:
            sizes = sizes_of_all(samples, settings.size, cursor.start)
        if settings.ranks > 1 and self.first_sizes is None:
            self.first_sizes = len(samples) if sizes is None else crc32(sizes.tobytes())
            self.compare(self.slot.worker, self.first_sizes)
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
        return list(
            zip(map(np.ndarray.tolist, map(arranged.__getitem__, cuts)), padded, strict=False)
        )


def _rest(begun: StreamCursor, before: int, batches: list[_MicroBatch]) -> Iterator[_Found]:
    """One rank's micro-batches of samples that begin at a cursor, of which some rounds are done.

    Args:
        begun: the cursor.
        before: rounds of the samples before these.
        batches: of the rounds after them.
    """
    done = max(begun.rounds, before)
    return zip(repeat(begun), count(done + 1), batches[done - before :])


def _never(*_: int) -> None:
    """Compare nothing."""


def raising(error: Exception) -> Iterator[Any]:
    """An iterator that raises at its first batch."""
    yield from ()
    raise error
