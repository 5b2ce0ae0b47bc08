"""Where workers stood behind each of their last micro-batches, for the process that trains."""

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
_KEPT: Final = 256  # of each: loaders run that many micro-batches ahead at most
_FIELDS: Final = 6
_HEADER: Final = 8
_EPOCH, _ALL, _SHIFT, _SEED, _LOOP, _BEGUN, _MADE, _ENDED = range(_HEADER)
_ROW: Final = _HEADER + _KEPT * _FIELDS
_FIRST: Final = 3  # words before the first row: numbers of states, and whether any was written
_CURRENT, _USED_UP, _WRITTEN = range(_FIRST)
# Packed in half the time that an array's slice is written in.
_POSITION: Final = struct.Struct(f"{_FIELDS}q")


class Position(NamedTuple):
    """Where a worker stands, in numbers alone.

    Attributes:
        number: of the pass over the source.
        window: number of the window.
        position: of its first item that is not in a micro-batch yet, or of the window's.
        left: items from there to the end of the window.
        done: micro-batches from there that were given.
        to_come: those that are still to be given in the epoch; -1 where nobody says how many.
    """

    number: int
    window: int
    position: int
    left: int
    done: int
    to_come: int


END: Final = Position(-1, -1, -1, -1, -1, -1)


class Positions:
    """A row of shared memory for each worker, in which it notes where it stands.

    A `DataLoader` takes one micro-batch of each worker in turn, and no more of one that is at its
    end: how many were taken of all says how many of each.

    Workers, those that persist too, agree on whether a loop goes on from the state that was loaded:
    it does until one has gone on to its end.
    """

    def __init__(self) -> None:
        self._file = SharedFile(8 * (_FIRST + _WORKERS * _ROW))
        self._loaded: int | None = None  # number of this process's state; `None`: it is its own
        self._begun = 0  # loops, in this worker
        self._states[_WRITTEN] = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._states[_WRITTEN]:  # a copy, whose file is another one
            self._states[:] = self._loaded or 0, 0, 1

    def _row(self, worker: int) -> npt.NDArray[np.int64]:
        first = _FIRST + worker * _ROW
        return np.frombuffer(self._file.memory, np.int64, _ROW, offset=8 * first)

    @property
    def _states(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.memory, np.int64, _FIRST)

    # ------------------------------------------------------------------ states

    def clear(self, *, loaded: bool) -> None:
        """Loops begin elsewhere.

        Args:
            loaded: at a state.
        """
        number = time.monotonic_ns() if loaded else 0
        self._loaded = self._states[_CURRENT] = number
        self.forget()

    def forget(self) -> None:
        """No worker has begun."""
        for worker in range(_WORKERS):
            self._row(worker)[_ALL] = 0  # numbers of loops go on: who is still in one is not heard

    def leave_alone(self) -> None:
        """This worker begins at a state of its own, whatever the others do."""
        self._loaded = None

    @property
    def too_late(self) -> bool:
        """Whether a state was loaded since this worker was started."""
        return self._loaded is not None and self._states.item(_CURRENT) not in (0, self._loaded)

    def use_up(self, epoch: int) -> None:
        """Before a loop: note whether the one before has gone on to its end."""
        if self._loaded is None:
            return
        rows = self._rows(epoch)
        if rows and all(row[_ALL] and row[_ENDED] >= 0 for row in rows):
            self._states[_USED_UP] = self._states[_CURRENT]  # before any row is the new loop's

    @property
    def own(self) -> bool:
        """Whether this process begins at a state of its own, or none was loaded."""
        return self._loaded is None

    @property
    def goes_on(self) -> bool:
        """Whether loops begin at the state that was loaded."""
        if self._loaded is None:
            return True
        current, used_up, _ = self._states.tolist()
        return bool(current == self._loaded != used_up)

    # ------------------------------------------------------------------ positions

    def watch(
        self, worker: int, workers: int, *, epoch: int, shift: int, seed: int
    ) -> Callable[[Position], None] | None:
        """What a worker is to call with where it stands behind each micro-batch, and `END`.

        Args:
            worker: whose part of the source it reads.
            workers: of the loader.
            epoch: that is read.
            shift: which worker's micro-batch comes first.
            seed: of the workers that were started together.
        """
        self._begun += 1
        if worker >= _WORKERS or self._states.item(_CURRENT) not in (0, self._loaded):
            return None  # and not in the way of those that begin at the state that was loaded
        made = 0
        with self._file.locked():
            loop = self._next_loop((workers, seed))
            row = self._row(worker)
            row[:_HEADER] = epoch, workers, shift, seed, loop, self._begun, 0, -1
        memory, first = self._file.memory, _FIRST + worker * _ROW

        def note(at: Position) -> None:
            nonlocal made
            if row.item(_LOOP) != loop:
                return  # another loop has begun
            # A number is read while it is written: by NumPy in one go, where `struct` would put
            # zeros first.
            if at == END:
                row[_ENDED] = made
                return
            made += 1
            _POSITION.pack_into(memory, 8 * (first + _HEADER + made % _KEPT * _FIELDS), *at)
            row[_MADE] = made  # last: the position is there

        return note

    def _next_loop(self, team: tuple[int, int]) -> int:
        """The number of the loop that this worker begins.

        Workers that were started together have begun as many when they are in the same loop; one
        that is late begins those that the others have left already.
        """
        headers = [tuple(self._row(one)[:_HEADER].tolist()) for one in range(_WORKERS)]
        for one in headers:
            if (one[_ALL], one[_SEED]) == team:
                return int(one[_LOOP] + self._begun - one[_BEGUN])
        return 1 + int(max(one[_LOOP] for one in headers))

    def _rows(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Those of the last loop over this epoch; of a worker that has not begun, all zeros."""
        with self._file.locked():
            rows = [self._row(worker) for worker in range(_WORKERS)]
            begun = [row for row in rows if row[_ALL] and row[_EPOCH] == epoch]
        if not begun:
            return []
        last = max(begun, key=lambda row: row.item(_LOOP))
        workers = last.item(_ALL)
        if workers > _WORKERS:
            raise StateError(f"positions are kept of {_WORKERS} workers, this loader has {workers}")
        nothing = np.zeros_like(last)
        return [
            row if row[_ALL] and row[_LOOP] == last[_LOOP] else nothing for row in rows[:workers]
        ]

    def has_begun(self, epoch: int) -> bool:
        """Whether workers have begun to read this epoch."""
        return bool(self._rows(epoch))

    def after(self, batches_done: int, epoch: int) -> tuple[int, list[Position | None]]:
        """Where each worker stood when so many micro-batches had been taken in this epoch.

        Returns:
            Which worker's micro-batch follows, and the position of each; `None` where it has not
            given one.

        Raises:
            StateError: so many were not made, or too many since.
        """
        rows = self._rows(epoch)
        if not rows:
            raise StateError(f"nobody has read {batches_done} micro-batches of epoch {epoch}")
        shift = next(row.item(_SHIFT) for row in rows if row[_ALL])
        turns = [(worker + shift) % len(rows) for worker in range(len(rows))]
        ended = [rows[worker].item(_ENDED) if rows[worker][_ALL] else -1 for worker in turns]
        taken, following = in_turn(batches_done, [n if n >= 0 else None for n in ended])
        if -1 not in ended and sum(ended) == batches_done:
            return 0, [END] * len(rows)
        found: list[Position | None] = [None] * len(rows)
        for worker, count, length in zip(turns, taken, ended, strict=True):
            row = rows[worker]
            first = _HEADER + count % _KEPT * _FIELDS
            at = Position(*row[first : first + _FIELDS].tolist())
            ahead = row.item(_MADE) - count  # read behind the position, which may be written over
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
                found[worker] = END if count == length else at
        return turns[following], found


def in_turn(batches: int, lengths: Sequence[int | None]) -> tuple[list[int], int]:
    """How many of each worker, and whose turn it is, once so many were taken one by one in turn.

    Args:
        batches: taken.
        lengths: of the workers that are at their end.
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
    # The first one behind the last taken that has more; workers at their end are passed over.
    behind = [
        turn for turn, n in enumerate(lengths) if taken[turn] == low and (n is None or n > low)
    ]
    return taken, behind[0] if behind else 0
