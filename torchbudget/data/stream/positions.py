"""The positions of workers after each of their last micro-batches, for the process that trains."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchbudget.data.cache.shared_file import SharedFile
from torchbudget.errors import StateError

_WORKERS: Final = 128  # whose positions are kept
_KEPT: Final = 256  # of each: a loader may run that many micro-batches ahead
_FIELDS: Final = 6
_HEADER: Final = 8
_EPOCH, _WORKER_COUNT, _SHIFT, _SEED, _LOOP, _STARTED, _BATCHES, _ENDED = range(_HEADER)
_ROW: Final = _HEADER + _KEPT * _FIELDS
_FIRST: Final = 3  # words before the first row: numbers of states, and whether they were written
_CURRENT, _USED_UP, _WRITTEN = range(_FIRST)
# Twice as fast as writing to a slice of an array.
_POSITION: Final = struct.Struct(f"{_FIELDS}q")


class Position(NamedTuple):
    """The position of a worker, in numbers alone.

    Attributes:
        number: of the pass over the source.
        window: number of the window.
        position: of the first item in the pass that is not in a micro-batch yet, or of the window.
        left: items from there to the end of the window.
        done: micro-batches yielded from there.
        to_come: micro-batches still to be yielded in the epoch; -1 if that is unknown.
    """

    number: int
    window: int
    position: int
    left: int
    done: int
    to_come: int


END: Final = Position(-1, -1, -1, -1, -1, -1)


class Positions:
    """A row of shared memory for each worker, in which it records its positions.

    A `DataLoader` takes one micro-batch from each worker in turn, and skips workers that have
    ended. So the number taken from each follows from the number taken in all.

    All workers, persistent ones too, agree on whether a loop resumes from the loaded state: it does
    until one such loop has reached its end.
    """

    def __init__(self) -> None:
        self._file = SharedFile(8 * (_FIRST + _WORKERS * _ROW))
        self._loaded: int | None = None  # number of this process's state; `None`: its own, or none
        self._started = 0  # loops, in this worker
        self._states[_WRITTEN] = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._states[_WRITTEN]:  # a copy, with a file of its own
            self._states[:] = self._loaded or 0, 0, 1

    def _row(self, worker: int) -> npt.NDArray[np.int64]:
        first = _FIRST + worker * _ROW
        return np.frombuffer(self._file.memory, np.int64, _ROW, offset=8 * first)

    @property
    def _states(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.memory, np.int64, _FIRST)

    # ------------------------------------------------------------------ states

    def clear(self, *, loaded: bool) -> None:
        """Make loops begin elsewhere.

        Args:
            loaded: at a loaded state; otherwise at the epoch's beginning.
        """
        number = time.monotonic_ns() if loaded else 0
        self._loaded = self._states[_CURRENT] = number
        self.reset()

    def reset(self) -> None:
        """Clear the rows: no worker has started."""
        for worker in range(_WORKERS):
            # Loop numbers are kept, so that workers still in an old loop are ignored.
            self._row(worker)[_WORKER_COUNT] = 0

    def use_own_state(self) -> None:
        """Make this worker begin at a state of its own, whatever the others do."""
        self._loaded = None

    @property
    def loaded_too_late(self) -> bool:
        """Whether a state was loaded after this worker was started."""
        return self._loaded is not None and self._states.item(_CURRENT) not in (0, self._loaded)

    def note_finished_loop(self, epoch: int) -> None:
        """Before a loop: if the one before reached its end, the loaded state is used up."""
        if self._loaded is None:
            return
        rows = self._rows(epoch)
        if rows and all(row[_WORKER_COUNT] and row[_ENDED] >= 0 for row in rows):
            self._states[_USED_UP] = self._states[_CURRENT]  # before the new loop has a row

    @property
    def own_state(self) -> bool:
        """Whether this process begins at a state of its own, or none was loaded."""
        return self._loaded is None

    @property
    def resumes(self) -> bool:
        """Whether loops begin at the loaded state."""
        if self._loaded is None:
            return True
        current, used_up, _ = self._states.tolist()
        return bool(current == self._loaded != used_up)

    # ------------------------------------------------------------------ positions

    def recorder(
        self, worker: int, workers: int, *, epoch: int, shift: int, seed: int
    ) -> Callable[[Position], None] | None:
        """A function that a worker calls with its position after each micro-batch, and with `END`.

        Args:
            worker: whose part of the source it reads.
            workers: of the loader.
            epoch: that is read.
            shift: the worker whose micro-batch comes first.
            seed: of the workers that were started together.

        Returns:
            `None` if its positions are not kept.
        """
        self._started += 1
        if worker >= _WORKERS or self._states.item(_CURRENT) not in (0, self._loaded):
            return None  # it must not overwrite a row of those that begin at the loaded state
        batches = 0
        with self._file.locked():
            loop = self._next_loop((workers, seed))
            row = self._row(worker)
            row[:_HEADER] = epoch, workers, shift, seed, loop, self._started, 0, -1
        memory, first = self._file.memory, _FIRST + worker * _ROW

        def record(position: Position) -> None:
            nonlocal batches
            if row.item(_LOOP) != loop:
                return  # another loop has started
            # The header is read while it is written. NumPy writes a number at once; `struct` would
            # write zeros first.
            if position == END:
                row[_ENDED] = batches
                return
            batches += 1
            offset = 8 * (first + _HEADER + batches % _KEPT * _FIELDS)
            _POSITION.pack_into(memory, offset, *position)
            row[_BATCHES] = batches  # last, when the position is complete

        return record

    def _next_loop(self, team: tuple[int, int]) -> int:
        """The number of the loop that this worker starts.

        Workers of one team have started equally many loops when they are in the same one; a worker
        that is late starts those that the others have left already.
        """
        headers = [tuple(self._row(one)[:_HEADER].tolist()) for one in range(_WORKERS)]
        for one in headers:
            if (one[_WORKER_COUNT], one[_SEED]) == team:
                return int(one[_LOOP] + self._started - one[_STARTED])
        return 1 + int(max(one[_LOOP] for one in headers))

    def _rows(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Those of the last loop over this epoch; all zeros for a worker that has not started."""
        with self._file.locked():
            rows = [self._row(worker) for worker in range(_WORKERS)]
            started = [row for row in rows if row[_WORKER_COUNT] and row[_EPOCH] == epoch]
        if not started:
            return []
        last = max(started, key=lambda row: row.item(_LOOP))
        workers = last.item(_WORKER_COUNT)
        if workers > _WORKERS:
            raise StateError(f"positions are kept of {_WORKERS} workers, this loader has {workers}")
        nothing = np.zeros_like(last)
        return [
            row if row[_WORKER_COUNT] and row[_LOOP] == last[_LOOP] else nothing
            for row in rows[:workers]
        ]

    def has_started(self, epoch: int) -> bool:
        """Whether workers have started to read this epoch."""
        return bool(self._rows(epoch))

    def after(self, batches_done: int, epoch: int) -> tuple[int, list[Position | None]]:
        """The position of each worker after so many micro-batches were taken in this epoch.

        Returns:
            The worker whose micro-batch comes next, and the position of each worker; `None` if none
            was taken from it.

        Raises:
            StateError: fewer were made, or too many since.
        """
        rows = self._rows(epoch)
        if not rows:
            raise StateError(f"batches_done={batches_done}, but epoch {epoch} was not read yet")
        shift = next(row.item(_SHIFT) for row in rows if row[_WORKER_COUNT])
        turns = [(worker + shift) % len(rows) for worker in range(len(rows))]
        ended = [
            rows[worker].item(_ENDED) if rows[worker][_WORKER_COUNT] else -1 for worker in turns
        ]
        taken, following = in_turn(batches_done, [n if n >= 0 else None for n in ended])
        if -1 not in ended and sum(ended) == batches_done:
            return 0, [END] * len(rows)
        found: list[Position | None] = [None] * len(rows)
        for worker, count, length in zip(turns, taken, ended, strict=True):
            row = rows[worker]
            first = _HEADER + count % _KEPT * _FIELDS
            position = Position(*row[first : first + _FIELDS].tolist())
            # Read after the position, which may have been overwritten meanwhile.
            ahead = row.item(_BATCHES) - count
            if ahead < 0:
                raise StateError(
                    f"{batches_done} micro-batches are more than the workers have made: count "
                    "them from the beginning of this loop over the loader"
                )
            if ahead >= _KEPT - 1:
                raise StateError(
                    f"worker {worker} is {ahead} micro-batches ahead, and {_KEPT - 2} positions "
                    "are kept; lower prefetch_factor"
                )
            if count:
                found[worker] = END if count == length else position
        return turns[following], found


def in_turn(batches: int, lengths: Sequence[int | None]) -> tuple[list[int], int]:
    """How many were taken from each worker, and whose turn is next; one is taken from each in turn.

    Args:
        batches: taken from all workers.
        lengths: batches of each worker that has ended; `None` for others.
    """
    most = batches if None in lengths else max((n or 0 for n in lengths), default=0)
    low, high = 0, most
    while low < high:  # whole rounds
        middle = (low + high + 1) // 2
        if sum(middle if n is None else min(n, middle) for n in lengths) <= batches:
            low = middle
        else:
            high = middle - 1
    taken = [low if n is None else min(n, low) for n in lengths]
    rest = batches - sum(taken)
    for turn, length in enumerate(lengths):
        if rest and (length is None or length > low):
            taken[turn] += 1
            rest -= 1
    if rest:
        raise StateError(f"{batches} micro-batches are {rest} more than the epoch has")
    # Workers that have ended are passed over.
    following = [
        turn for turn, n in enumerate(lengths) if taken[turn] == low and (n is None or n > low)
    ]
    return taken, following[0] if following else 0
