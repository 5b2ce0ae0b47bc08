"""Where workers stood behind each of their last micro-batches, for the process that trains."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.data.shared_file import SharedFile
from torchbudget.errors import StateError

_WORKERS: Final = 128
_KEPT: Final = 256  # positions of each worker: loaders run that many micro-batches ahead at most
_FIELDS: Final = 6  # number, window, position, left, micro-batches done there, those still to come
_HEADER: Final = 7
_EPOCH, _PROCESS, _ALL, _SHIFT, _BEGAN, _MADE, _ENDED = range(_HEADER)
_ROW: Final = _HEADER + _KEPT * _FIELDS
# Packed in half the time that an array's slice is written in.
_POSITION: Final = struct.Struct(f"{_FIELDS}q")
_COUNT: Final = struct.Struct("q")

Position: TypeAlias = tuple[int, ...]


class Positions:
    """A row of shared memory for each worker, in which it notes where it stands.

    A `DataLoader` takes one micro-batch of each worker in turn, and no more of one that is at its
    end: how many were taken of all says how many of each.
    """

    def __init__(self) -> None:
        self._file = SharedFile(8 * _WORKERS * _ROW)

    def _row(self, worker: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.memory, np.int64, _ROW, offset=8 * worker * _ROW)

    def clear(self) -> None:
        """Forget all: what follows begins elsewhere."""
        for worker in range(_WORKERS):
            row = self._row(worker)
            if row[_ALL]:
                row[:_HEADER] = 0

    def watch(
        self, worker: int, workers: int, *, epoch: int, shift: int
    ) -> Callable[[Position | None], None] | None:
        """What a worker is to call with where it stands behind each micro-batch, `None` at its end.

        Args:
            worker: whose part of the source it reads.
            workers: of the loader.
            epoch: that is read.
            shift: which worker's micro-batch comes first.
        """
        if worker >= _WORKERS:
            return None
        row, made = self._row(worker), 0
        row[:_HEADER] = epoch, os.getpid(), workers, shift, time.monotonic_ns(), 0, -1
        memory, words = self._file.memory, worker * _ROW

        def note(at: Position | None) -> None:
            nonlocal made
            if at is None:
                _COUNT.pack_into(memory, 8 * (words + _ENDED), made)
                return
            made += 1
            _POSITION.pack_into(memory, 8 * (words + _HEADER + made % _KEPT * _FIELDS), *at)
            _COUNT.pack_into(memory, 8 * (words + _MADE), made)  # last: the position is there

        return note

    def _rows(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Those of the last loop over this epoch; of a worker that has not begun, all zeros."""
        rows = [self._row(worker) for worker in range(_WORKERS)]
        begun = [row for row in rows if row[_ALL] and row[_EPOCH] == epoch]
        if not begun:
            return []
        workers = max(begun, key=lambda row: row.item(_BEGAN)).item(_ALL)
        if workers > _WORKERS:
            raise StateError(f"positions are kept of {_WORKERS} workers, this loader has {workers}")
        nothing = np.zeros_like(rows[0])
        same = (row[_ALL] == workers and row[_EPOCH] == epoch for row in rows[:workers])
        return [row if is_so else nothing for row, is_so in zip(rows, same, strict=False)]

    def elsewhere(self, epoch: int) -> bool:
        """Whether other processes have begun to read this epoch."""
        return any(row[_ALL] and row[_PROCESS] != os.getpid() for row in self._rows(epoch))

    def behind(self, batches_done: int, epoch: int) -> tuple[int, list[Position | None]]:
        """Where each worker stood when so many micro-batches had been taken in this epoch.

        Returns:
            Which worker's micro-batch follows, and the position of each: `()` where it began,
            `None` at its end.

        Raises:
            StateError: so many were not made, or too many since.
        """
        rows = self._rows(epoch)
        if not rows:
            raise StateError(f"nobody has read {batches_done} micro-batches of epoch {epoch}")
        shift = next(row.item(_SHIFT) for row in rows if row[_ALL])
        turns = [(worker + shift) % len(rows) for worker in range(len(rows))]
        ended = [rows[worker].item(_ENDED) if rows[worker][_ALL] else -1 for worker in turns]
        taken, following = _in_turn(batches_done, [n if n >= 0 else None for n in ended])
        if -1 not in ended and sum(ended) == batches_done:
            return 0, [None] * len(rows)
        found: list[Position | None] = [()] * len(rows)
        for worker, count, length in zip(turns, taken, ended, strict=True):
            row = rows[worker]
            ahead = row.item(_MADE) - count
            if ahead < 0:
                raise StateError(
                    f"{batches_done} micro-batches are more than the workers have made: count "
                    "them from the beginning of this loop over the loader"
                )
            if ahead >= _KEPT:
                raise StateError(
                    f"worker {worker} is {ahead} micro-batches ahead, and {_KEPT - 1} positions "
                    "are kept; lower prefetch_factor"
                )
            if count:
                first = _HEADER + count % _KEPT * _FIELDS
                at = tuple(row[first : first + _FIELDS].tolist())
                found[worker] = None if count == length else at
        return turns[following], found


def _in_turn(batches: int, lengths: Sequence[int | None]) -> tuple[list[int], int]:
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
